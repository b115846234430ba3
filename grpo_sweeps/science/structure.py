"""Claims about what sets the spectrum besides a group's advantages: C16 (credit by token), C19 (clipping and KL), C20
(the groups of a step together), C21 (the order of the group sizes).

Groups are drawn; a claim falls or stands with an interval of 4.5 standard errors, by the margin of "about 2".
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from grpo_sweeps import spectra
from grpo_sweeps.estimators import grpo
from grpo_sweeps.exact import Enumeration, SoftmaxPolicy, TokenReward, several_prompts
from grpo_sweeps.maths.objective import kl_slope, surrogate
from grpo_sweeps.paper import ABOUT_TWO, LARGEST_TOP1, MARGIN
from grpo_sweeps.science.advantages import binomial
from grpo_sweeps.science.claim import EXACT, Estimate, ExactClaim, Judgement, Prompt, judged, worst
from grpo_sweeps.spectra.equal import first_equal, merged_weights
from grpo_sweeps.spectra.stacked import stacked_bounds
from grpo_sweeps.types import Array


def mixed(o: Prompt, R: int, groups: int, rng: np.random.Generator) -> np.ndarray:
    """Sequence numbers of drawn groups whose rewards differ, (M, R)."""
    index = o.draw(groups, R, rng)
    return index[np.ptp(o.r_N[index], axis=1) > 0]


def values_of(rows: Array) -> Array:
    """Singular values of each matrix of rows, (..., R, D) -> (..., at most R)."""
    return np.asarray(np.linalg.svd(rows, compute_uv=False))


def rank_and_null(rows_MRD: Array, index_MR: np.ndarray) -> tuple[Array, Array]:
    """Effective ranks (M,), and those of orthogonal rows with the same norms and equal texts made one."""
    norms_MR = np.linalg.norm(rows_MRD, axis=2)
    alone = merged_weights(norms_MR, first_equal(index_MR))
    return np.asarray(spectra.effective_rank(values_of(rows_MRD))), np.asarray(spectra.effective_rank(alone))


def uniform_rows(o: Prompt, index_MR: np.ndarray) -> Array:
    """A_i psi_i with the group mean's advantages, (M, R, D)."""
    return grpo(o.r_N[index_MR])[:, :, None] * o.psi_ND[index_MR]


def token_rows(o: Prompt, index_MR: np.ndarray) -> Array:
    """sum_t A_t grad log pi(x_t | s_t) with the true A_t = q(s_t, x_t) - v(s_t), (M, R, D)."""
    return o.e.contribution(o.e.advantages_NT).numpy()[index_MR]


def credit_by_token(prompts: Sequence[Prompt], Rs: Sequence[int], rng: np.random.Generator, groups: int) -> ExactClaim:
    """C16: the same drawn groups with uniform and with the true credit, by the rank and by the rank less its null."""
    words, verdicts = [], []
    for R in Rs:
        ranks, beyond = [], []
        for o in prompts:
            index = mixed(o, R, groups, rng)
            (before, its_null), (after, own_null) = (
                rank_and_null(rows(o, index), index) for rows in (uniform_rows, token_rows)
            )
            known = np.isfinite(after)
            ranks.append((after - before)[known])
            beyond.append((after - own_null - before + its_null)[known])
        rise, structure = (Estimate.of(np.concatenate(values)) for values in (ranks, beyond))
        verdicts.append(raised(rise, structure))
        words.append(f"R={R} {rise}, beyond the rows' own norms {structure}")
    return judged(
        "C16",
        "Nothing forces it: uniform credit already gives rows that are as independent as the scores. Credit by token "
        "gives other rows with other norms, whose rank can be higher or lower; a rank that norms alone raise "
        f"is not structure. A rise by less than {MARGIN:g} is none.",
        "the true credit q - v of each token against the group mean, in the same groups",
        "mean change of the effective rank over mixed groups: " + "; ".join(words),
        "does not hold" if "does not hold" in verdicts else "holds" if set(verdicts) == {"holds"} else "undecided",
    )


def raised(rise: Estimate, structure: Estimate) -> Judgement:
    """Both changes above 0: raised. One of them below the margin: not. C16."""
    if rise.low > 0 and structure.low > 0:
        return "holds"
    return "does not hold" if min(rise.high, structure.high) < MARGIN else "undecided"


CLIP = 0.2  # to either side, PPO's
BETA = 0.04  # of the KL in the loss, DeepSeekMath's
MOVE = 1.0  # length of the move away from the policy that sampled, in parameter space


