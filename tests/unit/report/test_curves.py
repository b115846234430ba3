"""How training went, in the report: the table against a slow oracle, figures, other lengths and older records."""

from __future__ import annotations

import dataclasses
import math
import re

import numpy as np
import pytest
from matplotlib import pyplot as plt
from scipy import stats

from grpo_sweeps.publish.drawing import render
from grpo_sweeps.report.figures.by_step import MARKS, MOST_ARMS, curves_figures
from grpo_sweeps.report.read.query import load_sweep
from grpo_sweeps.report.tables.logged import METRICS, RANGES, SILENT, VALUES, WINDOWS, curve_table
from grpo_sweeps.tracking.local import LocalRecord

LOGGED = [name for name in VALUES if name not in SILENT]


def value_of(name: str, R: int, seed: int, step: int) -> float:
    """A number in (0, 1) that every quantity may be."""
    return float(np.random.default_rng([LOGGED.index(name), R, seed, step]).uniform(0.05, 0.95))


def log(folder, R, seed, steps, without=()):
    with LocalRecord(folder) as record:
        for step in range(steps):
            names = [n for n in LOGGED if n not in without]
            record.log_metrics(step, {METRICS[n]: value_of(n, R, seed, step) for n in names})


@pytest.fixture(scope="module")
def runs(write, tmp_path_factory):
    """runs/ with R = 2 and 4, three seeds, 12 steps; at every fourth step no ratio of signal and noise."""
    folder = tmp_path_factory.mktemp("curves")
    for R in (2, 4):
        for seed in range(3):
            run = write(folder, "learnt", R, seed, steps=12)
            with LocalRecord(run) as record:
                for step in range(12):
                    names = [n for n in LOGGED if step % 4 or n not in ("snr", "noise_scale")]
                    record.log_metrics(step, {METRICS[n]: value_of(n, R, seed, step) for n in names})
    return folder


def slow_interval(name: str, values: list[float]) -> tuple[float, float, float]:
    """Mean of runs and Student's interval, within what the quantity can take; no interval of fewer than three."""
    mean = float(np.mean(values))
    if len(values) < 3:
        return mean, math.nan, math.nan
    least, most = RANGES.get(name, (-math.inf, math.inf))
    half = stats.t.ppf(0.975, len(values) - 1) * np.std(values, ddof=1) / math.sqrt(len(values))
    return mean, max(least, mean - half), min(most, mean + half)


def test_every_point_against_plain_means(runs):
    sweep = load_sweep("learnt", runs)
    table = curve_table(sweep)
    assert list(table["step"]) == 2 * list(range(12)) and set(table["runs"]) == {3}
    assert (table["first_step"] == table["step"]).all() and (table["last_step"] == table["step"]).all()
    for row in table.to_dict("records"):
        R, step = row["R"], int(row["step"])
        groups = [g for g in sweep.records if g.R == R and g.step == step]
        by_seed = [groups[i : i + 4] for i in range(0, 12, 4)]  # four groups a step and seed
        found = {
            "all_right": [np.mean([min(g.rewards) == max(g.rewards) == 1 for g in own]) for own in by_seed],
            "all_wrong": [np.mean([min(g.rewards) == max(g.rewards) == 0 for g in own]) for own in by_seed],
        } | {n: [value_of(n, R, seed, step) for seed in range(3)] for n in LOGGED}
        for name, values in found.items():
            ends = [row[name], row[f"{name}_low"], row[f"{name}_high"]]
            if name in ("snr", "noise_scale") and step % 4 == 0:
                assert np.isnan(ends).all()
            else:
                assert ends == pytest.approx(slow_interval(name, values), nan_ok=True)
    assert (table["all_right"] > 0).any() and (table["all_wrong"] > 0).any()
    shares = sweep.groups.groupby(["R", "step"])["mixed"].mean().to_numpy(float)
    assert (table["all_right"] + table["all_wrong"]).to_numpy() == pytest.approx(1 - shares)


