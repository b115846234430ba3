"""pairs and permutation: exact values by enumeration, and what happens where they are not defined."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from grpo_sweeps.report.measure import permutation
from grpo_sweeps.report.measure.pairs import pair_columns
from grpo_sweeps.report.measure.permutation import assignments, least_p, permutation_columns
from grpo_sweeps.report.measure.spectral import Groups


def groups_of(gram_NRR, rewards_NR, advantages_NR=None, factor=1.0, scores=True) -> Groups:
    rewards_NR = np.asarray(rewards_NR, dtype=float)
    N = len(rewards_NR)
    if advantages_NR is None:
        advantages_NR = rewards_NR - rewards_NR.mean(axis=1, keepdims=True)
    return Groups(
        step_N=np.zeros(N, np.int64), group_N=np.arange(N), gram_NRR=np.asarray(gram_NRR, dtype=float),
        weights_NR=advantages_NR * factor, rewards_NR=rewards_NR, advantages_NR=advantages_NR,
        binary_N=np.isin(rewards_NR, (0.0, 1.0)).all(axis=1), floor_N=np.zeros(N),
        same_NR=np.tile(np.arange(len(gram_NRR[0])), (N, 1)), scores=scores,
    )  # fmt: skip


@pytest.mark.parametrize("R", [3, 4, 5])
def test_the_score_mean_null_is_zero_over_mixed_groups_alone(R):
    """Every group of a policy of four outcomes, each with its probability: nothing is drawn."""
    rng = np.random.default_rng(R)
    p_N, r_N = np.array([0.1, 0.25, 0.35, 0.3]), np.array([1.0, 1.0, 0.0, 0.0])
    psi_ND = rng.standard_normal((4, 3))
    psi_ND -= p_N @ psi_ND  # E psi = 0
    index = np.array(list(itertools.product(range(4), repeat=R)))
    chance = p_N[index].prod(axis=1)
    mixed = np.ptp(r_N[index], axis=1) > 0
    gram_NN = psi_ND @ psi_ND.T
    found = pair_columns(groups_of(gram_NN[index[:, :, None], index[:, None, :]], r_N[index]))
    scale = chance @ found["pair_norm"]
    assert abs(chance[mixed] @ found["pair_null"][mixed]) < 1e-12 * scale
    assert abs(chance @ found["pair_all"]) < 1e-12 * scale  # with the all-equal groups
    assert abs(chance[mixed] @ found["pair_all"][mixed]) > 1e-3 * scale  # without them it is not zero
    assert np.isnan(found["pair_null"][~mixed]).all()
    other = np.array([0.2, 0.2, 0.2, 0.4])[index].prod(axis=1)  # a sampler that is not the policy
    assert abs(other[mixed] @ found["pair_null"][mixed]) > 1e-3 * scale


def test_products_by_class():
    gram = [[2.0, 0.5, -1.0], [0.5, 2.0, -3.0], [-1.0, -3.0, 5.0]]
    found = pair_columns(groups_of([gram], [[1.0, 1.0, 0.0]]))
    assert found["pair_right"][0] == 0.5 and found["pair_between"][0] == -2.0 and math.isnan(found["pair_wrong"][0])
    assert found["pair_norm"][0] == 3.0 and found["pair_all"][0] == pytest.approx(-7 / 6)
    assert math.isnan(pair_columns(groups_of([np.eye(2)], [[1.0, 0.0]]))["pair_null"][0])
    loss = pair_columns(groups_of([gram], [[1.0, 1.0, 0.0]], scores=False))
    assert loss["gradient_norm"][0] == pytest.approx(math.sqrt(2)) and math.isnan(loss["pair_norm"][0])


@pytest.mark.parametrize(("R", "k"), [(4, 1), (4, 2), (6, 2), (8, 3)])
def test_over_all_assignments_the_mid_p_has_the_mean_and_variance_that_are_claimed(R, k):
    rng = np.random.default_rng(k)
    psi = rng.standard_normal((R, 5))
    psi[0] = psi[1]  # a tie
    rewards = assignments(R, k)
    found = permutation_columns(groups_of(np.broadcast_to(psi @ psi.T, (len(rewards), R, R)), rewards))
    assert found["shuffle_mid_p"].mean() == pytest.approx(0.5, abs=1e-12)
    assert found["shuffle_mid_p"].var() == pytest.approx(found["shuffle_variance"][0], abs=1e-12)
    assert len(rewards) == math.comb(R, k) == found["shuffle_assignments"][0]
    assert (found["shuffle_p"] <= 0.1).mean() <= 0.1 + 1e-12  # a p-value, not only a number


def test_scores_along_the_reward_reach_the_least_p_and_orthogonal_ones_tell_nothing():
    for R in (2, 4, 8):
        for k in range(1, R):
            rewards = assignments(R, k)[:1]
            along = rewards[0] - rewards[0].mean()
            found = permutation_columns(groups_of([np.outer(along, along) + 1e-3 * np.eye(R)], rewards))
            assert found["shuffle_p"][0] == pytest.approx((2 if 2 * k == R else 1) / math.comb(R, k))
            flat = permutation_columns(groups_of([np.eye(R)], rewards))
            assert flat["shuffle_p"][0] == 1.0 and flat["shuffle_variance"][0] == 0.0
    assert [least_p(R) > 0.05 for R in (2, 4, 8)] == [True, True, False]


def test_a_rollout_keeps_its_length_and_what_cannot_be_permuted_is_left_out():
    rng = np.random.default_rng(0)
    psi, rewards = rng.standard_normal((4, 6)), np.array([[1.0, 0.0, 0.0, 1.0]])
    lengths = np.array([[1.0, 2.0, 5.0, 9.0]])
    gram = psi @ psi.T
    short = permutation_columns(groups_of([gram], rewards, factor=1 / lengths))
    scaled = permutation_columns(groups_of([gram / np.outer(lengths, lengths)], rewards))
    assert short["shuffle_p"] == scaled["shuffle_p"] != permutation_columns(groups_of([gram], rewards))["shuffle_p"]
    own = permutation_columns(groups_of([gram], rewards, advantages_NR=rewards))  # REINFORCE: zeros, one factor
    assert np.isfinite(own["shuffle_p"]).all()
    for left_out in (
        groups_of([gram], rewards, scores=False),
        groups_of([gram], 0.5 * rewards),
        groups_of([gram], np.ones((1, 4)), advantages_NR=np.ones((1, 4))),
        groups_of([gram], rewards, advantages_NR=np.array([[0.5, -0.5, -0.4, 0.5]])),
        groups_of([gram], rewards, advantages_NR=rewards, factor=1 / lengths),
    ):
        assert np.isnan(permutation_columns(left_out)["shuffle_p"]).all()


def test_too_many_assignments_are_left_out(monkeypatch):
    monkeypatch.setattr(permutation, "MOST_ASSIGNMENTS", 5)
    found = permutation_columns(groups_of(np.stack([np.eye(4)] * 2), [[1.0, 1.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0]]))
    assert np.isnan(found["shuffle_p"][0]) and found["shuffle_p"][1] == 1.0
