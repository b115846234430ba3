"""Error of a step's gradient at a fixed number of rollouts N = B R, by estimator and group size; the best R.

A step takes B = N / R prompts at random, R independent rollouts of each, and averages the groups' gradients; the target
is the gradient of the average objective. `Budget` is exact: the moments of a group's gradient are sums over all its
possible rewards (`exact.group_moments`), and prompts are independent. Leave-one-out: arXiv 2603.01162. `drawn` and
`Ascent` draw whole steps, for estimators that cannot be summed over one group and for the reward that a step gains.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from grpo_sweeps.estimators import grpo, rloo
from grpo_sweeps.estimators.declared import Declaration
from grpo_sweeps.exact import (
    Moments,
    SoftmaxPolicy,
    between_prompts,
    group_moments,
    one_group_weights,
    row_log_probs,
    step_moments,
)
from grpo_sweeps.maths.ustatistics import best_group_size, error_by_rollouts
from grpo_sweeps.science.claim import EXACT, ExactClaim, Prompt, judged, relative, worst
from grpo_sweeps.types import Array

Estimator = Callable[[Array], Array]


def rescaled(rewards_GR: Array) -> Array:
    """Advantages of the group mean times R/(R - 1): leave-one-out in another way."""
    return grpo(rewards_GR) * rewards_GR.shape[1] / (rewards_GR.shape[1] - 1)


@functools.cache
def moments_of(o: Prompt, R: int, estimator: Estimator) -> Moments:
    """Moments of one group's gradient g = sum_i A_i psi_i / R."""
    return group_moments(o.e, one_group_weights(estimator, "sum", o.e.tokens_NT.shape[1]), R, by_length=False)


def oracle_moments(o: Prompt, R: int) -> Moments:
    """Moments of one group's gradient with A_i = r_i - v, which knows the value v."""
    return Moments(o.e.grad_J_D, o.e.V1 / R + o.signal)


@dataclass(frozen=True)
class Quality:
    """How good one step at a fixed budget is.

    mse: mean squared error. cosine: inner product of the mean step with the target, over the target's norm and the
    step's root mean square norm; its square is the improvement per step as a share of that along the exact gradient,
    for the best step length and isotropic curvature.
    """

    mse: float
    cosine: float


def quality(step: Moments, target_D: np.ndarray) -> Quality:
    norm = np.sqrt(step.second * (target_D @ target_D))
    return Quality(step.mse(torch.from_numpy(target_D)), float(step.mean_D.numpy() @ target_D) / norm)


@dataclass(frozen=True)
class Budget:
    """A set of prompts and its constants: the averages of V1 and V2, V_between, and the target."""

    prompts: tuple[Prompt, ...]

    @property
    def target_D(self) -> np.ndarray:
        return np.mean([o.grad_J_D for o in self.prompts], axis=0)

    @property
    def V1(self) -> float:
        return float(np.mean([o.e.V1 for o in self.prompts]))

    @property
    def V2(self) -> float:
        return float(np.mean([o.e.V2 for o in self.prompts]))

    @property
    def between(self) -> float:
        return between_prompts([o.e for o in self.prompts])

    @property
    def best_R(self) -> float:
        """R* = 1 + sqrt(E V2 / V_between); infinite where all prompts have the same gradient."""
        return best_group_size(self.V2, self.between)

    def leave_one_out(self, R: float, N: int) -> float:
        """MSE of leave-one-out, in closed form."""
        return float(error_by_rollouts(R, self.V1, self.V2, self.between)) / N

    def group_mean(self, R: float, N: int) -> float:
        """MSE of the group mean, in closed form."""
        return ((R - 1) / R) ** 2 * self.leave_one_out(R, N) + float(self.target_D @ self.target_D) / R**2

    def of(self, estimator: Estimator, R: int, N: int) -> Quality:
        """Quality of an estimator, from class moments, without the closed forms."""
        return self._step([moments_of(o, R, estimator) for o in self.prompts], N / R)

    def oracle(self, R: int, N: int) -> Quality:
        """Quality of the estimator that knows the value."""
        return self._step([oracle_moments(o, R) for o in self.prompts], N / R)

    def _step(self, groups: list[Moments], B: float) -> Quality:
        return quality(step_moments(groups, B), self.target_D)

    def found_R(self, N: int, within: float = 1.05) -> tuple[int, tuple[int, int]]:
        """The whole R at which leave-one-out has the least MSE, from moments alone, and the range of R within a factor
        of it.

        The MSE has one minimum in R, so that the search goes up from 2 until it leaves that range.
        """
        errors: list[float] = []
        while not errors or errors[-1] <= within * min(errors) or len(errors) < 3:
            errors.append(self.of(rloo, len(errors) + 2, N).mse)
            if len(errors) > 100:
                raise ValueError("the prompts' gradients hardly differ: R* is beyond 100")
        near = [R for R, error in enumerate(errors, start=2) if error <= within * min(errors)]
        return int(np.argmin(errors)) + 2, (near[0], near[-1])


