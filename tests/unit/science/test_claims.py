"""Claims by their own judgements, and each of them refuted where what it says is made false."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
import torch

from grpo_sweeps.estimators import reinforce, rloo
from grpo_sweeps.exact import SoftmaxPolicy, binary
from grpo_sweeps.paper import SPARSE
from grpo_sweeps.science import advantages, budget, credit, gradient, scores
from grpo_sweeps.science.budget import Budget
from grpo_sweeps.science.claim import EXACT, Estimate, agreement


def test_exact_claims_hold_to_rounding(prompts, rng):
    claims = [
        advantages.zero_sum(prompts, (2, 3)),
        advantages.variances(prompts, (2, 4), rng, 4000),
        advantages.concentration((0.1, 0.5), (2, 4, 8), (0.05, 0.3)),
        gradient.norms(prompts, (2, 4), rng, 4000),
        scores.about_two(prompts, (2, 8), rng, 300),
        scores.clusters(prompts, rng, 4000),
        gradient.own_reward(prompts, (2, 4, 8), rng, 4000),
        gradient.baselines(prompts),
        credit.one_advantage([o.e for o in prompts]),
        credit.growing_bias(credit.multi_turn(range(6))),
        budget.best_R({"one": Budget(tuple(prompts))}, (2, 4, 8), 32),
    ]
    assert {c.id for c in claims if not c.error < EXACT} == set()
    found = {c.id: c.judgement for c in claims}
    assert found == {
        "C2": "holds", "C3": "holds", "C4": "holds", "C5": "holds, corrected", "C8": "does not hold", "C9": "undefined",
        "C14": "holds, corrected", "C15": "does not hold", "C1": "holds, corrected",
        "C13": "holds, corrected: not linear",
        "U1": "holds",
    }  # fmt: skip
    for claim in claims:
        if "intervals" in claim.measured:
            held, _, total = claim.measured.split()[:3]
            assert held == total, claim


def test_a_claim_falls_where_what_it_says_is_false(prompts, rng, monkeypatch):
    monkeypatch.setitem(advantages.ZERO_SUM, "none", reinforce)
    assert advantages.zero_sum(prompts, (2, 3)).judgement == "does not hold"
    monkeypatch.setattr(advantages, "grpo", rloo)
    assert advantages.variances(prompts, (2, 4), rng, 100).judgement == "does not hold"
    monkeypatch.setattr(gradient, "identity", lambda o, R: gradient.norm_by_k(o, R) * 1.0001)
    assert gradient.norms(prompts, (2, 4), rng, 100).judgement == "does not hold"
    monkeypatch.setattr(advantages, "tail_bound", lambda R, p, eps: 0.1)
    assert advantages.concentration((0.5,), (4,), (0.1,)).judgement == "does not hold"


def test_few_groups_decide_nothing_about_the_mean_rank(prompts, rng):
    assert scores.about_two(prompts, (2, 4), rng, 12).judgement == "undecided"


def test_rank_is_not_bounded_by_the_zero_sum(prompts, rng):
    claim = scores.ranks(prompts, (2, 4), rng, 40)
    assert claim.judgement == "does not hold" and "after centring 0" in claim.exact


def test_table_one_is_possible_and_the_hoeffding_entries_are_computed():
    assert scores.feasible().judgement == "possible"  # numbers of one model: arithmetic can do no more
    rows = {(row["R"], row["eps"]): row["bound"] for row in advantages.hoeffding_rows()}
    assert [round(rows[4, eps], 2) for eps in (0.3, 0.2, 0.1)] == [0.97, 1.45, 1.85]
    assert advantages.hoeffding_table().judgement == "does not hold"


@pytest.mark.parametrize("R", [2, 3, 5])
@pytest.mark.parametrize("p", [0.2, 0.5])
def test_chances_of_binary_groups_against_every_group(R, p):
    groups = np.array(list(itertools.product([0.0, 1.0], repeat=R)))
    chances = np.prod(np.where(groups == 1, p, 1 - p), axis=1)
    off = groups[:, 0] - groups.mean(axis=1)
    for eps in (0.05, 0.3, 0.6):
        assert advantages.chance_of_advantage_above(R, p, eps) == pytest.approx(chances[np.abs(off) > eps].sum())
        means = np.abs(groups.mean(axis=1) - p) > eps
        assert advantages.chance_of_mean_off(R, p, eps) == pytest.approx(chances[means].sum())


@pytest.mark.parametrize("R", [2, 3])
def test_norm_by_k_against_every_group(tiny, R):
    index = np.array(list(itertools.product(range(len(tiny.p_N)), repeat=R)))
    r = tiny.r_N[index]
    g = np.einsum("mr,mrd->md", r - r.mean(axis=1, keepdims=True), tiny.psi_ND[index]) / R
    chances, k = tiny.p_N[index].prod(axis=1), r.sum(axis=1)
    expected = [np.average((g**2).sum(axis=1)[k == j], weights=chances[k == j]) for j in range(1, R)]
    assert gradient.norm_by_k(tiny, R) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("right", "wrong", "V", "expected"), [(1.0, -1.0, 0.0, 2.0), (0.0, 0.0, 1.0, 1.0)])
def test_slope_of_signal_and_of_noise(tiny, monkeypatch, right, wrong, V, expected):
    groups = {True: (0.5, np.array([right]), V), False: (0.5, np.array([wrong]), V)}
    monkeypatch.setattr(type(tiny), "group", lambda _, which: groups[which])
    assert gradient.slope(gradient.norm_by_k(tiny, 8), 8) == pytest.approx(expected)
    assert gradient.slope(gradient.norm_by_k(tiny, 8, scaled=True), 8) == pytest.approx(expected - 1)


def test_credit_of_a_single_token_is_uniform():
    from grpo_sweeps.exact import enumerate_policy

    e = enumerate_policy(SoftmaxPolicy(1, 3, 1, seed=0), 0, binary(2, 0))
    found = credit.credit(e)
    assert found.share == pytest.approx(1) and found.within == pytest.approx(0)


def test_ascent_climbs_and_steps_below_the_dtype_change_nothing():
    path = gradient.ascend(SoftmaxPolicy(2, 3, 3, seed=0), [binary(3, 0), binary(3, 1)], 5, 0.5, 4)
    assert all(a.J < b.J for a, b in itertools.pairwise(path))
    assert path[-1].effective[0.05] == pytest.approx(1 - path[-1].all_equal)  # eps < 1/R: the share of mixed groups
    still = gradient.ascend(SoftmaxPolicy(2, 3, 3, seed=0), [binary(3, 0)], 1, 1e-12, 4)[0]
    assert still.unchanged["bfloat16"] == 1.0 and still.unchanged["float32"] > 0.9
    assert gradient.hoyer(np.eye(9)[0]) == pytest.approx(1) and gradient.hoyer(np.ones(9)) == pytest.approx(0)


@pytest.mark.parametrize("start", [0, 1])
def test_the_share_of_effective_rollouts_rises_below_one_half_and_falls_above(start):
    """C6: that fewer advantages lie beyond eps over training depends on where the policy starts."""
    path = gradient.ascend(SoftmaxPolicy(1, 3, 3, seed=0), [binary(3, start)], 60, 0.5, 8)
    below = [(a, b) for a, b in itertools.pairwise(path) if b.J < 0.5]
    above = [(a, b) for a, b in itertools.pairwise(path) if a.J > 0.5]
    assert bool(below) == (start == 1) and above
    eps = min(SPARSE)  # below 1/R
    assert all(b.effective[eps] > a.effective[eps] for a, b in below)
    assert all(b.effective[eps] < a.effective[eps] for a, b in above)


def test_equation_23_is_an_identity_that_can_fail_and_so_can_its_bound(monkeypatch):
    turns = credit.multi_turn(range(4))
    assert credit.growing_bias(turns).judgement == "holds, corrected: not linear"
    assert all(credit.identity_error(e) < EXACT and 0 < credit.bound_share(e) <= 1 for e in turns)
    wrong = [dataclasses.replace(e, action_values_NT=e.action_values_NT * (1 + 1e-6)) for e in turns]
    assert credit.identity_error(wrong[0]) > EXACT and credit.growing_bias(wrong).judgement == "does not hold"
    monkeypatch.setattr(credit, "bound_share", lambda e: 1.01)
    assert credit.growing_bias(turns).judgement == "does not hold"


def test_a_spread_that_grows_on_a_line_makes_linear_growth_hold(monkeypatch):
    monkeypatch.setattr(credit, "stage_bias", lambda e: (np.zeros(4), np.arange(4.0)))
    assert credit.growing_bias(credit.multi_turn(range(2))).judgement == "holds"


def test_a_single_turn_is_not_exact_at_every_position(prompts):
    claim = credit.growing_bias(credit.multi_turn(range(4)), [o.e for o in prompts])
    spread = max(credit.in_one_turn(o.e) for o in prompts)
    assert spread > 0.1 and f"v(s_t) - v(s_0) spreads up to {spread:.2f} of r" in claim.exact
    for o in prompts:  # the reward comes at the end: nothing is past but v(s_t) - v(s_0)
        moved = (o.e.values_NT - o.e.J)[o.e.mask_NT]
        assert float(moved.abs().max()) > 0 and credit.identity_error(o.e) < EXACT


def test_an_interval_agrees_or_does_not():
    found = Estimate.of(np.array([0.0, 1.0] * 500))
    assert found.agrees(0.5) and not found.agrees(0.6)
    assert agreement([(found, 0.5), (found, 0.6)]) == "1 of 2 intervals hold the exact value"


def test_rewards_that_are_not_binary_are_refused(tiny):
    from grpo_sweeps.exact import enumerate_policy, graded
    from grpo_sweeps.science.claim import Prompt

    with pytest.raises(ValueError, match="0 and 1 are needed"):
        Prompt(enumerate_policy(SoftmaxPolicy(1, 3, 2), 0, graded(3))).group(True)
    assert torch.is_tensor(tiny.e.p_N)
