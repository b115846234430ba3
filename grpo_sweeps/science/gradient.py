"""Claims about the gradient: C5 (its norm), C6 (its sparsity), C14 (the factor (R-1)/R), C15 (the best baseline), C18
(a curriculum)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from grpo_sweeps.estimators import grpo, grpo_std
from grpo_sweeps.estimators.declared import weight_on
from grpo_sweeps.exact import SoftmaxPolicy, TokenReward, several_prompts
from grpo_sweeps.paper import SPARSE
from grpo_sweeps.science.advantages import binomial, chance_of_advantage_above
from grpo_sweeps.science.claim import EXACT, Estimate, ExactClaim, Prompt, agreement, judged, relative, worst


def spread(k: np.ndarray | int, R: int) -> np.ndarray:
    """s2 = k (R - k) / R^2, the variance (ddof 0) of the rewards of a group with k right."""
    return np.asarray(k * (R - k) / R**2)


def norm_by_k(o: Prompt, R: int, scaled: bool = False) -> np.ndarray:
    """E[||g||^2 | k] for k = 1 .. R - 1, (R - 1,), with g = sum_i A_i psi_i / R; `scaled`: A over the standard
    deviation.

    Computed from the second moments of the two classes, rollouts being independent given k; `identity` is the closed
    form.
    """
    (_, right_D, V_right), (_, wrong_D, V_wrong) = o.group(True), o.group(False)
    found = []
    for k in range(1, R):
        A = grpo([[1.0] * k + [0.0] * (R - k)])[0] / R
        if scaled:
            A = A / np.sqrt(spread(k, R))
        mean_D = A[:k].sum() * right_D + A[k:].sum() * wrong_D
        found.append(mean_D @ mean_D + (A[:k] ** 2).sum() * V_right + (A[k:] ** 2).sum() * V_wrong)
    return np.array(found)


def identity(o: Prompt, R: int) -> np.ndarray:
    """s2^2 (D^2 + V+/k + V-/(R - k)) for k = 1 .. R - 1, (R - 1,), with D = ||grad J|| / (p q)."""
    k = np.arange(1, R)
    p = o.e.J
    D2 = o.signal / (p * (1 - p)) ** 2
    return spread(k, R) ** 2 * (D2 + o.group(True)[2] / k + o.group(False)[2] / (R - k))


def slope(norms: np.ndarray, R: int) -> float:
    """Least-squares slope of log norm on log sqrt(s2) over k = 1 .. R - 1."""
    x = 0.5 * np.log(spread(np.arange(1, R), R))
    return float(np.polyfit(x, 0.5 * np.log(norms), 1)[0])


def norms(prompts: Sequence[Prompt], Rs: Sequence[int], rng: np.random.Generator, draws: int) -> ExactClaim:
    """C5: the norm by the number of right rollouts, on prompts with binary rewards."""
    errors = [relative(norm_by_k(o, R), identity(o, R)) for o in prompts for R in Rs]
    bounds = [np.sqrt(o.signal) / np.sqrt(o.e.sigma2 * o.e.largest_eigenvalue_F) for o in prompts]
    R = max(Rs)
    slopes = [slope(norm_by_k(o, R), R) for o in prompts]
    scaled = [slope(norm_by_k(o, R, scaled=True), R) for o in prompts]
    checks = [check for o in prompts for check in _drawn_norms(o, 4, rng, draws)]
    return judged(
        "C5",
        "For binary rewards g = s2 (mean score of the right - mean score of the wrong), s2 = k(R-k)/R^2: the norm "
        "is sqrt(s2) times noise or s2 times signal, a slope between 1 and 2 on sqrt(s2) (0 and 1 after division by "
        "the standard deviation) where the two classes vary alike, and exactly zero at k = 0 and k = R only: one "
        "right rollout of R has the advantage 1 - 1/R. What is true in general is ||grad J|| <= sigma sqrt(largest "
        "eigenvalue of the score Fisher).",
        f"E[||g||^2 | k] by classes against the closed form: {worst(errors):.1e}; slopes at R = {R}: "
        f"{_listed(slopes)}, divided by the standard deviation {_listed(scaled)}; ||grad J|| is {_listed(bounds)} of "
        "its bound",
        agreement(checks),
        "holds, corrected" if worst(errors) < EXACT and max(bounds) <= 1 else "does not hold",
        worst(errors),
    )


def _listed(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.2f}" for value in values)


def _drawn_norms(o: Prompt, R: int, rng: np.random.Generator, draws: int) -> list[tuple[Estimate, float]]:
    """||g||^2 of drawn groups by k, each beside its exact mean."""
    index = o.draw(draws, R, rng)
    A = o.r_N[index] - o.r_N[index].mean(axis=1, keepdims=True)
    grams = o.gram_NN[index[:, :, None], index[:, None, :]]
    squares = np.einsum("mi,mij,mj->m", A, grams, A) / R**2
    k, exact = o.r_N[index].sum(axis=1), norm_by_k(o, R)
    return [(Estimate.of(squares[k == j]), float(exact[j - 1])) for j in range(1, R) if (k == j).sum() > 30]


def factor_error(o: Prompt, R: int) -> float:
    """Relative error of E g = (R-1)/R grad J: E over k of s2 (mean right - mean wrong)."""
    p = o.e.J
    difference_D = o.group(True)[1] - o.group(False)[1]
    mean_D = float(binomial(R, p) @ spread(np.arange(R + 1), R)) * difference_D
    return relative(mean_D, (R - 1) / R * o.grad_J_D)


def own_reward(prompts: Sequence[Prompt], Rs: Sequence[int], rng: np.random.Generator, draws: int) -> ExactClaim:
    """C14: the group mean holds the rollout's own reward."""
    errors = [factor_error(o, R) for o in prompts for R in Rs]
    checks = []
    for o in prompts:
        index = o.draw(draws, 2, rng)
        A = grpo(o.r_N[index])
        along = (A * (o.psi_ND @ o.grad_J_D)[index]).sum(axis=1) / 2
        checks.append((Estimate.of(along), 0.5 * o.signal))
    return judged(
        "C14",
        "A factor and nothing else: E g = (R-1)/R grad J, the same direction. Leave-one-out has the factor 1.",
        f"{len(errors)} prompts and group sizes, largest relative error {worst(errors):.1e}",
        agreement(checks),
        "holds, corrected" if worst(errors) < EXACT else "does not hold",
        worst(errors),
    )


