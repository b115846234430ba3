"""Sub-groups of pools of an exact policy: errors, cosines and ranks against its own, and as the report shows them."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from grpo_sweeps.estimators import grpo_std
from grpo_sweeps.exact import group_moments, one_group_weights
from grpo_sweeps.publish.drawing import render
from grpo_sweeps.report.build import build
from grpo_sweeps.report.design import pool as pool_table
from grpo_sweeps.report.design.best_size import best_sizes
from grpo_sweeps.report.design.pool import found_words, pool_section, pool_studies
from grpo_sweeps.report.figures.group_size import pool_figure
from grpo_sweeps.report.measure.pool import ESTIMATORS, sizes_of
from grpo_sweeps.report.read.query import load_sweep
from grpo_sweeps.science.budget import Budget
from grpo_sweeps.science.claim import Prompt
from tests.unit.report.exact_runs import enumerations, write_exact
from tests.unit.report.test_pool import FUNCTIONS

pytestmark = pytest.mark.integration

FIXED = {"trainer.lr": 0.0}


@pytest.fixture(scope="module")
def exact():
    return enumerations()


@pytest.fixture(scope="module")
def fixed(exact, tmp_path_factory):
    """Pools of 12 of an exact policy."""
    root = tmp_path_factory.mktemp("pools")
    write_exact(root, "fixed", exact, 12, 100, 8, "rloo", **FIXED)
    return root


@pytest.fixture(scope="module")
def study(fixed):
    sweep = load_sweep("fixed", fixed)
    (found,) = pool_studies(sweep, best_sizes(sweep))
    return found


def test_the_error_is_the_exact_one_and_its_least_is_found(study, exact):
    budget = Budget(tuple(Prompt(e) for e in exact))
    rows = study.table.set_index(["estimator", "size"])
    N = 12 * 8
    for n in sizes_of(12):
        for estimator, known in (
            ("leave-one-out", budget.leave_one_out(n, N)),
            ("group mean", budget.group_mean(n, N)),
        ):
            row = rows.loc[(estimator, n)]
            half = 4.5 / 1.96 * (row["error_high"] - row["error_low"]) / 2
            assert abs(row["error"] - N * known) < half < N * known
    assert np.isnan(rows.loc["std"]["error"]).all()
    beyond = rows.loc[("std", 12)]  # no two rollouts are left for the gradient
    assert np.isnan(beyond["error_prompt"]) and np.isnan(beyond["cosine"]) and rows.loc[("std", 10)]["cosine"] > 0
    assert study.low <= budget.found_R(N)[0] <= study.high and not study.at_the_end
    assert study.low <= study.found <= study.high and abs(study.found - study.predicted.values["best_R"]) < 1.5
    assert "least error found at R' = " in found_words(study, False) and "by the formula R* = " in found_words(
        study, False
    )


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_error_against_the_prompts_own_gradient_and_cosine(study, exact, size, estimator):
    row = study.table.set_index(["estimator", "size"]).loc[(estimator, size)]
    function = grpo_std if estimator == "std" else FUNCTIONS[estimator]
    found = [group_moments(e, one_group_weights(function, "sum", 3), size, by_length=False) for e in exact]
    mse = float(np.mean([m.mse(e.grad_J_D) for m, e in zip(found, exact, strict=True)]))
    assert abs(row["error_prompt"] - mse) < 4.5 / 1.96 * (row["error_prompt_high"] - row["error_prompt_low"]) / 2
    product = np.mean([float(m.mean_D @ e.grad_J_D) for m, e in zip(found, exact, strict=True)])
    signal = np.mean([float(e.grad_J_D.square().sum()) for e in exact])
    cosine = product / math.sqrt(np.mean([m.second for m in found]) * signal)
    assert row["cosine"] == pytest.approx(cosine, rel=0.1)


def test_mixed_sub_groups_and_their_ranks(study, exact):
    rows = study.table[study.table["estimator"] == "std"].set_index("size")
    for n in (2, 5, 12):
        share = np.mean([1 - e.J**n - (1 - e.J) ** n for e in exact])
        half = 4.5 / 1.96 * (rows["mixed_high"][n] - rows["mixed_low"][n]) / 2
        assert abs(rows["mixed"][n] - share) < half
    ranks, chances = [], []
    for e in exact:  # every group of three
        p, r, K = e.p_N.numpy(), e.rewards_N.numpy(), e.gram_NN.numpy()
        index = np.array(list(itertools.product(range(len(p)), repeat=3)))
        index = index[np.ptp(r[index], axis=1) > 0]
        w = r[index] - r[index].mean(axis=1, keepdims=True)
        H = w[:, :, None] * K[index[:, :, None], index[:, None, :]] * w[:, None, :]
        s = np.sqrt(np.clip(np.linalg.eigvalsh(H), 0, None))
        chances.append(p[index].prod(axis=1))
        ranks.append(s.sum(axis=1) ** 2 / (s**2).sum(axis=1))
    known = np.concatenate(chances) @ np.concatenate(ranks) / np.concatenate(chances).sum()
    half = 4.5 / 1.96 * (rows["effective_rank_high"][3] - rows["effective_rank_low"][3]) / 2
    assert abs(rows["effective_rank"][3] - known) < half < 0.4  # six prompts


def test_the_report_shows_pools_of_a_fixed_policy_alone(fixed, exact, tmp_path, study, undrawn):
    out, _ = build("fixed", fixed, tmp_path / "out", ["report"])
    text = (out / "index.html").read_text()
    assert 'id="pool"' in text and "least error found at R" in text
    assert {"pool.csv", "pool.png", "pool.pdf"} <= {p.name for p in out.iterdir()}
    write_exact(tmp_path, "moving", exact, 8, 12, 4)
    write_exact(tmp_path, "small", exact, 4, 12, 4, **FIXED)
    for name in ("moving", "small"):
        sweep = load_sweep(name, tmp_path)
        assert pool_studies(sweep, best_sizes(sweep)) == []
    sweep = load_sweep("fixed", fixed)
    (plot,) = pool_figure(sweep, [study])
    assert set(render(plot)) == {"pool.png", "pool.pdf", "pool_1.svg", "pool_2.svg"}
    assert [p.title for p in plot.panels] == ["pools of 12: error", "pools of 12: cosine"]


def test_without_the_mean_gradient_the_rest_stands(exact, tmp_path):
    write_exact(tmp_path, "length", exact, 8, 12, 4, **FIXED, aggregation="length")
    sweep = load_sweep("length", tmp_path)
    (found,) = pool_studies(sweep, best_sizes(sweep))
    assert math.isnan(found.found) and found.table["error"].isna().all() and found.table["error_prompt"].notna().any()
    assert "cannot be decided from these runs" in found_words(found, False)
    assert len(pool_section([found]).rows) == len(sizes_of(8))
    sweep.groups["measured"] = False
    kept = pool_table.usable_pools(sweep.groups)
    assert not kept["mixed"].astype(bool).any()