@pytest.mark.parametrize(("steps", "points"), [(1, 1), (3, 3), (50, 50), (51, 26), (1000, 50)])
def test_windows_are_means_over_each_run_first_whatever_the_number_of_steps(write, tmp_path, steps, points):
    for seed in range(3):
        run = write(tmp_path, "s", 2, seed, steps=1, evaluate=False)
        log(run, 2, seed, steps if seed else max(1, steps - 1))  # one run is a step behind
    sweep = load_sweep("s", tmp_path)
    table = curve_table(sweep)
    assert len(table) == points <= WINDOWS and table["last_step"].max() == steps - 1
    assert (table["first_step"].to_numpy()[1:] == table["last_step"].to_numpy()[:-1] + 1).all()
    for row in table.iloc[[0, -1]].to_dict("records"):
        window = range(row["first_step"], row["last_step"] + 1)
        of_seeds = [[value_of("entropy", 2, 0, s) for s in window if s < max(1, steps - 1)],
                    *([value_of("entropy", 2, seed, s) for s in window] for seed in (1, 2))]  # fmt: skip
        means = [float(np.mean(values)) for values in of_seeds if values]
        assert [row["entropy"], row["entropy_low"], row["entropy_high"]] == pytest.approx(
            slow_interval("entropy", means), nan_ok=True
        )
    (plot, _) = curves_figures(sweep, table)
    width = math.ceil(steps / WINDOWS)
    said = "A point is one step" if width == 1 else f"A point is the mean over {width} successive steps"
    assert said in plot.caption


def test_one_seed_has_no_band_and_an_evaluation_after_the_last_step_is_no_step(write, tmp_path):
    log(write(tmp_path, "one", 2, 0, steps=3), 2, 0, 3)
    sweep = load_sweep("one", tmp_path)
    table = curve_table(sweep)
    assert 3 in set(sweep.metrics["step"]) and list(table["step"]) == [0, 1, 2]
    assert table["reward"].notna().all() and table["reward_low"].isna().all()


def test_values_that_are_not_finite_are_no_part_of_a_mean(write, tmp_path):
    run = write(tmp_path, "nan", 2, 0, steps=2, evaluate=False)
    log(run, 2, 0, 2)
    with LocalRecord(run) as record:
        record.log_metrics(1, {"grad_norm": math.inf, "entropy": math.nan})
    table = curve_table(load_sweep("nan", tmp_path))
    assert table["grad_norm"].isna().tolist() == table["entropy"].isna().tolist() == [False, True]


@pytest.mark.parametrize(
    ("rewards", "share"),
    [((-1.0, -1.0), "all_wrong"), ((2.0, 2.0), "all_right"), ((0.5, 0.5), "equal_otherwise"), ((0.0, 2.0), None)],
)
def test_a_silent_group_of_other_rewards(write, tmp_path, rewards, share):
    write(tmp_path, "r", 2, 0, steps=1, change=lambda g: dataclasses.replace(g, rewards=rewards, gram=None))
    table = curve_table(load_sweep("r", tmp_path))
    assert table[[*SILENT]].iloc[0].to_dict() == {name: float(name == share) for name in SILENT}


def test_silent_groups_of_graded_rewards_are_a_third_curve(write, tmp_path, runs):
    graded = lambda g: dataclasses.replace(  # noqa: E731
        g, rewards=(0.5,) * 2 if len(set(g.rewards)) == 1 else g.rewards, gram=None
    )
    write(tmp_path, "graded", 2, 0, steps=12, change=graded)
    sweep = load_sweep("graded", tmp_path)
    table = curve_table(sweep)
    silent = 1 - sweep.groups.groupby("step")["mixed"].mean().to_numpy(float)
    assert table[[*SILENT]].sum(axis=1).to_numpy() == pytest.approx(silent) and silent.any()
    (training,) = curves_figures(sweep, table)
    panel = training.panels[4]
    fig, ax = plt.subplots()
    panel.draw(ax)
    assert [t.get_text() for t in ax.get_legend().get_texts()][1:] == ["all right", "all wrong", "equal otherwise"]
    assert any(list(line.get_ydata()) == pytest.approx(list(silent)) for line in ax.lines if len(line.get_ydata()) > 1)
    assert "equal otherwise from" in panel.alt and "equal otherwise with any other reward" in training.caption
    plt.close(fig)
    binary = load_sweep("learnt", runs)
    assert "otherwise" not in curves_figures(binary, curve_table(binary))[0].caption