def best_baseline(o: Prompt) -> float:
    """E[||psi||^2 r] / E[||psi||^2] (Greensmith, Bartlett and Baxter 2004)."""
    return float(o.p_N @ (o.norms_N * o.r_N)) / o.e.trace_F


def baseline_variance(o: Prompt, b: float) -> float:
    """tr Var((r - b) psi)."""
    return float(o.p_N @ ((o.r_N - b) ** 2 * o.norms_N)) - o.signal


def baselines(prompts: Sequence[Prompt]) -> ExactClaim:
    """C15: the best constant baseline; the variance is a parabola in b, and three of its values give the lowest
    point."""
    errors, excess = [], []
    for o in prompts:
        b = np.array([0.0, 0.5, 1.0])
        a2, a1, _ = np.polyfit(b, [baseline_variance(o, x) for x in b], 2)
        errors.append(relative(-a1 / (2 * a2), best_baseline(o)))
        excess.append(baseline_variance(o, o.e.J) / baseline_variance(o, best_baseline(o)) - 1)
    pairs = ", ".join(f"{o.e.J:.3f} / {best_baseline(o):.3f}" for o in prompts)
    return judged(
        "C15",
        "Of the constants for a prompt that do not depend on the sample the best for the trace of the variance is "
        "E[||psi||^2 r] / E[||psi||^2]; the value is best only where reward and score norm are uncorrelated.",
        f"value / best constant: {pairs}; the value's variance is up to {max(excess):.1%} above the best; lowest "
        f"point of the parabola: {worst(errors):.1e}",
        "",
        "undefined" if worst(errors) > EXACT else "does not hold" if max(excess) > EXACT else "holds",
        worst(errors),
    )


RATES = np.arange(1, 20) / 20
"""Success rates at which the weight on a prompt is compared, C18."""


def norm_shares(o: Prompt, R: int) -> np.ndarray:
    """The part of E ||g||^2 that groups with k = 1 .. R - 1 right rollouts carry, (R - 1,)."""
    carried = binomial(R, o.e.J)[1:R] * norm_by_k(o, R)
    return np.asarray(carried / carried.sum())


