"""Estimators of stored groups, from rewards and Gram: against vectors, and unbiased on the exact policy or not."""

from __future__ import annotations

import inspect
import itertools

import numpy as np
import pytest

from grpo_sweeps.estimators import FROM_GRAM, Declaration, grpo_std, rloo, salt, score_norm
from grpo_sweeps.exact import Enumeration, SoftmaxPolicy, binary, enumerate_policy, graded

each = pytest.mark.parametrize("declared", FROM_GRAM, ids=lambda one: one.name)
sizes = pytest.mark.parametrize("R", [2, 3, 5])


def groups(R: int, N: int = 6, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Rewards (N, R), the second group's all equal, and scores (N, R, 7) of unequal norms."""
    rng = np.random.default_rng([R, seed])
    rewards = rng.integers(0, 3, size=(N, R)) / 2
    rewards[:, 0], rewards[:, 1], rewards[1] = 0.0, 1.0, 0.1
    return rewards, rng.normal(size=(N, R, 7)) * rng.gamma(1.0, size=(N, R, 1))


def gram_of(psi: np.ndarray) -> np.ndarray:
    return psi @ psi.swapaxes(-1, -2)


def own_norm(rewards: np.ndarray, gram: np.ndarray) -> np.ndarray:
    """The score-norm baseline with the rollout's own norm and reward in it."""
    squares = np.diagonal(gram, axis1=1, axis2=2)
    return rewards - (squares * rewards).sum(axis=1, keepdims=True) / squares.sum(axis=1, keepdims=True)


@sizes
def test_the_score_norm_baseline_is_the_others_weighted_mean(R: int) -> None:
    rewards, psi = groups(R)
    for found, r, rows in zip(score_norm(rewards, gram_of(psi)), rewards, psi, strict=True):
        for i in range(R):
            others = [j for j in range(R) if j != i]
            norms = [float(rows[j] @ rows[j]) for j in others]
            baseline = sum(n * r[j] for n, j in zip(norms, others, strict=True)) / sum(norms)
            assert found[i] == pytest.approx(r[i] - baseline, abs=1e-12)


def test_the_score_norm_baseline_of_equal_norms_or_of_two_is_leave_one_out() -> None:
    rewards, psi = groups(4)
    unit = psi / np.linalg.norm(psi, axis=-1, keepdims=True)
    assert np.allclose(score_norm(rewards, gram_of(unit)), rloo(rewards), atol=1e-12)
    assert np.allclose(score_norm(rewards, np.zeros((6, 4, 4))), rloo(rewards), atol=1e-12), "no norms to weigh by"
    rewards, psi = groups(2)
    assert np.allclose(score_norm(rewards, gram_of(psi)), rloo(rewards), atol=1e-12)


@sizes
@pytest.mark.parametrize("rank", [1, 2])
def test_salt_projects_out_what_an_svd_of_the_scores_finds(R: int, rank: int) -> None:
    rewards, psi = groups(R)
    plain = grpo_std(rewards)
    for found, a, rows in zip(salt(rewards, gram_of(psi), rank, 0.7), plain, psi, strict=True):
        left = np.linalg.svd(rows)[0]
        rest = a - sum((left[:, k] @ a) * left[:, k] for k in range(rank))
        assert found == pytest.approx(a + 0.7 * rest, abs=1e-9)
    assert np.allclose(salt(rewards, gram_of(psi), R), plain, atol=1e-9), "nothing is left outside"
    assert np.array_equal(salt(rewards, gram_of(psi), rank, alpha=0.0), plain)


@each
@sizes
def test_what_is_declared_holds(declared: Declaration, R: int) -> None:
    rewards, psi = groups(R)
    K = gram_of(psi)
    arguments = {} if declared.eps is None else {"eps": 0.0}
    found = declared.function(rewards, K, **arguments)
    assert found.shape == rewards.shape and found.dtype == np.float64
    assert (not found[1].any()) == declared.zero_when_equal
    assert np.allclose(declared.function(rewards + 5, K, **arguments), found) == declared.shift_invariant
    assert np.allclose(declared.function(3 * rewards, K, **arguments), found) == declared.scale_invariant
    assert np.allclose(declared.function(rewards, 9 * K, **arguments), found), "the unit of the scores does not matter"
    order = np.random.default_rng(1).permutation(R)
    moved = declared.function(rewards[:, order], K[:, order][:, :, order], **arguments)
    assert np.allclose(moved, found[:, order])
    assert np.allclose(found.sum(axis=1), 0) == (declared.zero_sum_group or (R == 2 and declared.name == "score_norm"))
    assert declared.needs_gram and not declared.by_group
    text = " ".join((declared.function.__doc__ or "").split())
    assert all(part in text for part in declared.source.split("; "))
    parameters = inspect.signature(declared.function).parameters
    assert [parameters[key].default if key in parameters else None for key in ("ddof", "eps")] == [
        declared.ddof, declared.eps,
    ]  # fmt: skip


@each
def test_what_does_not_fit_is_refused(declared: Declaration) -> None:
    with pytest.raises(ValueError, match="do not fit"):
        declared.function(np.zeros((2, 3)), np.zeros((2, 3, 2)))
    with pytest.raises(ValueError, match="R >= 2"):
        declared.function(np.zeros((2, 1)), np.zeros((2, 1, 1)))
    for arguments in ({"rank": 0}, {"rank": 4}, {"alpha": -1.0}):
        with pytest.raises(ValueError, match=r"allowed are 1 <= rank <= 3 and alpha >= 0"):
            salt(np.zeros((2, 3)), np.zeros((2, 3, 3)), **arguments)


@pytest.fixture(scope="module", params=["binary", "graded"])
def e(request: pytest.FixtureRequest) -> Enumeration:
    reward = {"binary": binary(2), "graded": graded(3)}[request.param]
    return enumerate_policy(SoftmaxPolicy(prompts=1, tokens=3, max_length=2, seed=3), 0, reward)


def expected(e: Enumeration, R: int, function) -> np.ndarray:
    """E[sum_i A_i psi_i / R] over every tuple of R sequences of the policy."""
    p, r, psi = e.p_N.numpy(), e.rewards_N.numpy(), e.psi_ND.numpy()
    tuples = np.array(list(itertools.product(range(len(p)), repeat=R)))
    A = function(r[tuples], e.gram_NN.numpy()[tuples[:, :, None], tuples[:, None, :]])
    return np.einsum("n,nr,nrd->d", p[tuples].prod(axis=1), A, psi[tuples]) / R


@pytest.mark.parametrize("R", [2, 3, 4])
def test_the_others_norms_leave_no_bias_and_the_own_one_does(e: Enumeration, R: int) -> None:
    """Every group of the exact policy: the factor declared, and the direction with the own norm in the baseline."""
    gradient = e.grad_J_D.numpy()
    assert np.allclose(expected(e, R, score_norm), gradient, atol=1e-12 * np.linalg.norm(gradient))
    biased = expected(e, R, own_norm)
    cosine = biased @ gradient / np.linalg.norm(biased) / np.linalg.norm(gradient)
    assert cosine < 1 - 1e-4 and abs(np.linalg.norm(biased) / np.linalg.norm(gradient) - 1) > 0.05
    assert not np.allclose(biased, (R - 1) / R * gradient, rtol=1e-3), "no factor either"


def test_drawn_groups_say_so_too(e: Enumeration) -> None:
    """20,000 groups of 4: along grad J the mean is its norm within 4 standard errors, with the own norm it is not."""
    rng, R = np.random.default_rng(0), 4
    rows = rng.choice(len(e.p_N), size=(20_000, R), p=e.p_N.numpy() / e.p_N.numpy().sum())
    r, K = e.rewards_N.numpy()[rows], e.gram_NN.numpy()[rows[:, :, None], rows[:, None, :]]
    gradient = e.grad_J_D.numpy()
    along = e.psi_ND.numpy()[rows] @ gradient / np.linalg.norm(gradient)
    off = {}
    for function in (score_norm, own_norm):
        values = (function(r, K) * along).mean(axis=1)
        off[function] = abs(values.mean() - np.linalg.norm(gradient)) / (values.std() / np.sqrt(len(values)))
    assert off[score_norm] < 4 < off[own_norm], off


@pytest.mark.parametrize("R", [2, 3])
def test_salt_is_biased_in_direction(e: Enumeration, R: int) -> None:
    row, gradient = expected(e, R, salt), e.grad_J_D.numpy()
    assert 0 < row @ gradient / np.linalg.norm(row) / np.linalg.norm(gradient) < 1 - 1e-4


def test_norms_of_the_others_take_noise_away() -> None:
    """Where right answers have the larger scores; equal norms would leave nothing to gain."""
    rng, N, R = np.random.default_rng(4), 4000, 8
    r = rng.integers(0, 2, size=(N, R)).astype(float)
    psi = rng.normal(size=(N, R, 5)) * (1 + 4 * r[:, :, None])
    K = gram_of(psi)
    squares = {f: np.einsum("nr,nrs,ns->n", A, K, A).mean() for f, A in (("loo", rloo(r)), ("norm", score_norm(r, K)))}
    assert squares["norm"] < 0.9 * squares["loo"]
