"""The report's tables against plain sums over the records, what is missing, how a figure is drawn."""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
import pytest

from grpo_sweeps.publish import drawing
from grpo_sweeps.publish.drawing import Panel, Plot, render
from grpo_sweeps.report import page
from grpo_sweeps.report.build import spectral_plots
from grpo_sweeps.report.figures.look import styles
from grpo_sweeps.report.measure import spectral as measure
from grpo_sweeps.report.read.query import load_sweep
from grpo_sweeps.report.remarks import missing
from grpo_sweeps.report.tables import pooled as table
from grpo_sweeps.report.tables.layers import layer_table


def test_missing_cells_seeds_commits_divergence(write, tmp_path):
    runs = tmp_path / "runs"
    write(runs, "s", 2, 0, config={"trainer.lr": 0.1})
    write(runs, "s", 2, 1, config={"trainer.lr": 0.1}, status={"commit": "f" * 16, "dirty": True})
    write(runs, "s", 4, 0, config={"trainer.lr": 0.1}, status={"total": 40})
    broken = write(runs, "s", 2, 0, config={"trainer.lr": 0.5}, evaluate=False)
    with open(broken / "metrics.jsonl", "a") as file:
        file.write('{"step": 3, "time": 1, "reward": 0.5, "grad_norm": "NaN"}\n')
    text = "\n".join(missing(load_sweep("s", runs)))
    assert "No run for lr=0.5, R = 4." in text
    assert "lr=0.1, R = 4 has no run with seed 1." in text
    assert "different commits: 0123456789ab, ffffffffffff" in text and "uncommitted changes" in text
    assert f"Run {broken.name} diverged: grad_norm is not a finite number from step 3." in text
    assert "Not evaluated: R=2 seed=0." in text and "number of steps: 20, 40" in text


def test_a_complete_sweep_misses_nothing(full_sweep):
    assert missing(load_sweep("full", full_sweep)) == []


def test_table_1_against_plain_means(full_sweep):
    sweep = load_sweep("full", full_sweep)
    rows = table.table1(sweep).set_index("R")
    for R in (2, 4, 8):
        records = [r for r in sweep.records if r.R == R]
        mixed = [r for r in records if r.mixed]
        values = []
        for r in mixed:
            s = np.sqrt(np.linalg.eigvalsh(np.outer(r.weights, r.weights) * r.gram).clip(0))
            values.append(s.sum() ** 2 / (s**2).sum())
        assert rows.at[R, "effective_rank"] == pytest.approx(np.mean(values))
        assert rows.at[R, "effective_rank_low"] < np.mean(values) < rows.at[R, "effective_rank_high"]
        assert rows.at[R, "mixed_groups"] == len(mixed) == rows.at[R, "measured_mixed_groups"]
        assert rows.at[R, "groups"] == len(records) and rows.at[R, "seeds"] == 3
        evals = sweep.evals[sweep.evals["R"] == R]
        share = evals["strict"] / evals["samples"]
        assert rows.at[R, "accuracy"] == pytest.approx(share[evals["step"] == 10].mean())
        gain = share[evals["step"] == 10].mean() - share[evals["step"] == 0].mean()
        assert rows.at[R, "accuracy_gain"] == pytest.approx(gain)
    assert rows.at[4, "paper_top1_fraction"] == "0.7-0.8" and rows.at[8, "paper_effective_rank"] == "about 2"


def test_a_gain_is_told_from_none(write, tmp_path):
    for R, gain in ((2, 0.0), (4, 0.4)):
        write(tmp_path, "g", R, 0, gain=gain, steps=4)
    rows = table.table1(load_sweep("g", tmp_path)).set_index("R")
    assert rows.at[2, "accuracy_gain_low"] < 0 < rows.at[2, "accuracy_gain_high"]
    assert rows.at[4, "accuracy_gain_low"] > 0.2


def test_by_k_against_plain_means_and_the_closed_form(paper_sweep):
    sweep = load_sweep("paper", paper_sweep)
    frame = table.by_k(sweep)
    assert list(frame[frame["R"] == 8]["k"]) == list(range(1, 8))
    for row in frame.to_dict("records"):
        assert row["null_closed_form"] == pytest.approx(4 * row["k"] * (row["R"] - row["k"]) / row["R"])
        chosen = sweep.groups[(sweep.groups["R"] == row["R"]) & (sweep.groups["k"] == row["k"])]
        assert row["groups"] == len(chosen)
        assert row["effective_rank"] == pytest.approx(chosen["effective_rank"].mean(), nan_ok=True)
        assert row["null_effective_rank"] == pytest.approx(row["null_closed_form"], nan_ok=True) or not row["groups"]


