"""The estimates are unbiased: their mean over every possible group of a tiny policy is the exact quantity."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from grpo_sweeps.exact import SoftmaxPolicy, binary, enumerate_policy, graded, several_prompts
from grpo_sweeps.maths import ustatistics
from tests.unit.slow_kernels import by_kernels


@pytest.fixture(scope="module", params=[binary(2, 0), graded(3)], ids=["binary", "graded"])
def groups(request):
    """Every group of four of seven sequences: exact quantities, probabilities, rewards, Grams."""
    e = enumerate_policy(SoftmaxPolicy(1, 3, 2, seed=1), 0, request.param)
    index = np.array(list(itertools.product(range(len(e.p_N)), repeat=4)))
    K = e.gram_NN.numpy()[index[:, :, None], index[:, None, :]]
    return e, e.p_N.numpy()[index].prod(axis=1), e.rewards_N.numpy()[index], K


def test_expectations_are_exact(groups):
    e, p, r, K = groups
    signal = float(e.grad_J_D.square().sum())
    assert p @ ustatistics.signal(r, K) == pytest.approx(signal, rel=1e-11)
    assert p @ ustatistics.spread(r, K) == pytest.approx(e.sigma2 * e.trace_F, rel=1e-11)
    assert p @ ustatistics.oracle_variance(r, K) == pytest.approx(e.V1, rel=1e-11)
    assert p @ (ustatistics.spread(r, K) + ustatistics.signal(r, K)) == pytest.approx(e.V2, rel=1e-11)


@pytest.mark.parametrize("R", [4, 5, 8])
@pytest.mark.parametrize("offset", [0.0, 1e4])
def test_closed_forms_are_the_means_of_their_kernels(R, offset):
    rng = np.random.default_rng(R)
    for rewards in (rng.normal(size=R), (rng.random(R) < 0.4).astype(float), np.ones(R)):
        psi = rng.normal(size=(R, 6))
        K = psi @ psi.T
        estimates = (ustatistics.signal, ustatistics.spread, ustatistics.oracle_variance)
        found = [float(f(rewards + offset, K)) for f in estimates]
        assert found == pytest.approx(by_kernels(rewards, K), rel=1e-8, abs=1e-11)


def test_the_squared_norm_of_a_groups_gradient_is_made_of_the_three(groups):
    """Leave-one-out, in expectation: ||g||^2 = signal + V1/R + V2/(R(R-1)); it takes E psi = 0."""
    _, p, r, K = groups
    a = (r - r.mean(axis=1, keepdims=True)) / 3
    signal, spread, V1 = (p @ f(r, K) for f in (ustatistics.signal, ustatistics.spread, ustatistics.oracle_variance))
    found = p @ np.einsum("mi,mij,mj->m", a, K, a)
    assert found == pytest.approx(signal + V1 / 4 + (spread + signal) / 12, rel=1e-10)


def test_larger_groups_average_over_all_their_fours(groups):
    _, _, r, K = groups
    rng = np.random.default_rng(0)
    psi = rng.normal(size=(6, 5))
    rewards, gram = rng.normal(size=6), psi @ psi.T
    fours = [np.array(c) for c in itertools.combinations(range(6), 4)]
    each = [ustatistics.signal(rewards[c], gram[np.ix_(c, c)]) for c in fours]
    assert ustatistics.signal(rewards, gram) == pytest.approx(np.mean(each), rel=1e-12)
    threes = [np.array(c) for c in itertools.combinations(range(6), 3)]
    each = [ustatistics.spread(rewards[c], gram[np.ix_(c, c)]) for c in threes]
    assert ustatistics.spread(rewards, gram) == pytest.approx(np.mean(each), rel=1e-12)
    assert ustatistics.signal(r[:7].reshape(7, 4), K[:7]).shape == (7,)


def test_equal_rewards_are_zeros_whatever_their_gram():
    psi = np.random.default_rng(0).normal(size=(5, 3))
    for r in (np.ones(5), np.full(5, 0.1)):
        for estimate in (ustatistics.signal, ustatistics.spread, ustatistics.oracle_variance):
            assert estimate(r, psi @ psi.T) == 0


def test_the_mean_gradient_from_whole_steps():
    """Every step of two prompts with two rollouts each."""
    policy = SoftmaxPolicy(prompts=2, tokens=2, max_length=2, seed=3)
    prompts = several_prompts(policy, [binary(2, 0), binary(2, 1)])
    target = sum(e.grad_J_D for e in prompts) / 2
    found, total = 0.0, 0.0
    for first, second in itertools.product(prompts, repeat=2):  # with replacement
        for index in itertools.product(range(len(first.p_N)), repeat=4):
            a, b = list(index[:2]), list(index[2:])
            chance = 0.25 * float(first.p_N[a].prod() * second.p_N[b].prod())
            g = [(e.rewards_N[i] - e.rewards_N[i].mean()) @ e.psi_ND[i] / 2 for e, i in ((first, a), (second, b))]
            step = float(((g[0] + g[1]) / 2).square().sum())
            norms = [float(x.square().sum()) for x in g]
            found += chance * ustatistics.signal_of_mean(step, norms, 2, 2)
            total += chance
    assert total == pytest.approx(1) and found == pytest.approx(float(target.square().sum()), rel=1e-10)


def test_the_best_group_size():
    assert ustatistics.best_group_size(2.0, 1.0) == pytest.approx(1 + 2**0.5)
    assert ustatistics.best_group_size(2.0, -0.1) == float("inf")


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: ustatistics.signal([1.0, 0.0, 1.0], np.eye(3)), "R=3: 4 distinct rollouts are needed"),
        (lambda: ustatistics.spread([1.0, 0.0], np.eye(2)), "R=2: 3 distinct rollouts are needed"),
        (lambda: ustatistics.signal([1.0] * 5, np.eye(4)), "do not fit"),
        (lambda: ustatistics.signal_of_mean(1.0, [1.0], 1, 4), "two groups of two rollouts"),
    ],
)
def test_bad_input(call, sentence):
    with pytest.raises(ValueError, match=sentence):
        call()


@pytest.mark.parametrize("V1", [0.3, 10.0, 300.0])
@pytest.mark.parametrize(("V2", "between"), [(2.0, 1.0), (2.1, 1.0), (40.0, 0.5), (300.0, 0.02)])
def test_the_neighbours_of_the_best_size_by_a_plain_search(V1, V2, between):
    R = np.arange(2, 2000)
    error = ustatistics.error_by_rollouts(R, V1, V2, between)
    assert abs(R[np.argmin(error)] - ustatistics.best_group_size(V2, between)) < 1
    near = R[error <= 1.05 * error.min()]
    assert ustatistics.near_best(V1, V2, between) == (near[0], near[-1])


def test_neighbours_without_an_end():
    assert ustatistics.near_best(10.0, 2.0, 0.0) == (5.0, float("inf"))  # 10 + 2/4 is 10 x 1.05
    assert ustatistics.near_best(1000.0, 2.0, -1.0) == (2.0, float("inf"))
    assert np.isnan(ustatistics.near_best(-100.0, 2.0, 1.0)).all()


@pytest.mark.parametrize("R", [4, 5, 7])
def test_squares_of_all_sub_groups_by_listing_them(R):
    rng = np.random.default_rng(R)
    for r in (rng.normal(size=R), (np.arange(R) < 2).astype(float)):
        psi = rng.normal(size=(R, 3)) + 0.7  # scores of a mean that is not zero
        sizes = np.arange(2, R + 1)
        expected = []
        for n in sizes:
            subsets = [list(c) for c in itertools.combinations(range(R), n)]
            expected.append(np.mean([np.sum(((r[c] - r[c].mean()) @ psi[c] / (n - 1)) ** 2) for c in subsets]))
        assert ustatistics.square_by_size(r, psi @ psi.T, sizes) == pytest.approx(expected, rel=1e-10)
    with pytest.raises(ValueError, match="have 2 to"):
        ustatistics.square_by_size(r, psi @ psi.T, [R + 1])
