"""Signal and noise of a step's gradient: unbiased over every step of an exact policy; the window; bad input."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from grpo_sweeps.exact import SoftmaxPolicy, binary, several_prompts
from grpo_sweeps.maths.noise import WINDOW, NoiseWindow, signal_and_noise

METRICS = ("gradient/snr", "gradient/noise_scale")


@pytest.fixture(scope="module")
def group_gradients() -> tuple[np.ndarray, np.ndarray]:
    """Every group of two rollouts of two prompts: probabilities (N,), gradients (N, D) of the group mean."""
    prompts = several_prompts(SoftmaxPolicy(prompts=2, tokens=2, max_length=2, seed=3), [binary(2, 0), binary(2, 1)])
    chances, gradients = [], []
    for e in prompts:
        for i, j in itertools.product(range(len(e.p_N)), repeat=2):
            chances.append(float(e.p_N[i] * e.p_N[j]) / len(prompts))
            advantage = (e.rewards_N[i] - e.rewards_N[j]) / 2
            gradients.append((advantage * (e.psi_ND[i] - e.psi_ND[j]) / 2).numpy())
    return np.array(chances), np.array(gradients)


@pytest.mark.parametrize("G", [2, 3])
def test_over_all_steps_of_an_exact_policy_both_are_unbiased(
    group_gradients: tuple[np.ndarray, np.ndarray], G: int
) -> None:
    p, g = group_gradients
    mean = p @ g
    variance = float(p @ ((g - mean) ** 2).sum(axis=1))
    assert float(p.sum()) == pytest.approx(1) and (np.abs(g).max(axis=1) == 0).any() and mean.any()
    expected_m = expected_v = 0.0
    for step in itertools.product(range(len(p)), repeat=G):
        own = g[list(step)] / G  # as they enter the step's sum, whatever it divides by
        m, v = signal_and_noise(float((own.sum(axis=0) ** 2).sum()), (own**2).sum(axis=1))
        chance = float(np.prod(p[list(step)]))
        expected_m, expected_v = expected_m + chance * m * G**2, expected_v + chance * v * G**2
        assert v > -1e-15
    assert expected_m == pytest.approx(float(mean @ mean), rel=1e-10)
    assert expected_v == pytest.approx(variance, rel=1e-10)


def test_m_is_the_mean_product_of_different_groups() -> None:
    g = np.random.default_rng(0).normal(size=(5, 7))
    m, v = signal_and_noise(float((g.sum(axis=0) ** 2).sum()), (g**2).sum(axis=1))
    assert m == pytest.approx(np.mean([a @ b for a, b in itertools.permutations(g, 2)]))
    assert v == pytest.approx(g.var(axis=0, ddof=1).sum())


@pytest.mark.parametrize("squares", [[0.0, 0.3, 0.0], [0.0, 0.0]])
def test_without_two_gradients_there_is_no_product_and_rounding_is_not_taken_for_one(squares: list[float]) -> None:
    total = sum(squares)
    assert signal_and_noise(total * (1 + 1e-15), squares) == (0.0, pytest.approx(total / len(squares)))


def test_the_window_is_of_means_then_their_ratio_over_the_last_steps() -> None:
    rng = np.random.default_rng(1)
    steps = [s for s in range(60) if s % 3 == 0 or s > 40]  # some are not measured
    values = {s: (float(rng.normal(1.0, 0.5)), float(rng.uniform(2.0, 4.0))) for s in steps}
    window = NoiseWindow()
    for s in steps:
        window.add(s, *values[s])
        inside = [values[t] for t in range(max(0, s - WINDOW + 1), s + 1) if t in values]
        m, v = np.mean(inside, axis=0)
        found = window.metrics(8)
        assert [found[name] for name in METRICS] == pytest.approx([8 * m / v, v / m])


@pytest.mark.parametrize(("m", "v"), [(-0.1, 1.0), (0.0, 1.0), (0.0, 0.0), (1.0, 0.0), (1.0, -1e-18)])
def test_where_a_ratio_says_nothing_it_is_left_out(m: float, v: float) -> None:
    window = NoiseWindow()
    assert window.metrics(4) == {}
    window.add(0, m, v)
    assert window.metrics(4) == {}
    window.add(1, 3.0, 3.0)  # and the step counts in the next window
    found = window.metrics(4)
    assert [found[name] for name in METRICS] == pytest.approx([4 * (m + 3) / (v + 3), (v + 3) / (m + 3)])


def test_a_step_done_again_replaces_what_it_gave_before() -> None:
    window = NoiseWindow()
    for step, m in ((0, 1.0), (1, 5.0), (2, 9.0), (1, 2.0)):
        window.add(step, m, 1.0)
    assert window.entries == [(0, 1.0, 1.0), (1, 2.0, 1.0)]


def test_one_group_is_refused() -> None:
    with pytest.raises(ValueError, match="groups=1: two groups or more"):
        signal_and_noise(1.0, [1.0])
