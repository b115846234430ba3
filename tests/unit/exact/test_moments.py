"""Exact moments against the sum over all tuples, and against sampling."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from grpo_sweeps.estimators import (
    AGGREGATIONS,
    grpo,
    grpo_std,
    opo,
    reinforce,
    reinforce_plus_plus,
    rloo,
    row_weights,
)
from grpo_sweeps.exact import (
    Enumeration,
    Moments,
    SoftmaxPolicy,
    by_token,
    enumerate_policy,
    graded,
    group_moments,
    one_group_weights,
    sequence_moments,
    step_moments,
)
from grpo_sweeps.types import Array
from tests.unit.exact.oracles import brute_force, monte_carlo, mse_over_prompts

ESTIMATORS: dict[str, Callable[..., Array]] = {
    "grpo": grpo,
    "rloo": rloo,
    "grpo_std": grpo_std,
    "grpo_std_ddof0": partial(grpo_std, ddof=0, eps=1e-6),
    "reinforce": reinforce,
    "opo": opo,
    "reinforce_plus_plus": reinforce_plus_plus,
}


def assert_equal(found: Moments, expected: Moments, rel: float = 1e-12) -> None:
    scale = expected.second**0.5
    assert float((found.mean_D - expected.mean_D).abs().max()) <= rel * scale
    assert found.second == pytest.approx(expected.second, rel=rel)


@pytest.mark.parametrize("R", [2, 3])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("name", ESTIMATORS)
def test_multisets_of_classes_give_the_sum_over_tuples(name: str, aggregation: str, R: int, small: Enumeration) -> None:
    weights = one_group_weights(ESTIMATORS[name], aggregation, max_length=2)
    assert_equal(group_moments(small, weights, R), brute_force(small, weights, R))


@pytest.mark.parametrize("aggregation", ["length", "token_mean"])
def test_of_40_sequences_paid_by_the_token(aggregation: str) -> None:
    e = enumerate_policy(SoftmaxPolicy(prompts=1, max_length=3), 0, by_token())
    assert len(e.p_N) == 40
    weights = one_group_weights(rloo, aggregation, max_length=3)
    assert_equal(group_moments(e, weights, 2), brute_force(e, weights, 2))


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("name", ESTIMATORS)
def test_weights_are_those_of_each_group_alone(name: str, aggregation: str) -> None:
    generator = torch.Generator().manual_seed(0)
    rewards_MR = torch.randint(0, 3, (40, 5), generator=generator).double() / 2
    lengths_MR = torch.randint(1, 5, (40, 5), generator=generator)
    found_MR = one_group_weights(ESTIMATORS[name], aggregation, 4)(rewards_MR, lengths_MR)
    for rewards_R, lengths_R, found_R in zip(rewards_MR, lengths_MR, found_MR, strict=True):
        lengths = {"lengths_GR": lengths_R[None]} if name == "opo" else {}
        advantages_1R = ESTIMATORS[name](rewards_R[None], **lengths)
        expected_1R = torch.from_numpy(row_weights(advantages_1R, lengths_R[None], aggregation, 4))
        torch.testing.assert_close(found_R[None], expected_1R, rtol=1e-14, atol=1e-15)


def test_an_estimator_that_looks_at_the_batch_sees_one_group() -> None:
    def by_batch(rewards_GR: Tensor) -> Tensor:
        return rewards_GR - rewards_GR.mean()

    rewards_MR = torch.tensor([[0.0, 1.0], [1.0, 1.0], [5.0, 0.0]], dtype=torch.float64)
    lengths_MR = torch.ones(3, 2)
    found_MR = one_group_weights(by_batch, "sum", 1)(rewards_MR, lengths_MR)
    torch.testing.assert_close(found_MR, one_group_weights(grpo, "sum", 1)(rewards_MR, lengths_MR))


@pytest.mark.parametrize("name", [name for name in ESTIMATORS if name != "opo"])
def test_classes_by_reward_alone_suffice_where_lengths_do_not_count(name: str, enumeration: Enumeration) -> None:
    weights = one_group_weights(ESTIMATORS[name], "constant", max_length=4)
    by_length = group_moments(enumeration, weights, 3)
    assert_equal(group_moments(enumeration, weights, 3, by_length=False), by_length)


def test_a_policy_that_never_ends() -> None:
    e = enumerate_policy(SoftmaxPolicy(prompts=1, tokens=2, max_length=3, ends=False, width=3), 0, graded(3))
    weights = one_group_weights(grpo_std, "length", max_length=3)
    assert_equal(group_moments(e, weights, 3), brute_force(e, weights, 3))


def test_means_of_independent_sequences(small: Enumeration) -> None:
    """REINFORCE is a mean of independent contributions r psi: two ways to the same moments."""
    for R in (1, 2, 3):
        found = sequence_moments(small.rewards_N[:, None] * small.psi_ND, small.p_N, R)
        assert_equal(found, brute_force(small, one_group_weights(reinforce, "sum", 2), R))


def test_a_step_of_two_groups_against_the_sum_over_both() -> None:
    """All pairs of prompts and all pairs of groups, 2 x 2 prompts and 3^2 x 3^2 tuples of sequences."""
    policy = SoftmaxPolicy(prompts=2, tokens=3, max_length=1, width=3)
    enumerations = [enumerate_policy(policy, i, graded(3)) for i in range(2)]
    weights = one_group_weights(grpo, "sum", 1)
    chances, gradients = [], []
    for e in enumerations:
        pair_MR = torch.cartesian_prod(torch.arange(3), torch.arange(3))
        weights_MR = weights(e.rewards_N[pair_MR], e.lengths_N[pair_MR])
        gradients.append(torch.einsum("mr,mrd->md", weights_MR, e.psi_ND[pair_MR]))
        chances.append(e.p_N[pair_MR].prod(dim=1) / 2)
    chance_M, gradient_MD = torch.cat(chances), torch.cat(gradients)
    target_D = (enumerations[0].grad_J_D + enumerations[1].grad_J_D) / 2
    step_MMD = (gradient_MD[:, None] + gradient_MD) / 2 - target_D
    expected = float(chance_M @ step_MMD.square().sum(dim=2) @ chance_M)
    assert mse_over_prompts(enumerations, weights, R=2, N=4) == pytest.approx(expected, rel=1e-12)


def test_a_step_of_one_prompt_averages_its_groups(small: Enumeration) -> None:
    group = group_moments(small, one_group_weights(rloo, "sum", 2), 2)
    step = step_moments([group], 5)
    assert step.variance == pytest.approx(group.variance / 5, rel=1e-12)
    torch.testing.assert_close(step.mean_D, group.mean_D)


@pytest.mark.parametrize(("name", "aggregation"), [("grpo_std", "sum"), ("rloo", "token_mean")])
def test_sampling_agrees_within_its_interval(name: str, aggregation: str, enumeration: Enumeration) -> None:
    weights = one_group_weights(ESTIMATORS[name], aggregation, max_length=4)
    exact = group_moments(enumeration, weights, 4)
    sampled = monte_carlo(enumeration, weights, 4, draws=20_000, seed=1)
    assert abs(sampled.mse - exact.mse(enumeration.grad_J_D)) < 4 * sampled.mse_error
    assert sampled.mse == pytest.approx(sampled.moments.mse(enumeration.grad_J_D), rel=1e-9)
    used_D = sampled.mean_error_D > 0  # a parameter of another prompt has no gradient at all
    z_D = (sampled.moments.mean_D - exact.mean_D)[used_D] / sampled.mean_error_D[used_D]
    assert float(z_D.abs().max()) < 5
    assert sampled.mean_error_D.square().sum() * 20_000 == pytest.approx(exact.variance, rel=0.1)


def test_what_is_refused(small: Enumeration) -> None:
    rewards, lengths = one_group_weights(grpo, "sum", 2), one_group_weights(grpo, "length", 2)
    with pytest.raises(ValueError, match="order of the rollouts"):
        group_moments(small, lambda rewards_MR, lengths_MR: rewards_MR * torch.tensor([1.0, 2.0]), 2)
    for weights in (lengths, one_group_weights(grpo, "token_mean", 2), one_group_weights(opo, "sum", 2)):
        with pytest.raises(ValueError, match="depend on the lengths"):
            group_moments(small, weights, 2, by_length=False)
    with pytest.raises(ValueError, match="take a smaller R"):
        group_moments(small, rewards, 2000)
    with pytest.raises(ValueError, match="no whole number"):
        mse_over_prompts([small], rewards, 3, 10)
    with pytest.raises(ValueError, match="standard error"):
        monte_carlo(small, rewards, 2, draws=1)
