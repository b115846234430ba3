"""The error of a step at a fixed budget: exact moments against drawn steps, the best R against a plain search."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from grpo_sweeps.estimators import grpo, grpo_std, reinforce, rloo
from grpo_sweeps.estimators.declared import DECLARATIONS
from grpo_sweeps.exact import SoftmaxPolicy, one_group_weights
from grpo_sweeps.science.budget import Ascent, Budget, drawn, gradient_of, oracle_step, rescaled, two_budgets
from tests.unit.exact.oracles import mse_over_prompts


@pytest.mark.parametrize("name", ["grpo", "rloo", "grpo_std", "reinforce"])
def test_exact_quality_against_drawn_steps(prompts, rng, name):
    one, function = Budget(tuple(prompts)), DECLARATIONS[name].function
    exact, found = one.of(function, 4, 16), drawn(one, gradient_of(DECLARATIONS[name]), 4, 16, 3000, rng)
    assert found.mse == pytest.approx(exact.mse, rel=0.1)
    assert found.cosine == pytest.approx(exact.cosine, abs=0.05)


@pytest.mark.parametrize("estimator", [grpo, rloo, grpo_std, reinforce])
@pytest.mark.parametrize("R", [2, 8])
def test_quality_against_the_moments_over_prompts(prompts, estimator, R):
    weights = one_group_weights(estimator, "sum", 3)
    expected = mse_over_prompts([o.e for o in prompts], weights, R, 16, by_length=False)
    assert Budget(tuple(prompts)).of(estimator, R, 16).mse == pytest.approx(expected, rel=1e-12)


def test_the_best_group_size_is_found_without_the_formula(prompts):
    one = Budget(tuple(prompts))
    errors = {R: one.of(rloo, R, 64).mse for R in range(2, 41)}
    best, (low, high) = one.found_R(64)
    assert best == min(errors, key=lambda R: errors[R]) and abs(best - one.best_R) < 1
    assert [R for R, error in errors.items() if error <= 1.05 * errors[best]] == list(range(low, high + 1))
    assert one.found_R(8)[0] == best, "whatever N"


def test_prompts_alike_have_no_best_group_size(prompts):
    alike = Budget((prompts[0], prompts[0]))
    assert alike.between == pytest.approx(0, abs=1e-12)
    with pytest.raises(ValueError, match="beyond 100"):
        Budget((prompts[0],)).found_R(64)


def test_drawn_steps_of_the_oracle(prompts, rng):
    one = Budget(tuple(prompts))
    assert drawn(one, oracle_step, 4, 16, 3000, rng).mse == pytest.approx(one.oracle(4, 16).mse, rel=0.1)


def test_a_short_step_gains_its_product_with_the_gradient(prompts, rng):
    """To first order, and the policy that was handed in is left alone."""
    policy = SoftmaxPolicy(prompts=3, tokens=3, max_length=3, seed=4)
    before = [p.clone() for p in policy.parameters()]
    one, length = Budget(tuple(prompts)), 1e-5
    ascent = Ascent(policy, one, length)
    for direction in (one.target_D, -one.target_D, rng.normal(size=len(one.target_D))):
        expected = float(direction @ one.target_D) / np.linalg.norm(direction) * length
        assert ascent.gain(direction) == pytest.approx(expected, rel=1e-2, abs=1e-9)
    assert ascent.gain(0 * one.target_D) == 0
    assert all(torch.equal(a, b) for a, b in zip(before, policy.parameters(), strict=True))


def test_rescaling_is_leave_one_out(prompts):
    one = Budget(tuple(prompts))
    assert one.of(rescaled, 4, 16).mse == pytest.approx(one.of(rloo, 4, 16).mse)
    assert "mixed groups" in two_budgets(one, (2, 4), 4, 16).exact


def test_the_oracle_is_the_limit(prompts):
    alone = Budget((prompts[0],))
    ratio = [alone.of(rloo, R, R).mse / alone.oracle(R, R).mse for R in (2, 8, 64)]
    assert np.all(np.diff(ratio) < 0) and ratio[-1] == pytest.approx(1, abs=0.1)
