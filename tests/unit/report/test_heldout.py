"""Accuracy and reward on held-out problems: tables, captions and figure 3, of tasks with verdicts and without."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from grpo_sweeps.publish.drawing import render
from grpo_sweeps.report.build import build
from grpo_sweeps.report.figures import by_step
from grpo_sweeps.report.figures.by_step import heldout_plot
from grpo_sweeps.report.read.query import Sweep, load_sweep
from grpo_sweeps.report.tables.logged import curve_table
from grpo_sweeps.report.tables.pooled import (
    FLEXIBLE_REWARD,
    accuracy_by_step,
    evaluation_in_words,
    headline,
    table1,
    unjudged_arms,
)
from grpo_sweeps.report.tables.sweeps import side_by_side

NONE = {"task.verdict": "none", "task.name": "essays"}


@pytest.fixture
def essays(write, tmp_path: Path) -> Path:
    """A sweep whose task has no verdicts, its rewards up to 2; and one with verdicts and rewards."""
    for seed in range(3):
        for R in (2, 4):
            write(tmp_path, "essays", R, seed, steps=4, config=NONE, worth=2.0)
    write(tmp_path, "judged", 2, 0, steps=4, worth=1.0)
    return tmp_path


def test_the_held_out_reward_against_plain_means(essays: Path) -> None:
    sweep = load_sweep("essays", essays)
    table = table1(sweep).set_index("R")
    for R in (2, 4):
        evals = sweep.evals[sweep.evals["R"] == R]
        first, last = (evals[evals["step"] == step]["reward"].to_numpy(float) for step in (0, 4))
        row = table.loc[R]
        assert row["heldout_reward"] == pytest.approx(last.mean()) and row["heldout_reward"] > 1, "no share: up to 2"
        assert row["heldout_reward_before"] == pytest.approx(first.mean())
        assert row["heldout_reward_gain"] == pytest.approx((last - first).mean())
        assert row["heldout_reward_low"] < last.mean() < row["heldout_reward_high"] and np.isnan(row["accuracy"])
        curve = accuracy_by_step(sweep, "all", R, reward=True)
        assert list(curve["step"]) == [0, 2, 4] and curve["mean"].iloc[-1] == pytest.approx(last.mean())


def test_without_verdicts_the_table_has_the_reward_and_no_accuracy(essays: Path) -> None:
    sweep = load_sweep("essays", essays)
    header, rows = headline(table1(sweep), unjudged_arms(sweep))
    assert not [name for name in header if "accuracy" in name]
    at = header.index("held-out reward before")
    assert header[at : at + 3] == ["held-out reward before", "after", "gain, paired"]
    assert all("–" not in row[at : at + 3] and "[" in row[at + 2] for row in rows)
    words = evaluation_in_words(sweep)
    assert (
        words.startswith("Held-out reward: the run's own") and "parsing" not in words and "task.verdict=none" in words
    )


def test_the_whole_report_of_it_says_so(essays: Path, undrawn, tmp_path: Path) -> None:
    out, _ = build("essays", essays, tmp_path / "out", ["report"])
    page = (out / "index.html").read_text(encoding="utf-8")
    table = page[page.index('<h2 id="table">') : page.index('<h2 id="figures">')]
    for text in (table, (out / "table1.md").read_text(), (out / "table1.tex").read_text()):
        assert "Accuracy:" not in text and "parsing" not in text and "accuracy before" not in text
        assert "held-out reward before" in text and "no answer is right or wrong" in text
    assert "Figure 3. Held-out reward." in page


def test_terms_are_explained_before_they_are_used(essays: Path, undrawn, tmp_path: Path) -> None:
    out, _ = build("essays", essays, tmp_path / "out", ["report"])
    page = (out / "index.html").read_text(encoding="utf-8")
    start = page.index('<section aria-label="Verdicts">')
    first = page[start:].index("A group is the R rollouts of one prompt")
    for term in ("mixed group", "null", "sigma_r", "<h3>C2</h3>", " arm"):
        assert first < page[start:].index(term), term


def test_records_without_rewards_make_the_table_of_before(write, tmp_path: Path) -> None:
    write(tmp_path, "old", 2, 0, steps=4)
    sweep = load_sweep("old", tmp_path)
    assert not [name for name in table1(sweep) if "heldout" in name]
    assert [panel.title for panel in heldout_plot(sweep, curve_table(sweep))[0].panels] == [
        "held-out accuracy, by training step", "held-out accuracy, by rollouts used",
    ]  # fmt: skip


def test_arms_with_and_without_verdicts_have_a_column_each(essays: Path) -> None:
    with_both = load_sweep("essays,judged", essays)
    header, rows = headline(table1(with_both), unjudged_arms(with_both))
    at = header.index("accuracy before")
    assert header[at + 3] == "held-out reward before"
    (arm,) = unjudged_arms(with_both)
    for row in rows:
        assert (row[at] == "–") == (row[0] == arm) and row[at + 3] != "–"
    words = evaluation_in_words(with_both)
    assert "Accuracy: held-out problems" in words and f"Held-out reward of {arm}:" in words


def test_figure_3_has_the_reward_beside_that_in_training(essays: Path) -> None:
    sweep = load_sweep("judged", essays)
    (plot,) = heldout_plot(sweep, curve_table(sweep))
    assert plot.title == "Held-out accuracy and reward" and len(plot.panels) == 3
    assert plot.panels[2].title == "held-out reward, by training step" and "Dotted: the mean reward" in plot.caption
    sweep = load_sweep("essays", essays)
    (plot,) = heldout_plot(sweep, curve_table(sweep))
    assert [panel.title for panel in plot.panels] == [
        "held-out reward, by training step", "held-out reward, by rollouts used",
    ]  # fmt: skip
    assert "from" in plot.panels[0].alt and plot.caption.count("Held-out reward:") == 1
    drawn = render(plot)["fig3_1.svg"].decode()
    assert "in training" in drawn and "in training" not in render(plot)["fig3_2.svg"].decode()


def test_figure_3_is_of_the_arms_that_were_evaluated(write, tmp_path: Path) -> None:
    write(tmp_path, "never", 2, 0, steps=3, evaluate=False)
    assert heldout_plot(load_sweep("never", tmp_path)) == []
    assert by_step.NOT_DRAWN.startswith("Figure 3")
    other = {"estimator._target_": "grpo_sweeps.estimators.group.rloo"}
    write(tmp_path, "some", 2, 0, steps=3, evaluate=False, config=other)
    write(tmp_path, "some", 2, 0, steps=3)
    sweep = load_sweep("some", tmp_path)
    (plot,) = heldout_plot(sweep)
    assert len(sweep.cells) == 2 and len(plot.panels) == 2


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "right by strict parsing, the number after the first ####."),
        ({"reward._target_": FLEXIBLE_REWARD}, "right by flexible parsing."),
        ({"task.verdict": "exact"}, "right where the text after the last #### or in the last box is that"),
        ({"task.verdict": "choice"}, "right where the letter after #### or in a box is that of the reference."),
        ({"task.verdict": "mine.judges.near"}, "sampled as in training, right where judges.near says so."),
        ({"task.verdict": "math"}, "right where the expression after #### or in a box equals the reference (math-"),
    ],
)
def test_captions_say_what_is_right_by_the_kind_of_verdict(write, tmp_path: Path, changes: dict, words: str) -> None:
    write(tmp_path, "one", 2, 0, steps=2, config=changes)
    sweep = load_sweep("one", tmp_path)
    assert words in evaluation_in_words(sweep) and words in heldout_plot(sweep)[0].caption


def test_several_kinds_are_told_apart(write, tmp_path: Path) -> None:
    write(tmp_path, "two", 2, 0, steps=2, config={"reward._target_": FLEXIBLE_REWARD})
    write(tmp_path, "two", 2, 0, steps=2)
    write(tmp_path, "two", 4, 0, steps=2, config={"task.verdict": "choice"})
    words = evaluation_in_words(load_sweep("two", tmp_path))
    assert "(flexible where that is the reward) (task.verdict=numbers) or where the letter" in words


def test_side_by_side_pairs_rewards_where_no_arm_has_verdicts(write, essays: Path) -> None:
    for seed in range(3):
        write(essays, "rloo", 2, seed, steps=4, worth=1.0,
              config={**NONE, "estimator._target_": "grpo_sweeps.estimators.group.rloo"})  # fmt: skip

    def quantities(sweep: Sweep) -> set[str]:
        return set(side_by_side(sweep)["quantity"])

    sweep = load_sweep("essays,rloo", essays)
    assert quantities(sweep) == {"held-out_reward", "reward", "effective_rank"}
    (row,) = side_by_side(sweep).query("quantity == 'held-out_reward'").to_dict("records")
    last = sweep.evals[(sweep.evals["step"] == 4) & (sweep.evals["R"] == 2)].groupby("arm")["reward"].mean()
    assert row["pairs"] == 180 and row["difference"] == pytest.approx(last[row["arm"]] - last[row["reference"]])
    assert quantities(load_sweep("essays,judged", essays)) == {"accuracy", "reward", "effective_rank"}


def test_the_readme_shows_the_columns_of_the_report(write, tmp_path: Path) -> None:
    write(tmp_path, "one", 2, 0, steps=2)
    header, (row,) = headline(table1(load_sweep("one", tmp_path)))
    readme = (Path(__file__).resolve().parents[3] / "README.md").read_text(encoding="utf-8")
    shown = readme[readme.index("<!-- table1:begin -->") :].splitlines()[1]
    assert [cell.strip() for cell in shown.strip("|").split("|")] == header and len(row) == len(header)
