"""C16 to C24 on exact policies: each verdict as it is, and another where what is said is made true or false."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

from grpo_sweeps import spectra
from grpo_sweeps.exact import SoftmaxPolicy, binary, enumerate_policy
from grpo_sweeps.science import advantages, credit, gradient, structure
from grpo_sweeps.science.claim import EXACT, Estimate, Prompt
from grpo_sweeps.spectra.stacked import stacked_bounds


@pytest.fixture(scope="module")
def one_token():
    """Nothing is drawn after the first token of a turn."""
    return enumerate_policy(SoftmaxPolicy(1, 3, 1, seed=0), 0, binary(2, 0))


def orthogonal(o, index):
    """Rows along axes of their own, one for each rollout."""
    return np.tile(np.eye(index.shape[1]), (len(index), 1, 1))


def parallel(o, index):
    """Rows of one norm close to one direction."""
    return 0.1 * orthogonal(o, index) + np.ones((*index.shape, index.shape[1]))


def by_norms(o, index):
    """Rows along axes of their own, one of them ten times as long."""
    return orthogonal(o, index) * np.where(np.arange(index.shape[1]) == 0, 10.0, 1.0)[:, None]


@pytest.mark.parametrize(
    ("uniform", "token", "expected"),
    [
        (parallel, orthogonal, "holds"),
        (orthogonal, parallel, "does not hold"),
        (by_norms, orthogonal, "does not hold"),  # the rank is higher, and no more than its norms make it
        (parallel, parallel, "does not hold"),
    ],
)
def test_credit_by_token_raises_the_rank_where_it_adds_directions(prompts, rng, monkeypatch, uniform, token, expected):
    monkeypatch.setattr(structure, "uniform_rows", uniform)
    monkeypatch.setattr(structure, "token_rows", token)
    monkeypatch.setattr(structure, "first_equal", lambda index: np.tile(np.arange(index.shape[1]), (len(index), 1)))
    assert structure.credit_by_token(prompts, (2, 4), rng, 60).judgement == expected


def test_a_rise_that_is_not_told_from_the_margin_is_undecided():
    wide, above, small = Estimate(0.3, 0.1), Estimate(0.3, 0.01), Estimate(0.0, 0.01)
    assert structure.raised(above, above) == "holds" and structure.raised(wide, wide) == "undecided"
    assert structure.raised(above, small) == structure.raised(small, above) == "does not hold"


def test_rows_of_the_true_credit_add_up_to_the_gradient(prompts):
    for o in prompts:
        rows = structure.token_rows(o, np.arange(len(o.p_N))[None])[0]
        assert o.p_N @ rows == pytest.approx(o.grad_J_D, abs=1e-12)


def test_what_is_received_is_what_is_expected_where_nothing_is_drawn_after(prompts, one_token):
    claim = credit.in_expectation([o.e for o in prompts])
    assert claim.judgement == "holds, corrected" and claim.error < EXACT
    assert credit.in_expectation([one_token]).judgement == "holds"
    e = prompts[0].e
    wrong = dataclasses.replace(e, action_values_NT=e.action_values_NT * (1 + 1e-6))
    assert credit.in_expectation([wrong]).judgement == "does not hold"


def test_a_single_turn_is_exact_at_its_first_token_and_on_average(prompts, one_token):
    claim = credit.single_turn([o.e for o in prompts])
    assert claim.judgement == "does not hold" and claim.error < EXACT
    assert credit.single_turn([one_token]).judgement == "holds"
    e = prompts[0].e
    wrong = dataclasses.replace(e, values_NT=e.values_NT + 0.1)
    assert credit.single_turn([wrong]).judgement == "undecided"


def test_the_bound_on_the_bias_can_fail(prompts, monkeypatch):
    turns = [*credit.multi_turn(range(4)), prompts[0].e]
    assert credit.stage_bound(turns).judgement == "holds"
    paid_less = dataclasses.replace(turns[0], token_rewards_NT=turns[0].token_rewards_NT * 1e-3)
    # the values still speak of the whole rewards, of which hardly any has been received
    smaller = dataclasses.replace(paid_less, values_NT=paid_less.values_NT * 1e-3)
    assert credit.stage_bound([smaller]).judgement == "does not hold"


@pytest.mark.parametrize("R", [2, 3, 5])
@pytest.mark.parametrize("p", [0.2, 0.5])
def test_the_chance_of_some_rollout_beyond_eps_against_every_group(R, p):
    groups = np.array(list(itertools.product([0.0, 1.0], repeat=R)))
    chances = np.prod(np.where(groups == 1, p, 1 - p), axis=1)
    off = np.abs(groups - groups.mean(axis=1, keepdims=True)).max(axis=1)
    for eps in (0.05, 0.3, 0.6):
        assert advantages.chance_of_some_beyond(R, p, eps) == pytest.approx(chances[off > eps].sum())


def test_every_rollout_is_within_eps_where_a_group_is_nearly_sure():
    assert advantages.every_rollout((0.1, 0.5)).judgement == "does not hold"
    assert advantages.every_rollout((1e-3,)).judgement == "holds"  # hardly any group is mixed


def test_a_baseline_that_weighs_the_middle_most_is_a_curriculum(prompts, monkeypatch):
    assert gradient.curriculum(prompts, (2, 4, 8)).judgement == "does not hold"
    monkeypatch.setattr(gradient, "weight_on", lambda estimator, p, R: p * (1 - p))
    assert gradient.curriculum(prompts, (2, 4, 8)).judgement == "holds"
    monkeypatch.setattr(gradient, "weight_on", lambda estimator, p, R: (p * (1 - p)) ** -0.5)
    assert gradient.curriculum(prompts, (2, 4, 8)).judgement == "does not hold"


def test_clipping_and_kl_are_nothing_until_the_policy_has_moved(rng):
    policy, rewards = (
        SoftmaxPolicy(prompts=3, tokens=3, max_length=3, seed=4),
        [binary(3, 0), binary(3, 1), binary(2, 0)],
    )
    before = structure.moved(policy, rewards, 0.0)
    claim = structure.clipping_and_kl(before, structure.moved(policy, rewards, 1.5), 4, rng, 60)
    assert claim.judgement == "holds, corrected" and claim.error < EXACT and "3 of 3 groups" in claim.exact
    assert structure.clipping_and_kl(before, before, 4, rng, 60).judgement == "holds"


def test_a_clipped_token_leaves_its_row(monkeypatch):
    policy = SoftmaxPolicy(prompts=1, tokens=3, max_length=3, seed=4)
    (old,), (now,) = (structure.moved(policy, [binary(3, 0)], length) for length in (0.0, 3.0))
    index = np.array([[i, j] for i in range(len(old.p_N)) for j in range(len(old.p_N)) if old.r_N[i] != old.r_N[j]])
    rows = structure.loss_rows(old.e, now.e, index)
    ratio = (now.e.log_probs_NT - old.e.log_probs_NT).exp().numpy()[index]
    A = (old.r_N[index] - old.r_N[index].mean(axis=1, keepdims=True))[:, :, None]
    out = ((A > 0) & (ratio > 1.2)) | ((A < 0) & (ratio < 0.8))
    expected = np.where(out, 0.0, A * ratio)[..., None] * now.e.token_psi_NTD.numpy()[index]
    assert out.any() and rows.clipped == pytest.approx(expected.sum(axis=2), abs=1e-12)


def test_stacked_groups_lie_within_what_their_own_spectra_allow(prompts, rng):
    claim = structure.directions_of_a_step(prompts, (2, 4), rng, 6, 40)
    assert claim.judgement == "does not hold" and claim.error < EXACT
    # one group alone is its own step
    for R in (2, 4):
        drawn = [structure.stacked_step(prompts, R, 1, rng) for _ in range(60)]
        rank, low, high = next(step for step in drawn if step is not None)
        assert low == pytest.approx(rank) and high == pytest.approx(rank)


def test_the_bounds_of_a_stack_are_reached(rng):
    one = rng.standard_normal((3, 12))
    values = np.linalg.svd(one, compute_uv=False)
    rank, energy = spectra.effective_rank(values), (values**2).sum()
    low, high = stacked_bounds([rank, rank], [energy, energy])
    together = np.concatenate([one, one])
    apart = np.concatenate([np.hstack([one, 0 * one]), np.hstack([0 * one, one])])
    assert spectra.effective_rank(structure.values_of(together)) == pytest.approx(low)
    assert spectra.effective_rank(structure.values_of(apart)) == pytest.approx(high)
    assert np.isnan(stacked_bounds([], [])).all()


def test_two_rows_for_each_step_make_two_directions_hold(prompts, rng, monkeypatch):
    monkeypatch.setattr(structure, "stacked_step", lambda *_: (2.0 + 0.01 * rng.standard_normal(), 1.0, 4.0))
    assert structure.directions_of_a_step(prompts, (2, 4), rng, 6, 40).judgement == "holds"
    monkeypatch.setattr(structure, "stacked_step", lambda *_: (2.0 + 0.01 * rng.standard_normal(), 3.0, 4.0))
    assert structure.directions_of_a_step(prompts, (2, 4), rng, 6, 40).judgement == "undecided"


def test_the_order_of_group_sizes_needs_no_structure(prompts, rng, monkeypatch):
    claim = structure.order_of_sizes(prompts, (2, 4, 8), rng, 60)
    assert claim.judgement == "possible"
    groups = np.array([g for g in itertools.product([0.0, 1.0], repeat=4) if 0 < sum(g) < 4])
    A = groups - groups.mean(axis=1, keepdims=True)
    chances = np.prod(np.where(groups == 1, 0.3, 0.7), axis=1)
    expected = np.average((A**2).max(axis=1) / (A**2).sum(axis=1), weights=chances)
    assert structure.orthogonal_top1(4, 0.3) == pytest.approx(expected)
    monkeypatch.setattr(structure, "orthogonal_top1", lambda R, p: 1 / R)
    assert structure.order_of_sizes(prompts, (2, 4, 8), rng, 60).judgement == "does not hold"


def test_equal_texts_are_one_row_of_the_null(tiny):
    index = np.array([[0, 0, 1, 2]])
    rows = np.eye(3)[[0, 0, 1, 2]][None]
    rank, null = structure.rank_and_null(rows, index)
    assert rank == pytest.approx(null) and rank[0] == pytest.approx((2**0.5 + 2) ** 2 / 4)
    assert isinstance(tiny, Prompt)