def identities(budgets: Sequence[Budget], Rs: Sequence[int], N: int) -> float:
    """Largest relative error of the closed forms (both estimators, and one prompt alone) against the class moments."""
    errors = []
    for budget in budgets:
        for R in Rs:
            errors.append(relative(budget.of(rloo, R, N).mse, budget.leave_one_out(R, N)))
            errors.append(relative(budget.of(grpo, R, N).mse, budget.group_mean(R, N)))
        for o in budget.prompts:
            alone = Budget((o,))
            errors += [relative(alone.of(rloo, R, R).mse, o.e.V1 / R + o.e.V2 / (R * (R - 1))) for R in Rs]
    return worst(errors)


def best_R(budgets: dict[str, Budget], Rs: Sequence[int], N: int) -> ExactClaim:
    """U1 (arXiv 2603.01162): the MSE of the U-statistic, and the group size with the least error."""
    error = identities(list(budgets.values()), Rs, N)
    words, near = [], []
    for name, budget in budgets.items():
        found, flat = budget.found_R(N)
        near.append(abs(found - budget.best_R) < 1)
        words.append(f"{name}: R* = {budget.best_R:.2f}, found {found}; within 5% R = {flat[0]} to {flat[1]}")
    above = all(2 * budget.between * (1 - EXACT) <= budget.V2 for budget in budgets.values())
    return judged(
        "U1",
        "MSE(leave-one-out) = (R V_between + E V1 + E V2/(R-1)) / N, so R* = 1 + sqrt(E V2 / V_between), whatever "
        "N; E V2 is at least 2 V_between, so R* is at least 2.41. The optimum is flat. The group mean without the "
        "factor R/(R-1) has no best R free of N.",
        f"closed forms against class moments: {error:.1e}; " + "; ".join(words),
        "",
        "holds" if error < EXACT and all(near) and above else "does not hold",
        error,
    )


def two_budgets(budget: Budget, Rs: Sequence[int], prompts: int, rollouts: int) -> ExactClaim:
    """C11: the same comparison at equal prompts and at equal rollouts per step, with and without R/(R - 1)."""
    equal_prompts = [budget.of(grpo, R, prompts * R) for R in Rs]
    equal_rollouts = [budget.of(grpo, R, rollouts) for R in Rs]
    corrected = [budget.of(rescaled, R, rollouts) for R in Rs]
    mixed = [float(np.mean([1 - o.e.J**R - (1 - o.e.J) ** R for o in budget.prompts])) for R in Rs]

    grows = equal_prompts[-1].cosine > equal_prompts[0].cosine
    turns = min(corrected, key=lambda q: q.mse) is not corrected[-1]

    def row(values: Sequence[float]) -> str:
        return ", ".join(f"{value:.3f}" for value in values)

    return judged(
        "C11",
        "Confounded: at equal prompts a larger R also has more rollouts a step, a factor (R-1)/R nearer 1 and more "
        "mixed groups. At equal rollouts and with the factor taken out the advantage goes, and turns round beyond "
        "R*.",
        f"R = {', '.join(map(str, Rs))}: cosine with the exact gradient at {prompts} prompts a step "
        f"{row([q.cosine for q in equal_prompts])}; at {rollouts} rollouts "
        f"{row([q.cosine for q in equal_rollouts])}; mean squared error there, rescaled, over that at R = {Rs[0]}: "
        f"{row([q.mse / corrected[0].mse for q in corrected])}; share of mixed groups {row(mixed)}",
        "",
        "holds, corrected" if grows and turns else "does not hold",
    )