def moved(policy: SoftmaxPolicy, rewards: Sequence[TokenReward], length: float = MOVE) -> list[Prompt]:
    """The prompts after one step of this length along the gradient of the mean reward; `policy` stays as it is."""
    after = copy.deepcopy(policy)
    gradient_D = torch.stack([e.grad_J_D for e in several_prompts(after, rewards)]).mean(dim=0)
    weights_D = torch.nn.utils.parameters_to_vector(after.parameters()).detach()
    torch.nn.utils.vector_to_parameters(weights_D + length * gradient_D / gradient_D.norm(), after.parameters())
    return [Prompt(e) for e in several_prompts(after, rewards)]


@dataclass(frozen=True)
class LossRows:
    """Rows of the loss, (M, R, D) each: A grad log pi; with a clipped ratio by token; with KL to the sampler."""

    plain: Array
    clipped: Array
    kl: Array


def loss_rows(old: Enumeration, now: Enumeration, index_MR: np.ndarray) -> LossRows:
    """The rows of groups that `old` sampled, differentiated at `now`; advantages of the group mean."""
    flat = torch.from_numpy(index_MR.reshape(-1))
    A = torch.from_numpy(grpo(old.rewards_N.numpy()[index_MR]).reshape(-1))
    ones, mask = torch.ones_like(A), now.mask_NT[flat]
    log_now, log_old = now.log_probs_NT[flat], old.log_probs_NT[flat]
    plain = surrogate(log_now, log_old, A, ones, mask, "none").coefficients_BT
    clipped = surrogate(log_now, log_old, A, ones, mask, "token", CLIP, CLIP).coefficients_BT
    with_kl = plain - BETA * kl_slope(log_now, log_old, mask, "k3")

    def rows(coefficients: torch.Tensor) -> Array:
        found = torch.einsum("bt,btd->bd", coefficients, now.token_psi_NTD[flat])
        return found.reshape(*index_MR.shape, -1).numpy()

    return LossRows(rows(plain), rows(clipped), rows(with_kl))


def clipping_and_kl(
    prompts: Sequence[Prompt], after: Sequence[Prompt], R: int, rng: np.random.Generator, groups: int
) -> ExactClaim:
    """C19: rows with and without clipping and KL, at the policy that sampled and after a move away from it."""
    errors: list[float] = []
    changes: dict[str, list[Array]] = {"clipped": [], "kl": []}
    woken = 0
    for o, now in zip(prompts, after, strict=True):
        index = mixed(o, R, groups, rng)
        here, there = loss_rows(o.e, o.e, index), loss_rows(o.e, now.e, index)
        size = np.linalg.norm(here.plain)
        errors += [float(np.linalg.norm(rows - here.plain) / size) for rows in (here.clipped, here.kl)]
        plain = np.asarray(spectra.effective_rank(values_of(there.plain)))
        for name, rows in (("clipped", there.clipped), ("kl", there.kl)):
            changes[name].append(np.asarray(spectra.effective_rank(values_of(rows))) - plain)
        equal = np.tile(np.argmax(o.p_N * o.r_N), (1, R))  # a group of one right text: no gradient without KL
        woken += bool(np.abs(loss_rows(o.e, now.e, equal).kl).max() > EXACT)
    found = {name: np.concatenate(parts) for name, parts in changes.items()}
    known = {name: values[np.isfinite(values)] for name, values in found.items()}
    emptied = int((~np.isfinite(found["clipped"])).sum())
    affected = emptied + woken + sum(int((np.abs(values) > EXACT).sum()) for values in known.values())
    said = "; ".join(f"{name} {Estimate.of(values)}" for name, values in known.items())
    return judged(
        "C19",
        "True at the policy that sampled, where the ratio is 1 and a reference that is this policy has no slope: the "
        "rows are the same, so the first update of a run shows nothing. Away from it neither is one factor "
        "per row: a clipped token leaves its row, a rollout that is clipped throughout leaves the matrix, and KL gives "
        "rows to groups of equal rewards, which have none without it.",
        f"rows at the policy that sampled differ by {worst(errors):.1e}; a step of length {MOVE:g} away, R={R}: "
        f"{emptied} groups clipped throughout, {woken} of {len(prompts)} groups of one text have rows by KL alone",
        f"change of the effective rank there: {said}",
        "does not hold" if worst(errors) > EXACT else "holds, corrected" if affected else "holds",
        worst(errors),
    )


