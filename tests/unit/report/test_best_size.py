"""R* and what it is made of, from sweeps drawn at an exact policy: against the exact values, by intervals."""

from __future__ import annotations

import numpy as np
import pytest

from grpo_sweeps.report.claims.rules import UNDECIDED
from grpo_sweeps.report.design import best_size as design
from grpo_sweeps.report.design.best_size import (
    DRAWS,
    FLOOR,
    QUANTITIES,
    best_size,
    best_size_section,
    best_size_table,
    in_blocks,
)
from grpo_sweeps.report.design.best_size import (
    drawn as times_drawn,
)
from grpo_sweeps.report.read.query import load_sweep
from tests.unit.report.exact_runs import enumerations, truth, write_exact

G = 8


@pytest.fixture(scope="module")
def exact():
    return enumerations()


@pytest.fixture(scope="module")
def drawn(exact, tmp_path_factory):
    """R = 2 and 4 by the group mean, R = 8 by leave-one-out."""
    root = tmp_path_factory.mktemp("exact")
    for R in (2, 4):
        write_exact(root, "mean", exact, R, 250, G)
    write_exact(root, "loo", exact, 8, 250, G, "rloo")
    return root


@pytest.mark.parametrize(("name", "R"), [("mean", 4), ("loo", 8)])
def test_intervals_hold_the_exact_values(drawn, exact, name, R):
    found, known = best_size(load_sweep(name, drawn), "all", R), truth(exact, R)
    assert set(found.values) == set(QUANTITIES) == set(known) and len(found.draws["best_R"]) == DRAWS
    for quantity, value in known.items():
        half = 4.5 / 1.96 * np.ptp(found.interval(quantity)) / 2
        assert abs(found.values[quantity] - value) < half, quantity
        assert half < 2 * abs(value), quantity  # that the interval says something


def test_two_rollouts_give_the_error_alone(drawn, exact):
    found, known = best_size(load_sweep("mean", drawn), "all", 2), truth(exact, 2)
    assert set(found.values) == {"error_here", "signal_of_mean"} and not found.known
    half = 4.5 / 1.96 * np.ptp(found.interval("error_here")) / 2
    assert abs(found.values["error_here"] - known["error_here"]) < half
    assert found.verdict == UNDECIDED and "four different rollouts" in found.reason


def test_prompts_alike_have_no_upper_end(exact, tmp_path):
    write_exact(tmp_path, "alike", exact[:1], 4, 60, 4)
    found = best_size(load_sweep("alike", tmp_path), "all", 4)
    low, high = found.interval("best_R")
    assert FLOOR <= low < high == float("inf") and found.verdict == UNDECIDED
    assert "no upper end can be given" in found.reason
    (row,) = best_size_section([found]).rows
    assert any("no upper end" in cell for cell in row) and UNDECIDED in row[-1]
    frame = best_size_table([found])
    assert frame["best_R_high"][0] == float("inf") and frame["verdict"][0] == UNDECIDED


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"aggregation": "length"}, "aggregation=sum"),
        ({"estimator._target_": "grpo_sweeps.estimators.group.grpo_std"}, "estimator=grpo or rloo"),
        ({"objective.kl_beta": 0.1, "objective.kl_place": "loss"}, "objective=reinforce without resampling"),
        ({"objective.ratio": "token"}, "objective=reinforce without resampling"),
        ({"objective.minibatches": 2}, "objective=reinforce without resampling"),
        ({"objective.resample": True}, "objective=reinforce without resampling"),
        ({"objective.critic": True}, "objective=reinforce without resampling"),
        ({"objective.continuations": 8}, "objective=reinforce without resampling"),
        ({"objective.kl_beta": 0.1, "objective.kl_place": "reward"}, "fewer than 10"),
        ({"objective.ratio": "none", "objective.kl_beta": 0.0}, "fewer than 10"),
        ({}, "fewer than 10"),
    ],
)
def test_what_cannot_be_decided_says_why(exact, tmp_path, changes, words):
    write_exact(tmp_path, "s", exact, 4, 5, 4, **changes)
    found = best_size(load_sweep("s", tmp_path), "all", 4)
    assert found.verdict == UNDECIDED and words in found.reason


def test_steps_with_a_mixed_group_that_was_not_measured_are_left_out(exact, tmp_path):
    write_exact(tmp_path, "s", exact, 4, 30, 4)
    sweep = load_sweep("s", tmp_path)
    whole = best_size(sweep, "all", 4)
    first = sweep.groups[sweep.groups["mixed"].astype(bool)].index[0]
    sweep.groups.loc[first, "measured"] = False
    found = best_size(sweep, "all", 4)
    assert (found.left_out, found.steps) == (1, whole.steps - 1)
    assert "1 steps" in best_size_section([found]).after[-1]
    sweep.groups["measured"] = False
    assert best_size(sweep, "all", 4).steps < 5


def test_many_steps_are_drawn_in_blocks(monkeypatch):
    sums = np.random.default_rng(0).normal(size=(1003, 3))
    assert np.array_equal(in_blocks(sums), sums)  # few enough: each for itself
    monkeypatch.setattr(design, "MOST_DRAWN", 100)
    blocks = in_blocks(sums)
    assert 90 <= len(blocks) <= 100
    np.testing.assert_allclose(blocks.sum(axis=0), sums.sum(axis=0), rtol=1e-12)
    means = [(times_drawn(len(rows)) @ rows).std(axis=0) / len(sums) for rows in (sums, blocks)]
    np.testing.assert_allclose(means[0], means[1], rtol=0.3)  # the same error of a mean
