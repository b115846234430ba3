"""Token-level estimators on policies whose sequences are all listed: what they are unbiased for, exactly."""

from __future__ import annotations

import itertools

import pytest
import torch

from grpo_sweeps.estimators import token_level
from grpo_sweeps.exact import SoftmaxPolicy, binary, by_token, drawn_by_token, enumerate_policy, sequence_moments


def on_tensors(function):
    return lambda *tensors, **options: torch.from_numpy(function(*tensors, **options))


gae, vine, process_rewards, turn_level = (
    on_tensors(getattr(token_level, name)) for name in ("gae", "vine", "process_rewards", "turn_level")
)


@pytest.fixture(scope="module", params=[binary(3, 0), by_token(3, 1), drawn_by_token(5)], ids=["end", "steps", "drawn"])
def e(request):
    return enumerate_policy(SoftmaxPolicy(1, 3, 3, seed=2), 0, request.param)


def mean_of(e, credit_NT):
    return sequence_moments(e.contribution(credit_NT), e.p_N, 1)


def grouped(*tensors):
    return [t[None] for t in tensors]


@pytest.mark.parametrize("seed", [None, 0])
def test_gae_with_lam_1_is_unbiased_whatever_the_values(e, seed):
    values = e.values_NT
    if seed is not None:  # any function of the prefix
        table = torch.randn(int(e.prefixes_NT.max()) + 2, generator=torch.Generator().manual_seed(seed)).double()
        values = table[e.prefixes_NT] * e.mask_NT
    credit = gae(*grouped(e.token_rewards_NT, values, e.mask_NT))[0]
    assert torch.allclose(credit, (e.returns_NT - values) * e.mask_NT, atol=1e-12)
    assert torch.allclose(mean_of(e, credit).mean_D, e.grad_J_D, atol=1e-12)


@pytest.mark.parametrize("lam", [0.0, 0.5])
def test_gae_with_smaller_lam_is_unbiased_with_the_policys_values_alone(e, lam):
    right = gae(*grouped(e.token_rewards_NT, e.values_NT, e.mask_NT), lam=lam)[0]
    assert torch.allclose(mean_of(e, right).mean_D, e.grad_J_D, atol=1e-12)
    wrong = gae(*grouped(e.token_rewards_NT, 0.5 * e.values_NT, e.mask_NT), lam=lam)[0]
    assert (mean_of(e, wrong).mean_D - e.grad_J_D).norm() > 1e-4


def test_vine_with_the_exact_values_is_the_true_credit(e):
    credit = vine(*grouped(e.token_rewards_NT, e.values_NT, e.mask_NT))[0]
    assert torch.allclose(credit, e.advantages_NT, atol=1e-12)
    assert torch.allclose(credit.sum(dim=1), e.rewards_N - e.J, atol=1e-12)


def test_gae_discounts():
    rewards = torch.tensor([[[0.0, 0.0, 1.0], [0.0, 2.0, 0.0]]])
    mask = torch.tensor([[[True, True, True], [True, True, False]]])
    found = gae(rewards, torch.zeros_like(rewards), mask, gamma=0.5, lam=0.5)
    assert torch.allclose(found, torch.tensor([[[0.0625, 0.25, 1.0], [0.5, 2.0, 0.0]]], dtype=torch.float64))


def test_turn_level_is_unbiased_where_all_have_the_same_turns():
    e = enumerate_policy(SoftmaxPolicy(1, 2, 2, ends=False, seed=1), 0, by_token(2, 1))
    total = torch.zeros_like(e.grad_J_D)
    for pair in itertools.product(range(len(e.p_N)), repeat=2):
        index = list(pair)
        credit = turn_level(*grouped(e.token_rewards_NT[index], e.mask_NT[index]))[0]
        rows = torch.einsum("rt,rtd->rd", credit, e.token_psi_NTD[index])
        total += e.p_N[index].prod() * rows.mean(dim=0)
    assert torch.allclose(total, e.grad_J_D, atol=1e-12)


def test_turn_level_leaves_a_rollout_alone_in_a_turn_at_zero():
    rewards, mask = torch.tensor([[[1.0, 3.0], [2.0, 0.0]]]), torch.tensor([[[True, True], [True, False]]])
    assert turn_level(rewards, mask).tolist() == [[[2.0, 0.0], [-2.0, 0.0]]]


def test_process_rewards_by_hand():
    rewards, mask = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]]), torch.ones(1, 2, 2, dtype=torch.bool)
    assert torch.allclose(
        process_rewards(rewards, mask, ddof=0, eps=0.0), torch.tensor([[[0.0, -1.0], [0.0, 1.0]]]).double()
    )
    assert process_rewards(torch.ones(1, 2, 2), mask).abs().max() == 0


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda r, m: gae(r, r[..., :1], m), "one shape"),
        (lambda r, m: gae(r, r, m, lam=1.5), "lam=1.5: a number from 0 to 1"),
        (lambda r, m: process_rewards(r[:, :1, :1], m[:, :1, :1]), "fewer than two steps"),
        (lambda r, m: turn_level(r[0], m[0]), "one shape"),
    ],
)
def test_bad_input(call, sentence):
    with pytest.raises(ValueError, match=sentence):
        call(torch.zeros(1, 2, 2), torch.ones(1, 2, 2, dtype=torch.bool))