def test_every_definition_of_every_matrix_is_there_by_k_with_its_nulls(full_sweep):
    sweep = load_sweep("full", full_sweep)
    for row in table.by_k(sweep).to_dict("records"):
        R, k = row["R"], row["k"]
        chosen = sweep.groups[(sweep.groups["R"] == R) & (sweep.groups["k"] == k)]
        for prefix in measure.MATRICES:
            for name in measure.QUANTITIES:
                assert row[prefix + name] == pytest.approx(chosen[prefix + name].mean(), nan_ok=True)
                assert f"{prefix}{name}_low" in row and f"{prefix}{name}_high" in row
        s = np.array([1 - k / R] * k + [k / R] * (R - k))
        closed = {
            "top1_fraction": s.max() ** 2 / (s**2).sum(), "participation_ratio": (s**2).sum() ** 2 / (s**4).sum(),
            "stable_rank": (s**2).sum() / s.max() ** 2, "numerical_rank": R,
            "entropy_rank": np.exp(-(s / s.sum() * np.log(s / s.sum())).sum()),
        }  # fmt: skip
        assert set(closed) == set(measure.OTHERS)
        for name, value in closed.items():
            assert row[f"null_closed_form_{name}"] == pytest.approx(value)
            if row["groups"]:  # rewards of 0 and 1, and weights one factor times the group mean's
                assert row[f"null_orthogonal_{name}"] == pytest.approx(value)
                assert np.isfinite(row[f"null_measured_norms_{name}"]) and np.isfinite(row[f"null_gaussian_{name}"])
    assert set(table.NULLS) < set(table.by_k(sweep).columns)


def test_figures_keep_their_numbers():
    assert "Figure 4" not in page._not_drawn([Plot("fig4", "", "", ())]) and "Figure 5" in page._not_drawn([])
    plots = [Plot(name, "", "", ()) for name in ("fig1", "fig4", "ranks_by_k", "updates")]
    assert page.numbers(plots) == [1, 4, 6, 7]


def test_three_panels_leave_the_fourth_place_empty():
    panel = Panel("title", "alt", lambda ax: ax.plot([0, 1], [0, 1]))
    figure = drawing._canvas([panel] * 3)
    assert [ax.get_visible() for ax in figure.axes] == [True] * 3 + [False]
    plt.close(figure)


def test_windows_of_steps_cover_every_group(full_sweep):
    sweep = load_sweep("full", full_sweep)
    curve = table.by_step(sweep, "all", 8, "effective_rank", 4)
    groups = table.usable_groups(sweep, "all", 8)
    assert len(curve) == 4 and curve["groups"].sum() == len(groups)
    assert np.average(curve["mean"], weights=curve["groups"]) == pytest.approx(groups["effective_rank"].mean())


def test_accuracy_uses_the_recorded_rollouts_and_else_the_configuration(full_sweep):
    sweep = load_sweep("full", full_sweep)
    curve = table.accuracy_by_step(sweep, "all", 4)
    assert list(curve["step"]) == [0, 5, 10] and list(curve["rollouts"]) == [0, 5 * 16, 10 * 16]
    sweep.metrics["rollouts"] *= 3  # a run that draws more than it trains on
    assert list(table.accuracy_by_step(sweep, "all", 4)["rollouts"]) == [0, 5 * 48, 10 * 48]
    sweep.metrics = sweep.metrics.drop(columns="rollouts")
    assert list(table.accuracy_by_step(sweep, "all", 4)["rollouts"]) == [0, 5 * 16, 10 * 16]


def test_figures_are_drawn_with_embedded_fonts_and_distinct_styles(paper_sweep):
    sweep = load_sweep("paper", paper_sweep)
    looks = styles(sweep).values()
    assert len({s.color for s in looks}) == len({str(s.line) for s in looks}) == len({s.marker for s in looks}) == 3
    plot = spectral_plots(sweep, table.by_k(sweep), layer_table(sweep))[3]
    files = render(plot)
    assert set(files) == {"fig4.png", "fig4.pdf", "fig4_1.svg"}
    assert b"/FontFile2" in files["fig4.pdf"] and files["fig4.png"].startswith(b"\x89PNG")
    assert b"/Type /Type3" not in files["fig4.pdf"] and b"/Subtype /Type3" not in files["fig4.pdf"]
    assert render(plot)["fig4_1.svg"] == files["fig4_1.svg"]
