"""Claims about the spectrum of a group's gradient matrix: C7 (rank), C8 (about 2), C9 (clusters), C10 (Table 1)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from grpo_sweeps import spectra
from grpo_sweeps.estimators import grpo, grpo_std, rloo
from grpo_sweeps.maths.feasibility import cell_range
from grpo_sweeps.paper import ABOUT_TWO, MARGIN, TABLE1
from grpo_sweeps.science.claim import EXACT, Estimate, ExactClaim, Prompt, agreement, judged, relative, worst
from grpo_sweeps.spectra.equal import distinct_rows, first_equal


def mixed_groups(o: Prompt, R: int, groups: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rewards (M, R) and scores (M, R, D) of drawn groups whose rewards differ, and for each rollout the first of its
    group with the same text (M, R)."""
    index = o.draw(groups, R, rng)
    index = index[np.ptp(o.r_N[index], axis=1) > 0]
    return o.r_N[index], o.psi_ND[index], first_equal(index)


def ranks(prompts: Sequence[Prompt], Rs: Sequence[int], rng: np.random.Generator, groups: int) -> ExactClaim:
    """C7: the numerical rank of drawn groups without repeated texts, raw and after centring the rows."""
    words, above, centred_above = [], 0, 0
    for R in Rs:
        raw, centred = [], []
        for o in prompts:
            rewards, psi, same = mixed_groups(o, R, groups, rng)
            different = np.asarray(distinct_rows(same)) == R
            grams = psi @ np.swapaxes(psi, 1, 2)
            weighted = spectra.weighted_gram(grams[different], grpo(rewards[different]))
            raw += list(np.atleast_1d(spectra.numerical_rank(weighted)))
            moved = spectra.centred_eigenvalues(weighted)
            centred += list(np.atleast_1d(spectra.rank_above(moved, spectra.graded_error(moved, weighted, 0.0))))
        above += int((np.array(raw) > R - 1).sum())
        centred_above += int((np.array(centred) > R - 1).sum())
        words.append(f"R={R}: {np.mean(np.array(raw) == R):.0%} of {len(raw)} groups have rank {R}")
    return judged(
        "C7",
        "False: the sum binds the advantages, not the rows. R rows of non-zero weight can have rank R; R - 1 is the "
        "bound after centring the rows. The paper's own R = 2 row, about 2 with at most 1, shows it.",
        f"{above} drawn groups have rank R; after centring {centred_above}",
        "; ".join(words) + " (no two rollouts alike)",
        "does not hold" if above else "holds",
    )


def about_two(prompts: Sequence[Prompt], Rs: Sequence[int], rng: np.random.Generator, groups: int) -> ExactClaim:
    """C8: the mean effective rank by R, the exact negative controls, and the closed form for orthogonal scores."""
    errors, words = [], []
    outside, inside = [], []
    for R in Rs:
        means, nulls = [], []
        for o in prompts:
            rewards, psi, _ = mixed_groups(o, R, groups, rng)
            A = grpo(rewards)
            ranks = _effective(psi, A)
            means.append(ranks)
            nulls.append(np.asarray(spectra.null_effective_rank(rewards.sum(axis=1), R)))
            flips = rng.choice([-1.0, 1.0], size=rewards.shape)
            errors += [relative(_effective(psi, w), ranks) for w in (A * flips, rloo(rewards), grpo_std(rewards))]
        pooled = Estimate.of(np.concatenate(means))
        outside.append(pooled.low > ABOUT_TWO + MARGIN or pooled.high < ABOUT_TWO - MARGIN)
        inside.append(pooled.low >= ABOUT_TWO - MARGIN and pooled.high <= ABOUT_TWO + MARGIN)
        words.append(f"R={R} {pooled}, null {np.concatenate(nulls).mean():.2f}")
    for R in Rs:
        k = np.arange(1, R)
        by_k = np.stack([np.concatenate([np.full(j, 1 - j / R), np.full(R - j, -j / R)]) for j in k])
        errors.append(relative(_effective(np.eye(R)[None], by_k), 4 * k * (R - k) / R))
    return judged(
        "C8",
        "No such theorem: signs of the weights cannot touch the spectrum of diag(w) K diag(w), nor can one factor a "
        "group, so leave-one-out and division by the standard deviation give the same rank exactly. Orthogonal "
        "scores of equal norm give 4k(R-k)/R, set by k and R, at least 4(R-1)/R.",
        "sign flips, leave-one-out and std against the group mean, 4k(R-k)/R against its spectrum: "
        f"{worst(errors):.1e}",
        "mean over mixed groups: " + "; ".join(words),
        "does not hold" if any(outside) else "holds" if all(inside) else "undecided",
        worst(errors),
    )


