"""The declared factor, by running through every tuple of rollouts of prompts with four outcomes."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_sweeps.estimators import DECLARATIONS, Declaration, opo

ALL = list(DECLARATIONS.values())
WITH_FACTOR = [one for one in ALL if one.factor is not None]
WITHOUT = [one for one in ALL if one.factor is None]


class Prompt:
    """Four outcomes with probability, reward, length and a score in three dimensions; the scores' mean is zero."""

    def __init__(self, seed: int, probabilities: list[float], rewards: list[float]) -> None:
        self.p = torch.tensor(probabilities, dtype=torch.float64)
        self.rewards = torch.tensor(rewards, dtype=torch.float64)
        self.lengths = torch.tensor([1, 5, 2, 3])
        drawn = torch.randn(4, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        self.scores = drawn - self.p @ drawn
        self.gradient = (self.p * self.rewards) @ self.scores


ONE = Prompt(0, [0.1, 0.2, 0.3, 0.4], [0.0, 0.3, 2.0, 1.0])
UNIT = Prompt(0, [0.1, 0.2, 0.3, 0.4], [0.0, 0.15, 1.0, 0.5])
OTHER = Prompt(1, [0.4, 0.05, 0.25, 0.3], [1.0, -1.0, 0.5, 0.25])


def expected_rows(declared: Declaration, prompts: list[Prompt], R: int, equal_lengths: bool = False) -> Tensor:
    """(G, 3): E[sum_i A_i psi_i / R] of each prompt, over all 4^(G R) steps."""
    total = torch.zeros(len(prompts), 3, dtype=torch.float64)
    for step in itertools.product(itertools.product(range(4), repeat=R), repeat=len(prompts)):
        pairs = [(prompt, list(group)) for prompt, group in zip(prompts, step, strict=True)]
        probability = torch.stack([prompt.p[group].prod() for prompt, group in pairs]).prod()
        rewards = torch.stack([prompt.rewards[group] for prompt, group in pairs])
        arguments: dict[str, Any] = {}
        if declared.needs_lengths:
            lengths = torch.stack([prompt.lengths[group] for prompt, group in pairs])
            arguments["lengths_GR"] = torch.full_like(lengths, 7) if equal_lengths else lengths
        advantages = torch.from_numpy(declared.function(rewards, **arguments))
        scores = torch.stack([prompt.scores[group] for prompt, group in pairs])
        total += probability * torch.einsum("gr,grd->gd", advantages, scores) / R
    return total


def test_the_prompts_are_policies() -> None:
    for prompt in (ONE, OTHER):
        assert float(prompt.p.sum()) == pytest.approx(1.0, abs=1e-15)
        assert torch.allclose(prompt.p @ prompt.scores, torch.zeros(3).double(), atol=1e-15)
        assert float(prompt.gradient.norm()) > 0.1


@pytest.mark.parametrize(
    ("declared", "prompts", "R"),
    [
        pytest.param(one, prompts, R, id=f"{one.name}-{len(prompts)}-{R}")
        for one in WITH_FACTOR
        for prompts, R in (([ONE], 2), ([ONE], 3), ([ONE, OTHER], 1), ([ONE, OTHER], 2))
        if one.least_R <= R
    ],
)
def test_the_factor_is_exact(declared: Declaration, prompts: list[Prompt], R: int) -> None:
    assert declared.factor is not None
    wanted = declared.factor(R, len(prompts)) * torch.stack([prompt.gradient for prompt in prompts])
    assert torch.allclose(expected_rows(declared, prompts, R), wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("declared", WITH_FACTOR, ids=lambda one: one.name)
def test_a_factor_of_one_group_is_the_default(declared: Declaration) -> None:
    assert declared.factor is not None
    assert declared.factor(4) == declared.factor(4, 1)
    assert (declared.factor(4, 3) != declared.factor(4)) == declared.batch_dependent


@pytest.mark.parametrize("declared", WITHOUT, ids=lambda one: one.name)
@pytest.mark.parametrize("R", [2, 3])
def test_without_a_factor_the_direction_is_another(declared: Declaration, R: int) -> None:
    prompts = [UNIT, Prompt(1, [0.4, 0.05, 0.25, 0.3], [1.0, 0.0, 0.5, 0.25])] if declared.unit_rewards else [ONE]
    row = expected_rows(declared, prompts, R)[0]
    cosine = torch.nn.functional.cosine_similarity(row, prompts[0].gradient, dim=0)
    assert 0 < float(cosine) < 1 - 1e-4


def test_opo_with_equal_lengths_has_the_factor_of_the_group_mean() -> None:
    row = expected_rows(DECLARATIONS["opo"], [ONE], 3, equal_lengths=True)[0]
    assert torch.allclose(row, 2 / 3 * ONE.gradient, rtol=0, atol=1e-12)
    assert DECLARATIONS["opo"].function is opo
