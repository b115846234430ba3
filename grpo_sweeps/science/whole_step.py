"""Whole steps, drawn: for estimators that cannot be summed over one group, and for the reward that a step gains."""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np
import torch

from grpo_sweeps.estimators.declared import Declaration
from grpo_sweeps.exact import SoftmaxPolicy, row_log_probs
from grpo_sweeps.science.budget import Budget, Quality

Rows = Callable[[Budget, int, int, np.random.Generator], np.ndarray]  # (budget, R, B, rng) -> one step's gradient (D,)


def gradient_of(declaration: Declaration) -> Rows:
    """A drawn step of an estimator: B prompts with replacement, R rollouts each."""
    call: Callable[..., torch.Tensor] = declaration.function

    def step(budget: Budget, R: int, B: int, rng: np.random.Generator) -> np.ndarray:
        prompts = [budget.prompts[i] for i in rng.integers(len(budget.prompts), size=B)]
        rows = [(o, o.draw(1, R, rng)[0]) for o in prompts]
        rewards = torch.from_numpy(np.stack([o.r_N[index] for o, index in rows]))
        lengths = {"lengths_GR": torch.stack([o.e.lengths_N[index] for o, index in rows])}
        A = call(rewards, **(lengths if declaration.needs_lengths else {})).numpy()
        return np.mean([a @ o.psi_ND[index] / R for a, (o, index) in zip(A, rows, strict=True)], axis=0)

    return step


def oracle_step(budget: Budget, R: int, B: int, rng: np.random.Generator) -> np.ndarray:
    """The same of A = r - v."""
    prompts = [budget.prompts[i] for i in rng.integers(len(budget.prompts), size=B)]
    rows = [(o, o.draw(1, R, rng)[0]) for o in prompts]
    return np.mean([(o.r_N[index] - o.e.J) @ o.psi_ND[index] / R for o, index in rows], axis=0)


def drawn(budget: Budget, step: Rows, R: int, N: int, steps: int, rng: np.random.Generator) -> Quality:
    """Quality of a step of N rollouts from `steps` drawn ones."""
    target_D = budget.target_D
    found = np.stack([step(budget, R, N // R, rng) for _ in range(steps)])
    mean_D, second = found.mean(axis=0), float((found**2).sum(axis=1).mean())
    off = float(((found - target_D) ** 2).sum(axis=1).mean())
    return Quality(off, float(mean_D @ target_D) / np.sqrt(second * (target_D @ target_D)))


class Ascent:
    """How much the mean reward gains by a step of length `length` in parameter space, every sequence listed again."""

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
        norm = np.linalg.norm(direction_D)
        return self._reward(direction_D * (self.length / norm)) - self.before if norm > 0 else 0.0

    def share(self, step: Rows, R: int, N: int, steps: int, rng: np.random.Generator) -> float:
        """Mean gain of drawn steps over that of the exact gradient; a step without gradient gains nothing."""
        return (
            float(np.mean([self.gain(step(self.budget, R, N // R, rng)) for _ in range(steps)])) / self.along_gradient
        )
