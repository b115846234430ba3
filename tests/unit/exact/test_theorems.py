"""What is claimed of the estimators' moments, to rounding (arXiv 2606.29238; arXiv 2603.01162 for the U-statistic)."""

from __future__ import annotations

from math import comb

import pytest
import torch
from torch import Tensor

from grpo_sweeps.estimators import grpo, rloo
from grpo_sweeps.exact import (
    Enumeration,
    between_prompts,
    group_moments,
    one_group_weights,
    sequence_moments,
)
from tests.unit.exact.oracles import mse_over_prompts

GROUP_MEAN = one_group_weights(grpo, "sum", 4)
LEAVE_ONE_OUT = one_group_weights(rloo, "sum", 4)
RS = [2, 3, 4, 8, 16]


def norm2(values_D: Tensor) -> float:
    return float(values_D.square().sum())


@pytest.mark.parametrize("R", RS)
def test_the_group_mean_shrinks_the_gradient_and_leave_one_out_does_not(R: int, enumeration: Enumeration) -> None:
    target_D = enumeration.grad_J_D
    mean_D = group_moments(enumeration, GROUP_MEAN, R, by_length=False).mean_D
    torch.testing.assert_close(mean_D, (R - 1) / R * target_D, rtol=1e-12, atol=1e-13)
    unbiased_D = group_moments(enumeration, LEAVE_ONE_OUT, R, by_length=False).mean_D
    torch.testing.assert_close(unbiased_D, target_D, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("R", RS)
def test_errors_of_leave_one_out_and_of_the_group_mean(R: int, enumeration: Enumeration) -> None:
    e = enumeration
    one_out = group_moments(e, LEAVE_ONE_OUT, R, by_length=False).mse(e.grad_J_D)
    assert one_out == pytest.approx(e.V1 / R + e.V2 / (R * (R - 1)), rel=1e-10)
    mean = group_moments(e, GROUP_MEAN, R, by_length=False).mse(e.grad_J_D)
    assert mean == pytest.approx(((R - 1) / R) ** 2 * one_out + norm2(e.grad_J_D) / R**2, rel=1e-10)


def test_errors_in_the_multisets_by_length_as_well(binary_enumeration: Enumeration) -> None:
    e = binary_enumeration
    one_out = group_moments(e, LEAVE_ONE_OUT, 8).mse(e.grad_J_D)
    assert one_out == pytest.approx(e.V1 / 8 + e.V2 / 56, rel=1e-10)


@pytest.mark.parametrize("R", RS)
def test_error_over_prompts(R: int, prompts: list[Enumeration]) -> None:
    V1, V2 = (sum(getattr(e, name) for e in prompts) / len(prompts) for name in ("V1", "V2"))
    V_between = between_prompts(prompts)
    assert 2 * V_between <= V2
    expected = R * V_between + V1 + V2 / (R - 1)
    for N in (48, 96):
        N_mse = N * mse_over_prompts(prompts, LEAVE_ONE_OUT, R, N, by_length=False)
        assert N_mse == pytest.approx(expected, rel=1e-10)


def test_the_best_group_size_is_the_one_claimed(prompts: list[Enumeration]) -> None:
    """R* = 1 + sqrt(E V2 / V_between): the exact curve over the divisors of N turns next to it."""
    V2 = sum(e.V2 for e in prompts) / len(prompts)
    best = 1 + (V2 / between_prompts(prompts)) ** 0.5
    sizes = [R for R in range(2, 17) if 720720 % R == 0]
    errors = [mse_over_prompts(prompts, LEAVE_ONE_OUT, R, 720720, by_length=False) for R in sizes]
    assert sizes == list(range(2, 17))
    assert abs(sizes[errors.index(min(errors))] - best) < 1


def test_the_oracle_that_knows_the_value(enumeration: Enumeration) -> None:
    e = enumeration
    oracle = sequence_moments((e.rewards_N - e.J)[:, None] * e.psi_ND, e.p_N, 8)
    assert oracle.mse(e.grad_J_D) == pytest.approx(e.V1 / 8, rel=1e-12)


def test_credit_by_the_token_keeps_the_gradient(enumeration: Enumeration) -> None:
    """Whole return, reward-to-go and advantages of any baseline that s_t fixes have the mean grad J."""
    e = enumeration
    whole_NT = e.rewards_N[:, None].expand_as(e.returns_NT)
    past_and_value_NT = e.past_rewards_NT + e.values_NT - e.J
    for credit_NT in (
        whole_NT,
        e.returns_NT,
        e.advantages_NT,
        e.returns_NT - e.values_NT,
        whole_NT + past_and_value_NT,
    ):
        mean_D = sequence_moments(e.contribution(credit_NT), e.p_N, 4).mean_D
        torch.testing.assert_close(mean_D, e.grad_J_D, rtol=1e-12, atol=1e-13)


def test_exact_credit_has_the_least_variance_of_these(enumeration: Enumeration) -> None:
    """q(s_t, x_t) averages over what comes after, so that it cannot vary more than the return it is the mean of."""
    e = enumeration
    critic = sequence_moments(e.contribution(e.advantages_NT), e.p_N, 1).variance
    to_go = sequence_moments(e.contribution(e.returns_NT - e.values_NT), e.p_N, 1).variance
    assert critic <= to_go


def test_the_best_constant_baseline(enumeration: Enumeration) -> None:
    """Claim C15: E[|psi|^2 r] / E|psi|^2, not the value."""
    e = enumeration
    best = float(e.p_N @ (e.rewards_N * e.gram_NN.diagonal())) / e.trace_F

    def variance(baseline: float) -> float:
        return sequence_moments((e.rewards_N - baseline)[:, None] * e.psi_ND, e.p_N, 1).variance

    assert variance(best) < min(variance(best + 1e-3), variance(best - 1e-3), variance(e.J))
    assert variance(e.J) - variance(best) == pytest.approx(e.trace_F * (e.J - best) ** 2, rel=1e-9)


@pytest.mark.parametrize("R", [2, 4, 8])
def test_squared_norm_by_the_number_of_correct_rollouts(R: int, binary_enumeration: Enumeration) -> None:
    """Claim C5: E[|g|^2 given k] = s2^2 (|grad J|^2 / (pq)^2 + V+ / k + V- / (R - k)), s2 = k (R - k) / R^2."""
    e = binary_enumeration
    p, (wrong, correct) = e.J, e.reward_classes.variance_C.tolist()
    D2 = norm2(e.grad_J_D) / (p * (1 - p)) ** 2
    for k in range(1, R):

        def of_k(rewards_MR: Tensor, lengths_MR: Tensor, k: int = k) -> Tensor:
            return GROUP_MEAN(rewards_MR, lengths_MR) * (rewards_MR.sum(dim=1, keepdim=True) == k)

        chance = comb(R, k) * p**k * (1 - p) ** (R - k)
        found = group_moments(e, of_k, R, by_length=False).second / chance
        s2 = k * (R - k) / R**2
        assert found == pytest.approx(s2**2 * (D2 + correct / k + wrong / (R - k)), rel=1e-11)