def _effective(psi: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Effective rank of each group's rows w_i psi_i, from the rows themselves: a Gram would square what is near
    zero."""
    return np.asarray(spectra.effective_rank(np.linalg.svd(weights[:, :, None] * psi, compute_uv=False)))


def clusters(prompts: Sequence[Prompt], rng: np.random.Generator, draws: int) -> ExactClaim:
    """C9: inner products of the scores of two rollouts: over all, within and between the classes."""
    errors, checks, directions = [], [], []
    for o in prompts:
        (p, right_D, _), (q, wrong_D, _) = o.group(True), o.group(False)
        errors.append(float(np.linalg.norm(o.p_N @ o.psi_ND)) / np.sqrt(o.e.trace_F))
        exact = np.array([right_D @ right_D, wrong_D @ wrong_D, right_D @ wrong_D])
        errors.append(relative(exact, o.signal * np.array([1 / p**2, 1 / q**2, -1 / (p * q)])))
        F = (o.psi_ND * o.p_N[:, None]).T @ o.psi_ND
        errors += [relative(o.e.trace_F2, float((F**2).sum())), relative(o.e.trace_F, float(np.trace(F)))]
        directions.append((o.e.trace_F**2 / o.e.trace_F2, int(np.linalg.matrix_rank(F))))
        i, j = o.draw(draws, 2, rng).T
        products = o.gram_NN[i, j]
        checks += [(Estimate.of(products), 0.0), (Estimate.of(products**2), o.e.trace_F2)]
        both = (o.r_N[i] > 0) & (o.r_N[j] > 0)
        if both.sum() > 30:
            checks.append((Estimate.of(products[both]), o.signal / p**2))
    return judged(
        "C9",
        "What tells is E<psi_i, psi_j>^2 = tr F^2: (tr F)^2 / tr F^2 directions. The mean product is zero for two "
        "rollouts whatever the clusters; ||grad J||^2/p^2 for two right ones, /q^2 for two wrong ones, -1/(pq) "
        "times it between.",
        f"four identities on each prompt: {worst(errors):.1e}; directions (of a rank): "
        + ", ".join(f"{d:.1f} ({rank})" for d, rank in directions),
        agreement(checks),
        "undefined" if worst(errors) < EXACT else "does not hold",
        worst(errors),
    )


def feasible() -> ExactClaim:
    """C10: the effective ranks that the printed top-1 fractions allow."""
    cells = {
        R: tuple(cell_range(row.top1_low, row.top1_high, R, averages) for averages in (False, True))
        for R, row in TABLE1.items()
    }
    words = [
        f"R={R}: {one[0]:.2f} to {one[1]:.2f} for one matrix, from {mean[0]:.2f} for averages"
        for R, (one, mean) in cells.items()
    ]
    possible = all(one[0] <= ABOUT_TWO + MARGIN and one[1] >= ABOUT_TWO - MARGIN for one, _ in cells.values())
    return judged(
        "C10",
        "The top-1 fraction bounds the rank. Each cell is possible; at R = 8 a rank near 2 wants nearly all energy "
        "in two values. Whether it is so for a model only measurement tells.",
        "; ".join(words),
        "",
        "possible" if possible else "does not hold",
    )