def test_steps_without_records_of_groups_take_the_logged_shares(write, tmp_path):
    run = write(tmp_path, "logged", 2, 0, steps=1, evaluate=False)
    shares = {"groups/all_right": 0.1, "groups/all_wrong": 0.2, "frac_reward_zero_std": 0.7}
    with LocalRecord(run) as record:
        record.log_metrics(1, {"reward": 0.5, **shares})
        record.log_metrics(2, {"reward": 0.5, "frac_reward_zero_std": 0.7})
    table = curve_table(load_sweep("logged", tmp_path))
    assert table[[*SILENT]].iloc[1].tolist() == pytest.approx([0.1, 0.2, 0.4])
    assert table[[*SILENT]].iloc[2].isna().all(), "of all silent groups alone none is known to be of one kind"


def test_the_figures_have_a_panel_a_quantity_and_say_their_ends(runs):
    sweep = load_sweep("learnt", runs)
    training, noise = curves_figures(sweep, curve_table(sweep))
    assert [p.title for p in training.panels] == [
        "reward", "completion length", "entropy", "cut completions", "silent groups", "gradient norm",
    ]  # fmt: skip
    first, last = (np.mean([value_of("entropy", 4, seed, step) for seed in range(3)]) for step in (0, 11))
    assert f"R = 4: from {first:.3g} to {last:.3g}" in training.panels[2].alt
    assert re.search(r"R = 2: all right from \S+ to \S+, all wrong from", training.panels[4].alt)
    assert [p.title for p in noise.panels] == ["signal to noise", "noise scale"]
    assert set(render(noise)) == {"noise.png", "noise.pdf", "noise_1.svg", "noise_2.svg"}


def test_lines_are_told_apart_and_bands_leave_the_curves_their_shape(runs):
    sweep = load_sweep("learnt", runs)
    table = curve_table(sweep)
    table["mean_length"] = 100.0 + table["step"]
    table["mean_length_low"], table["mean_length_high"] = -1e4, 1e4
    (training, _) = curves_figures(sweep, table)
    fig, (length, silent) = plt.subplots(1, 2)
    training.panels[1].draw(length)
    training.panels[4].draw(silent)
    low, high = length.get_ylim()
    assert low < 100 and high > 111 and high - low < 4 * 11 and len(length.collections) == 2
    drawn = [line for line in silent.lines if len(line.get_xdata())]
    looks = {(line.get_color(), line.get_marker(), line.get_markerfacecolor() == "white") for line in drawn}
    assert len(looks) == len(drawn) == 4 and silent.get_ylim()[0] < 0 < 1 < silent.get_ylim()[1]
    assert [t.get_text() for t in silent.get_legend().get_texts()] == ["R = 2", "R = 4", "all right", "all wrong"]
    for line in length.lines:
        assert len(line.get_xdata()) / (line.get_markevery() or 1) <= MARKS
    plt.close(fig)


def test_a_curve_of_zeros_has_an_axis_that_can_be_read(runs):
    sweep = load_sweep("learnt", runs)
    table = curve_table(sweep).assign(grad_norm=0.0, grad_norm_low=0.0, grad_norm_high=0.0)
    fig, ax = plt.subplots()
    curves_figures(sweep, table)[0].panels[5].draw(ax)
    assert ax.get_ylim() == pytest.approx((-0.03, 1.03))
    plt.close(fig)


def test_three_arms_are_drawn_and_the_caption_says_so(write, tmp_path):
    for lr in (0.1, 0.2, 0.3, 0.4):
        log(write(tmp_path, "arms", 2, 0, steps=2, config={"trainer.lr": lr}), 2, 0, 2)
    sweep = load_sweep("arms", tmp_path)
    table = curve_table(sweep)
    (training, _) = curves_figures(sweep, table)
    assert table["arm"].nunique() == 4 and len(training.panels) == 6 * MOST_ARMS
    assert "Drawn: the first 3 of 4 arms; curves.csv has them all." in training.caption
    assert training.panels[0].title == "lr=0.1, reward" and "for lr=0.3" in training.panels[12].alt


def test_older_records_have_silent_groups_all_the_same_and_no_ratio_of_noise(write, tmp_path):
    write(tmp_path, "old", 4, 0, steps=6)
    sweep = load_sweep("old", tmp_path)
    table = curve_table(sweep)
    (training,) = curves_figures(sweep, table)
    assert table["all_right"].notna().all() and table["snr"].isna().all() and table["entropy"].isna().all()
    assert "R = 4: no values" in training.panels[2].alt and len(render(training)) == 2 + len(training.panels)