def curriculum(prompts: Sequence[Prompt], Rs: Sequence[int]) -> ExactClaim:
    """C18: the weight c in E g = c grad J, by success rate; beside it which k carry the squared norm."""
    errors = [factor_error(o, R) for o in prompts for R in Rs]
    weights = {R: np.array([weight_on(grpo, float(p), R) for p in RATES]) for R in Rs}
    errors += [relative(one, np.full(len(RATES), (R - 1) / R)) for R, one in weights.items()]
    middle = np.argsort(np.abs(RATES - 0.5), kind="stable")  # from one half outwards
    falls = all(bool((np.diff(one[middle]) <= EXACT).all()) and float(np.ptp(one)) > EXACT for one in weights.values())
    R = max(Rs)
    scaled = [weight_on(grpo_std, p, R) for p in (0.05, 0.5, 0.95)]
    k = np.arange(R + 1)
    half = (k >= R / 4) & (k <= 3 * R / 4)
    carried = [float(norm_shares(o, R)[half[1:R]].sum()) for o in prompts]
    occur = [float(binomial(R, o.e.J)[half].sum()) for o in prompts]
    return judged(
        "C18",
        "No curriculum by the expectation: E g = (R-1)/R grad J at every success rate, all-equal groups counted. The "
        "group mean weighs prompts as the objective does. Division by the standard deviation does weigh them, the easy "
        "and the hard ones most. What depends on k is the squared norm, which is noise for the most part.",
        f"E g against (R-1)/R grad J at {len(prompts)} prompts and the weight at {len(RATES)} success rates, R = "
        f"{', '.join(map(str, Rs))}: {worst(errors):.1e}; over the standard deviation, R = {R}, p = 0.05, 0.5, 0.95: "
        f"{_listed(scaled)}; groups of R/4 <= k <= 3R/4 are {_listed(occur)} of all and carry {_listed(carried)} of "
        "the squared norm",
        "",
        "holds" if falls else "does not hold",
        worst(errors),
    )


DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True)
class Step:
    """One step of ascent. effective: P(|A| > eps) in groups of R, by eps; all_equal: chance that a group of R has equal
    rewards; hoyer: sparsity of grad J; unchanged: share of weights that the step does not change, by dtype."""

    J: float
    sigma: float
    effective: dict[float, float]
    all_equal: float
    hoyer: float
    unchanged: dict[str, float]


def hoyer(values: np.ndarray) -> float:
    """(sqrt D - |x|_1 / |x|_2) / (sqrt D - 1): 0 where all are alike, 1 where a single one is not zero (Hoyer 2004)."""
    root = np.sqrt(values.size)
    return float((root - np.abs(values).sum() / np.linalg.norm(values)) / (root - 1))


def ascend(policy: SoftmaxPolicy, rewards: Sequence[TokenReward], steps: int, rate: float, R: int) -> list[Step]:
    """Steps of exact gradient ascent in float64; the weights of `policy` change."""
    found = []
    for _ in range(steps):
        enumerations = several_prompts(policy, rewards)
        gradient_D = torch.stack([e.grad_J_D for e in enumerations]).mean(dim=0)
        p = np.array([e.J for e in enumerations])
        weights_D = torch.nn.utils.parameters_to_vector(policy.parameters()).detach()
        after_D = weights_D + rate * gradient_D
        unchanged = {
            name: float((weights_D.to(dtype) == (weights_D.to(dtype) + (rate * gradient_D).to(dtype))).double().mean())
            for name, dtype in DTYPES.items()
        }
        all_equal = float(np.mean(p**R + (1 - p) ** R))
        sigma = float(np.mean(np.sqrt(p * (1 - p))))
        effective = {eps: float(np.mean([chance_of_advantage_above(R, one, eps) for one in p])) for eps in SPARSE}
        found.append(Step(float(p.mean()), sigma, effective, all_equal, hoyer(gradient_D.numpy()), unchanged))
        torch.nn.utils.vector_to_parameters(after_D, policy.parameters())
    return found


def sparsity(path: Sequence[Step], R: int) -> ExactClaim:
    """C6: rho_eps of 4.1(iv), and three things that a sparse gradient could mean, along a path of `ascend`."""
    first, last = path[0], path[-1]

    def change(name: str, a: float, b: float) -> str:
        return f"{name} {a:.2f} to {b:.2f}"

    words = [
        change("mean reward", first.J, last.J),
        *(change(f"P(|A| > {eps:g}) at R = {R}", first.effective[eps], last.effective[eps]) for eps in SPARSE),
        change(f"all-equal groups of {R}", first.all_equal, last.all_equal),
        change("Hoyer sparsity of grad J", first.hoyer, last.hoyer),
        *(change(f"weights unchanged in {name}", first.unchanged[name], last.unchanged[name]) for name in DTYPES),
    ]
    return judged(
        "C6",
        "The bound of 4.1(iv) is on rho_eps = P(|A| > eps), which can be measured along a run; it rises where p starts "
        "below one half and learns, and falls as p nears 1. A sparse gradient is undefined: one number in front of a "
        "dense score makes no zeros. Groups without gradient become more "
        "frequent as p nears 0 or 1, and in a narrow dtype a smaller step changes fewer weights; the gradient "
        "itself need not become sparser.",
        f"{len(path)} steps of exact ascent: " + "; ".join(words),
        "",
        "undefined",
    )
