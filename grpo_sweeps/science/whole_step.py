"""Estimators that look at the whole step, and those that want lengths, drawn: what cannot be summed over one group."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from grpo_sweeps.estimators.declared import Declaration
from grpo_sweeps.science.budget import Budget, Quality


def drawn(budget: Budget, declaration: Declaration, R: int, N: int, steps: int, rng: np.random.Generator) -> Quality:
    """Quality of a step of N rollouts from `steps` drawn ones: B = N / R prompts with replacement, R rollouts each."""
    target_D, B = budget.target_D, N // R
    call: Callable[..., torch.Tensor] = declaration.function
    found = np.empty((steps, len(target_D)))
    for step in range(steps):
        prompts = [budget.prompts[i] for i in rng.integers(len(budget.prompts), size=B)]
        rows = [(o, o.draw(1, R, rng)[0]) for o in prompts]
        rewards = torch.from_numpy(np.stack([o.r_N[index] for o, index in rows]))
        lengths = {"lengths_GR": torch.stack([o.e.lengths_N[index] for o, index in rows])}
        A = call(rewards, **(lengths if declaration.needs_lengths else {})).numpy()
        found[step] = np.mean([a @ o.psi_ND[index] / R for a, (o, index) in zip(A, rows, strict=True)], axis=0)
    mean_D, second = found.mean(axis=0), float((found**2).sum(axis=1).mean())
    off = float(((found - target_D) ** 2).sum(axis=1).mean())
    return Quality(off, float(mean_D @ target_D) / np.sqrt(second * (target_D @ target_D)))