def stacked_step(prompts: Sequence[Prompt], R: int, groups: int, rng: np.random.Generator) -> tuple[float, ...] | None:
    """Effective rank of one drawn step's groups stacked, and the least and largest that the groups' own spectra allow;
    None where no group is mixed."""
    rows = []
    for i in rng.integers(len(prompts), size=groups):
        index = prompts[i].draw(1, R, rng)
        if np.ptp(prompts[i].r_N[index]) > 0:
            rows.append(uniform_rows(prompts[i], index)[0])
    if not rows:
        return None
    own = np.stack([values_of(one) for one in rows])
    low, high = stacked_bounds(spectra.effective_rank(own), (own**2).sum(axis=1))
    return float(spectra.effective_rank(values_of(np.concatenate(rows)))), low, high


def directions_of_a_step(
    prompts: Sequence[Prompt], Rs: Sequence[int], rng: np.random.Generator, groups: int, steps: int
) -> ExactClaim:
    """C20: the spectrum of the groups of a step stacked, beside what the groups' own spectra allow."""
    words, outside, inside, errors = [], [], [], []
    for R in Rs:
        drawn = [stacked_step(prompts, R, groups, rng) for _ in range(steps)]
        rank, low, high = np.array([one for one in drawn if one is not None]).T
        errors.append(float(np.max(np.maximum(low - rank, rank - high) / rank).clip(min=0)))
        found = Estimate.of(rank)
        outside.append(found.low > ABOUT_TWO + MARGIN or found.high < ABOUT_TWO - MARGIN)
        inside.append(found.low >= ABOUT_TWO - MARGIN and found.high <= ABOUT_TWO + MARGIN)
        words.append(f"R={R} {found}, allowed {low.mean():.2f} to {high.mean():.2f}")
    judgement: Judgement = "does not hold" if any(outside) else "holds" if all(inside) else "undecided"
    return judged(
        "C20",
        "A step sums the groups of several prompts: its matrix has all their rows. The effective rank of the stack is "
        "at least the mean of the groups' own, weighted by their squared norms, and at most what it is when different "
        "groups are orthogonal. Two directions for each group are not two for the step.",
        f"both bounds in every step drawn, largest excess {worst(errors):.1e}",
        f"effective rank of the mixed ones of {groups} groups stacked: " + "; ".join(words),
        judgement if worst(errors) < EXACT else "undecided",
        worst(errors),
    )


def orthogonal_top1(R: int, p: float) -> float:
    """Mean top-1 fraction over mixed groups of binary rewards, success rate p, for orthogonal scores of equal norm: the
    energies of a group are its squared advantages."""
    chances = binomial(R, p)[1:R]
    by_k = [max(1 - k / R, k / R) ** 2 / (k * (R - k) / R) for k in range(1, R)]
    return float(chances @ np.array(by_k) / chances.sum())


def largest_in_the_middle(values: dict[int, float]) -> bool:
    """Is the value at the R of Figure 2 above those at the others?"""
    return all(values[LARGEST_TOP1] > value for R, value in values.items() if R != LARGEST_TOP1)


def order_of_sizes(prompts: Sequence[Prompt], Rs: Sequence[int], rng: np.random.Generator, groups: int) -> ExactClaim:
    """C21: does the order need structure? Orthogonal scores at each success rate, and drawn groups beside them."""
    rates = np.arange(1, 100) / 100
    ordered = [p for p in rates if largest_in_the_middle({R: orthogonal_top1(R, float(p)) for R in Rs})]
    means = []
    for R in Rs:
        rows = [values_of(uniform_rows(o, mixed(o, R, groups, rng))) for o in prompts]
        means.append(f"R={R} {Estimate.of(np.concatenate([np.asarray(spectra.top1_fraction(v)) for v in rows]))}")
    said = ", ".join(f"R={R} {orthogonal_top1(R, 0.5):.2f}" for R in Rs)
    spans = f"p from {ordered[0]:.2f} to {ordered[-1]:.2f}, {len(ordered)} of {len(rates)}" if ordered else "none"
    return judged(
        "C21",
        "The order needs no structure: for orthogonal scores of equal norm a group's energies are its squared "
        "advantages, and the numbers of right rollouts alone give it at some success rates and not at others. "
        "Whether a model has it only measurement tells, and its null by k stands beside.",
        f"orthogonal scores at p = 0.5: {said}; largest at R = {LARGEST_TOP1} at success rates: {spans}",
        "top-1 fraction over mixed groups: " + "; ".join(means),
        "possible" if ordered else "does not hold",
    )
