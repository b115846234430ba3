"""What every figure of the report shares: axes of one and two steps, the order of legends, an R without a value."""

from __future__ import annotations

import dataclasses

import pytest
import seaborn as sns
from matplotlib import pyplot as plt

from grpo_sweeps.paper import STATEMENTS
from grpo_sweeps.publish.drawing import RC, TITLE_WIDTH, Panel, _canvas
from grpo_sweeps.report.build import whole_arms
from grpo_sweeps.report.claims import rules
from grpo_sweeps.report.claims.finding import Claim
from grpo_sweeps.report.figures import by_k, layers
from grpo_sweeps.report.figures.by_step import curves_figures, spectral_plot
from grpo_sweeps.report.figures.look import NO_VALUE, finish
from grpo_sweeps.report.page import open_claims
from grpo_sweeps.report.read.query import load_sweep
from grpo_sweeps.report.tables.logged import curve_table
from grpo_sweeps.report.tables.pooled import by_k as by_k_table


def shown_ticks(ax):
    low, high = ax.get_xlim()
    return [float(tick) for tick in ax.get_xticks() if low <= tick <= high]


@pytest.mark.parametrize(("steps", "ticks"), [([0], [0]), ([7], [7]), ([0, 1], [0, 1]), ([0, 1, 2], [0, 1, 2])])
def test_an_axis_of_few_steps_has_whole_steps_alone(steps, ticks):
    fig, ax = plt.subplots()
    ax.plot(steps, [0.5] * len(steps), label="R = 2")
    finish(ax, "training step", "share", whole=True)
    assert shown_ticks(ax) == ticks
    plt.close(fig)


def test_legends_are_in_the_order_of_R_whatever_was_drawn_first():
    fig, ax = plt.subplots()
    for label in ("null", "R = 16", "R = 4, std", "R = 8", "R = 4", "R = 2"):
        ax.plot([0, 1], [0, 1], label=label)
    finish(ax, "x", "y", whole=False)
    found = [text.get_text() for text in ax.get_legend().get_texts()]
    assert found == ["R = 2", "R = 4, std", "R = 4", "R = 8", "R = 16", "null"]
    plt.close(fig)


def test_an_R_without_a_value_is_named_in_the_legend(write, tmp_path):
    for R in (2, 4):
        change = (lambda g: dataclasses.replace(g, gram=None)) if R == 4 else None
        write(tmp_path, "s", R, 0, steps=2, change=change, evaluate=False)
    sweep = load_sweep("s", tmp_path)
    table = curve_table(sweep).assign(snr=0.5)
    table.loc[table["R"] == 4, "snr"] = float("nan")
    _, noise = curves_figures(sweep, table)
    spectral = spectral_plot(sweep, "fig1", "", "effective_rank", "effective rank")
    fig, axes = plt.subplots(1, 3)
    noise.panels[0].draw(axes[0])
    spectral.panels[0].draw(axes[1])
    for ax in axes[:2]:
        labels = [text.get_text() for text in ax.get_legend().get_texts()]
        assert labels[:2] == ["R = 2", f"R = 4: {NO_VALUE}"], labels
    noise.panels[1].draw(axes[2])  # no R has a noise scale: the panel says so, and names none
    assert axes[2].get_legend() is None and axes[2].texts[0].get_text() == "nothing measured"
    plt.close(fig)


def test_ranks_by_k_are_not_drawn_of_graded_rewards(write, tmp_path):
    graded = lambda g: dataclasses.replace(  # noqa: E731
        g, rewards=tuple(0.75 * r for r in g.rewards)
    )
    write(tmp_path, "graded", 4, 0, steps=3, change=graded)
    write(tmp_path, "binary", 4, 0, steps=3)
    for name, there in (("graded", 0), ("binary", 1)):
        sweep = load_sweep(name, tmp_path)
        assert len(by_k.rank_by_k_plot(sweep, by_k_table(sweep))) == there, name
    assert by_k.NOT_DRAWN.startswith("Figure 4") and layers.NOT_DRAWN.startswith("Figure 5")


def test_a_claim_that_several_arms_leave_open_is_listed_once():
    claims = [Claim(name, arm, STATEMENTS[name].brief, rules.UNDECIDED, ()) for name in ("C1", "C21") for arm in "ab"]
    assert open_claims(claims) == ["C1", "C21"]


def test_csv_files_have_the_whole_names_of_arms(write, tmp_path):
    for text in ("a" * 90, "b" * 90):
        write(tmp_path, "s", 2, 0, steps=1, config={"task.prompt": text}, evaluate=False)
    sweep = load_sweep("s", tmp_path)
    table = curve_table(sweep)
    assert all(len(arm) <= 60 for arm in table["arm"])
    assert list(whole_arms(sweep, table)["arm"]) == [f"prompt={letter * 90}" for letter in "ab"]


def test_long_titles_leave_the_labels_on_the_figure():
    def draw(ax):
        ax.plot([0, 1], [0, 4], label="R = 2")
        finish(ax, "training step", "effective rank", whole=True)

    long = r"prompt='Question: {question}\nThink step…by step. \nAnswer:'"
    with sns.axes_style("whitegrid", rc=RC), plt.rc_context(RC):
        fig = _canvas([Panel(long, "", draw), Panel(long, "", draw)])
        for ax in fig.axes:
            assert ax.yaxis.label.get_window_extent().x0 >= 0
            assert max(map(len, ax.get_title().splitlines())) <= TITLE_WIDTH
        plt.close(fig)