Rows = Callable[[Budget, int, int, np.random.Generator], np.ndarray]  # (budget, R, B, rng) -> one step's gradient (D,)


def gradient_of(declaration: Declaration) -> Rows:
    """A function that draws a step of an estimator: B prompts with replacement, R rollouts each."""
    call = declaration.function

    def step(budget: Budget, R: int, B: int, rng: np.random.Generator) -> np.ndarray:
        prompts = [budget.prompts[i] for i in rng.integers(len(budget.prompts), size=B)]
        rows = [(o, o.draw(1, R, rng)[0]) for o in prompts]
        rewards = np.stack([o.r_N[index] for o, index in rows])
        lengths = {"lengths_GR": np.stack([o.e.lengths_N[index] for o, index in rows])}
        A = call(rewards, **(lengths if declaration.needs_lengths else {}))
        return np.mean([a @ o.psi_ND[index] / R for a, (o, index) in zip(A, rows, strict=True)], axis=0)

    return step


def oracle_step(budget: Budget, R: int, B: int, rng: np.random.Generator) -> np.ndarray:
    """One drawn step with A = r - v, which knows the value."""
    prompts = [budget.prompts[i] for i in rng.integers(len(budget.prompts), size=B)]
    rows = [(o, o.draw(1, R, rng)[0]) for o in prompts]
    return np.mean([(o.r_N[index] - o.e.J) @ o.psi_ND[index] / R for o, index in rows], axis=0)


def drawn(budget: Budget, step: Rows, R: int, N: int, steps: int, rng: np.random.Generator) -> Quality:
    """Quality of a step of N rollouts, estimated from `steps` drawn ones."""
    target_D = budget.target_D
    found = np.stack([step(budget, R, N // R, rng) for _ in range(steps)])
    mean_D, second = found.mean(axis=0), float((found**2).sum(axis=1).mean())
    off = float(((found - target_D) ** 2).sum(axis=1).mean())
    return Quality(off, float(mean_D @ target_D) / np.sqrt(second * (target_D @ target_D)))


class Ascent:
    """The gain in mean reward from a step of length `length` in parameter space; every sequence is listed again."""

    def __init__(self, policy: SoftmaxPolicy, budget: Budget, length: float) -> None:
        self.policy, self.budget, self.length = copy.deepcopy(policy), budget, length
        self.start_D = torch.nn.utils.parameters_to_vector(policy.parameters()).detach()
        self.before = self._reward(np.zeros(len(self.start_D)))
        self.along_gradient = self.gain(budget.target_D)

    def _reward(self, move_D: np.ndarray) -> float:
        torch.nn.utils.vector_to_parameters(self.start_D + torch.from_numpy(move_D), self.policy.parameters())
        found = []
        with torch.no_grad():
            for o in self.budget.prompts:
                prompt_N = torch.full((len(o.p_N),), o.e.prompt)
                log_probs_N = row_log_probs(self.policy, prompt_N, o.e.tokens_NT, o.e.mask_NT)
                found.append(float(log_probs_N.exp() @ o.e.rewards_N))
        return float(np.mean(found))

    def gain(self, direction_D: np.ndarray) -> float:
        """Gain of a step of fixed length along a direction; 0 for a direction of length 0."""
        norm = np.linalg.norm(direction_D)
        return self._reward(direction_D * (self.length / norm)) - self.before if norm > 0 else 0.0

    def share(self, step: Rows, R: int, N: int, steps: int, rng: np.random.Generator) -> float:
        """Mean gain of drawn steps, over that of a step along the exact gradient; a step without gradient gains
        nothing."""
        return (
            float(np.mean([self.gain(step(self.budget, R, N // R, rng)) for _ in range(steps)])) / self.along_gradient
        )
