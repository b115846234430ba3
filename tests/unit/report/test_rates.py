"""The tools that measure how often verdicts are wrong and intervals hold the truth: that they run, that what they take
for the truth is true, and that a broken rule is seen."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from grpo_sweeps.report.claims.ranks import DEFINITIONS
from grpo_sweeps.report.measure import permutation
from grpo_sweeps.report.tables.pooled import pooled, usable_groups

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def tools():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "tools"))
        import coverage
        import drawn_sweeps
        import verdict_rates

        yield SimpleNamespace(drawn=drawn_sweeps, rates=verdict_rates, coverage=coverage)


@pytest.fixture(scope="module")
def population(tools):
    """Few prompts of short sequences, so that every group can be listed in a moment."""
    return tools.drawn.Population.made(prompts=12, tokens=3, max_length=2, seed=1)


@pytest.fixture
def frozen(tools, population, tmp_path):
    """Two runs of a fixed policy whose every group has its Gram, and the sweep that they are of."""
    sweep = tools.drawn.skeleton(tmp_path, "frozen", [tools.drawn.config(R, 0, 30, 4) for R in (4, 8)])
    rng, runs = np.random.default_rng(0), []
    picked = population.problems(30, 4, 4, rng)
    for run in sweep.runs.itertuples():
        groups, rows_NR = population.draw(picked, run.R, 4, rng)
        text_NR = groups.prompt_N[:, None] * population.p_XS.shape[1] + rows_NR
        runs.append(tools.drawn.Frozen(run.run, groups, text_NR))
    return runs, sweep


def shuffled_wrong(tools, frozen, repeats: int) -> int:
    """In how many of so many redrawings by a hash "shuffled" is contradicted at 5%, at R = 8."""
    lines = tools.rates.redrawn(*frozen, "hash", repeats, 0)
    table = tools.rates.tabled("hash", lines, tools.rates.truths_of_redrawn(lines, "hash"), 0.001)
    return int(table.set_index(["claim", "R"]).loc[("Shuffled", 8), "wrong at 5%"])


def test_a_rule_that_permutes_over_rollouts_is_caught(tools, frozen, monkeypatch):
    """A hash of the text is no null for rollouts where texts repeat; for texts it is."""
    assert shuffled_wrong(tools, frozen, 20) <= 4
    everything = permutation.possible
    monkeypatch.setattr(permutation, "possible", lambda *args: np.ones_like(everything(*args)))
    assert shuffled_wrong(tools, frozen, 20) >= 10


@pytest.mark.parametrize("kind", ["coin", "hash"])
def test_every_claim_has_its_lines_and_no_identity_is_ever_wrong(tools, frozen, kind):
    lines = tools.rates.redrawn(*frozen, kind, 3, 1)
    table = tools.rates.tabled(kind, lines, tools.rates.truths_of_redrawn(lines, kind), 0.001)
    named = set(table["claim"]) - {f"C8 by {name}" for name in DEFINITIONS.values()}
    assert named == {*tools.rates.JUDGED, "any"} and (table["sweeps"] == 3).all()
    identities = table[table["claim"].isin(tools.rates.IDENTITIES)]
    said = identities["claim"] != "C4"  # bounds that say nothing decide nothing
    assert (identities["wrong"] == 0).all() and (identities.loc[said, "decided"] == 3).all()


def test_a_correction_is_wrong_where_nothing_is_to_be_corrected(tools):
    corrected = tools.rates.rules.CORRECTED
    assert corrected in tools.rates.wrong_of("C5", 4, 1.0) and corrected in tools.rates.wrong_of("C5", 4, 2.5)
    assert corrected not in tools.rates.wrong_of("C5", 4, 1.5)
    truths = {("C5", R): tools.rates.Truth(tools.rates.wrong_of("C5", R, v)) for R, v in ((4, 1.5), (8, 2.5))}
    assert {corrected, tools.rates.HOLDS} <= tools.rates.whole(truths, "C5")


def test_rewards_drawn_anew_are_those_of_the_text_or_of_the_rollout(frozen):
    (one, other), _ = frozen
    hashed, again = one.hashed(7).rewards_NR, one.hashed(7).rewards_NR
    assert (hashed == again).all() and 0.2 < hashed.mean() < 0.8
    of_text = dict(zip(one.text_NR.ravel(), hashed.ravel(), strict=True))
    assert all(of_text[text] == r for text, r in zip(one.text_NR.ravel(), hashed.ravel(), strict=True))
    both = zip(other.text_NR.ravel(), other.hashed(7).rewards_NR.ravel(), strict=True)
    assert all(of_text.get(text, r) == r for text, r in both)  # in every run alike
    coins = one.coin(np.random.default_rng(0)).rewards_NR
    assert any(len({*coins[one.text_NR == text]}) == 2 for text in np.unique(one.text_NR))


def test_the_truth_by_enumeration_is_the_mean_of_many_drawn_groups(tools, population, tmp_path):
    R, rng = 4, np.random.default_rng(3)
    exact = tools.drawn.exact_values(population, R)
    groups, rows_NR = population.draw(population.problems(2000, 4, 1, rng), R, 4, rng)
    empty = tools.drawn.skeleton(tmp_path, "many", [tools.drawn.config(R, 0, 2000, 4)])
    run = str(empty.runs["run"].iloc[0])
    sweep = tools.drawn.filled(empty, {run: groups.rows()})
    used = usable_groups(sweep, "all", R)
    for name, column in (("rank_K", "effective_rank"), ("top1_K", "top1_fraction"), ("own_K", "pair_norm")):
        found = pooled(used, column, 0.001)
        assert found.low <= exact.mean(name) <= found.high
    assert exact.p_K.sum() == pytest.approx(groups.mixed_N.mean(), abs=0.02)
    by_k = used.groupby("k").size() / len(groups.step_N)
    assert by_k.to_numpy() == pytest.approx(exact.p_K[1:R], abs=0.02)
    metrics = population.metrics(groups, rows_NR, stacked=False)
    psi = population.psi_XSD[groups.prompt_N[:4, None] % 12, rows_NR[:4]]
    assert metrics["grad_norm"].iloc[0] == pytest.approx(
        np.linalg.norm(np.einsum("gr,grd->d", groups.weights_NR[:4], psi))
    )


def test_verdicts_on_drawn_sweeps_are_compared_with_the_truth(tools, population, tmp_path, monkeypatch):
    monkeypatch.setattr(tools.rates, "STEPS_OF_C20", 50)
    lines = tools.rates.drawn(population, 2, 30, 4, 0, tmp_path)
    truths = tools.rates.truths_of_exact(population, 30, 4, 0)
    table = tools.rates.tabled("exact", lines, truths, 0.001).set_index(["claim", "R"])
    assert table.loc[("C8", 4), "truth"] and table.loc[("any", "all"), "sweeps"] == 2
    assert truths["C7", 2].wrong == {tools.rates.HOLDS}  # two different texts have rank 2


def test_coverage_counts_the_intervals_that_hold_the_truth(tools, population, tmp_path):
    held = tools.coverage.Held(1, 4)
    tools.coverage.drawn(population, {"sweeps": 2, "steps": 12, "prompts": 6, "seed": 0}, held, tmp_path)
    table = held.table(2).set_index(["quantity", "R"])
    assert {"effective rank", "top-1 fraction", "R*", "Q3 geometry"} <= set(table.index.get_level_values(0))
    assert table.loc[("effective rank", 4), "intervals"] == 2
    for high in (1.0, 0.4, np.nan):
        held.add("x", 2, 0.0, high, 0.5)
    assert held.found["x", 2] == [True, False]


def test_the_gain_is_that_of_the_drawn_seeds_and_problems(tools, tmp_path, monkeypatch):
    monkeypatch.setattr(tools.coverage, "TRAINED", 3)
    learners = tools.coverage.trained(0, problems=16)
    assert learners.after_SX.shape == (3, 8) and (learners.after_SX > learners.before_X).mean() > 0.5
    held = tools.coverage.Held(2, 1)
    tools.coverage.gains(learners, {"sweeps": 3, "seed": 0}, held, tmp_path)
    assert len(held.found["gain", 0]) == len(held.found["gain less gain", 0]) == 3


def test_a_share_stands_with_its_exact_interval(tools):
    assert tools.drawn.share_in_words(0, 20) == "0.0 [0.0, 16.8]"
    assert tools.drawn.share_in_words(10, 200) == "5.0 [2.4, 9.0]"
    assert pd.isna(tools.rates.Truth(frozenset()).value)


def test_what_is_printed_has_each_number_in_its_place(tools):
    row = {"quantity": "x", "R": 4, "seeds": 1, "times": 4, "truth": "2", "held %": "95.0 [90.0, 98.0]"}
    gain = row | {"quantity": "gain", "R": "", "seeds": 3, "times": 1}
    lines = tools.coverage.printed(pd.DataFrame([row, gain]))
    assert lines[0] == "| quantity | R | truth | 1 seed, each about 4 times |"
    assert lines[2] == "| x | 4 | 2 | 95.0 [90.0, 98.0] |" and lines[-1] == "| gain | 95.0 [90.0, 98.0] |"
    cell = {
        "kind": "coin",
        "claim": "C6",
        "R": 4,
        "truth": "0",
        "decided": 1,
        "stated %": "0.2",
        "rate %": "0.5 [0, 3]",
    }
    both = pd.DataFrame([cell | {"misses %": "4.0 [2, 6]"}, cell | {"R": "all", "misses %": ""}])
    lines = tools.rates.printed(both)
    assert "| C6 | 0.2 | 1 | 0.5 [0, 3] |" in lines and "| C6 | 4 | 0 | 4.0 [2, 6] |" in lines
