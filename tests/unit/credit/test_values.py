"""Credit and its squares against exact policies: unbiased whatever is drawn, and the truth over many rollouts."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from grpo_sweeps.credit.shares import Starts, Values, mean_and_noise, squared_surprise
from grpo_sweeps.estimators.token_level import vine
from grpo_sweeps.exact import Enumeration
from grpo_sweeps.loop.continuations import edges_of
from grpo_sweeps.science import credit
from tests.unit.credit.exact_values import ahead_of, drawn, noise_term, tokens_of

SIGMAS = 4.5  # of a Monte Carlo mean: a miss by chance in 100,000


def all_draws(one, M):
    """Every M-tuple of a prefix's rewards with its probability."""
    levels = np.unique(one.rewards)
    p = np.array([one.p[one.rewards == level].sum() for level in levels])
    for picks in product(range(len(levels)), repeat=M):
        yield float(np.prod(p[list(picks)])), levels[list(picks)]


@pytest.mark.parametrize("M", [2, 3])
def test_a_square_is_unbiased_in_every_draw_of_two_prefixes(e: Enumeration, M: int) -> None:
    ahead = ahead_of(e)
    for word in [tokens_of(e, n) for n in range(0, len(e.p_N), 23)]:
        for t in range(len(word) - 1):
            before, after = ahead[word[:t]], ahead[word[: t + 1]]
            squares = noises = 0.0
            for (p, r_M), (q, s_M) in product(all_draws(before, M), all_draws(after, M)):
                (v, w), (x, y) = mean_and_noise(np.stack([r_M, s_M]))
                one = Values(np.array([0]), np.array([[t, t + 1]]), np.array([[v, w]]), np.array([[x, y]]))
                squares += p * q * float(one.squares_NK[0, 0])
                noises += p * q * float(one.noise_NK[0, 0])
            assert squares == pytest.approx((after.mean - before.mean) ** 2, abs=1e-12)
            assert noises == pytest.approx((before.variance + after.variance) / M, abs=1e-12)


def test_the_corrected_square_of_a_mean_is_that_of_all_pairs() -> None:
    rewards_M = np.random.default_rng(0).normal(size=7)
    mean, noise = mean_and_noise(rewards_M[None])
    pairs = [rewards_M[i] * rewards_M[j] for i in range(7) for j in range(7) if i != j]
    assert float(mean[0] ** 2 - noise[0]) == pytest.approx(np.mean(pairs))


def test_a_squared_surprise_is_that_of_all_triples() -> None:
    rewards_PM = np.random.default_rng(1).normal(size=(2, 5))
    slow = np.zeros((2, 5))
    for p, i in product(range(2), range(5)):
        r = rewards_PM[p]
        others = [j for j in range(5) if j != i]
        slow[p, i] = np.mean([(r[i] - r[j]) * (r[i] - r[k]) for j in others for k in others if j != k])
    found = squared_surprise(rewards_PM)
    np.testing.assert_allclose(found, slow, atol=1e-12)
    np.testing.assert_allclose(found.mean(axis=1), rewards_PM.var(axis=1, ddof=1), atol=1e-12)
    with pytest.raises(ValueError, match="2 completions of a prompt: 3 or more are needed"):
        squared_surprise(rewards_PM[:, :2])


def exact(e: Enumeration, every: int = 1) -> Values:
    """Every sequence of the policy as a rollout, with the exact values and no noise."""
    words, K = [tokens_of(e, n) for n in range(len(e.p_N))], len(edges_of(e.tokens_NT.shape[1], every))
    ahead = ahead_of(e)
    edges, values = np.zeros((len(words), K), dtype=int), np.zeros((len(words), K))
    for n, word in enumerate(words):
        own = edges_of(len(word), every)
        edges[n], values[n] = len(word), float(e.rewards_N[n])
        edges[n, : len(own) - 1] = own[:-1]
        values[n, : len(own) - 1] = [ahead[word[:t]].mean for t in own[:-1]]
    return Values(np.zeros(len(words), dtype=int), edges, values, np.zeros_like(values))


def test_credit_is_vines_and_the_exact_one(e: Enumeration) -> None:
    values = exact(e)
    rewards, before, mask = (x[None] for x in (e.token_rewards_NT, e.values_NT, e.mask_NT))
    np.testing.assert_allclose(values.advantages_NK, vine(rewards, before, mask)[0], atol=1e-12)
    np.testing.assert_allclose(values.advantages_NK, e.advantages_NT.numpy(), atol=1e-12)


@pytest.mark.parametrize("every", [1, 2, 3, 4])
def test_squares_of_segments_add_up_to_the_variance(e: Enumeration, every: int) -> None:
    values, p = exact(e, every), e.p_N.numpy()
    assert float(p @ values.squares_NK.sum(axis=1)) == pytest.approx(e.sigma2, rel=1e-12)
    total = values.advantages_NK.sum(axis=1)
    np.testing.assert_allclose(total, e.rewards_N.numpy() - e.J, atol=1e-12)
    assert float(p @ total) == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("M", [3, 8])
def test_over_many_rollouts_squares_are_the_truth_and_the_raw_ones_off_by_the_noise(e: Enumeration, M: int) -> None:
    N = 30_000
    values, _ = drawn(e, N, M, np.random.default_rng(M))
    truth_T = credit.credit(e).by_position_T * e.sigma2
    noise_T = noise_term(e, M)

    def agrees(found_NT: np.ndarray, expected: np.ndarray) -> None:
        error = found_NT.std(axis=0, ddof=1) / N**0.5
        assert (np.abs(found_NT.mean(axis=0) - expected) < SIGMAS * error + 1e-12).all()

    raw_NT = values.advantages_NK**2
    agrees(values.squares_NK, truth_T)
    agrees(values.squares_NK.sum(axis=1), np.array(e.sigma2))
    agrees(raw_NT, truth_T + noise_T)
    agrees(values.noise_NK, noise_T)
    assert raw_NT.sum(axis=1).mean() - e.sigma2 > 0.9 * noise_T.sum() > 0.05 * e.sigma2, "the correction matters here"


def test_starts_need_no_prefixes(e: Enumeration) -> None:
    """E (r - v)^2 / K from whole completions alone, over many prompts with the same truth."""
    rng, M, P = np.random.default_rng(3), 5, 20_000
    rows_PM = rng.choice(len(e.p_N), size=(P, M), p=e.p_N.numpy())
    starts = Starts(e.rewards_N.numpy()[rows_PM], e.lengths_N.numpy()[rows_PM])
    found_P = (squared_surprise(starts.rewards_PM) / starts.segments_PM).mean(axis=1)
    truth = float(e.p_N @ ((e.rewards_N - e.J).square() / e.lengths_N))
    assert abs(found_P.mean() - truth) < SIGMAS * found_P.std(ddof=1) / P**0.5
