"""The nulls of a group: rows of the loss have their own norms, equal rows are one."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from scipy.stats import t as student_t

from grpo_sweeps.publish import drawing
from grpo_sweeps.report import page
from grpo_sweeps.report.build import spectral_plots
from grpo_sweeps.report.claims.verdicts import judge_claims
from grpo_sweeps.report.measure.spectral import BELOW
from grpo_sweeps.report.read.query import load_sweep
from grpo_sweeps.report.tables.layers import layer_table
from grpo_sweeps.report.tables.pooled import by_k, headline, pooled_difference, table1, usable_groups
from grpo_sweeps.spectra.records import spectral_metrics
from grpo_sweeps.types import GroupRecord


def orthogonal(record: GroupRecord, rows: str, norms: np.ndarray, same: list[int] | None = None) -> GroupRecord:
    """Rows of these norms, orthogonal but where texts are the same; the weights say nothing of rows of the loss."""
    same = list(range(record.R)) if same is None else same
    gram = np.outer(norms, norms) * (np.array(same)[:, None] == np.array(same))
    return dataclasses.replace(record, rows=rows, gram=gram if record.mixed else None, same_as=tuple(same))


def sweep_with(write, tmp_path, rows, same=None, R=4, **changes):
    rng = np.random.default_rng(0)

    def change(record):
        norms = rng.uniform(0.2, 2.0, record.R)
        return dataclasses.replace(orthogonal(record, rows, norms if same is None else norms[same], same), **changes)

    write(tmp_path, "s", R, 0, change=change, evaluate=False)
    return load_sweep("s", tmp_path)


def test_orthogonal_rows_of_the_loss_are_their_own_null(write, tmp_path):
    """Credit by token: a row's norm is that of sum_t c_t grad log pi, which the rollout's mean weight does not give."""
    sweep = sweep_with(write, tmp_path, "loss")
    groups = usable_groups(sweep, "all", 4)
    assert len(groups) > 30 and np.ptp(groups["effective_rank"]) > 0.3
    for null in ("null_effective_rank", "null_measured_norms", "null_both"):
        assert groups[null].to_numpy(float) == pytest.approx(groups["effective_rank"].to_numpy(float), rel=1e-9)
    assert groups["null_orthogonal_stable_rank"].to_numpy(float) == pytest.approx(groups["stable_rank"].to_numpy(float))
    row = table1(sweep).iloc[0]
    assert row["measured_minus_null"] == pytest.approx(0, abs=1e-9)
    assert row["null_both"] == pytest.approx(row["effective_rank"])


def test_the_logged_null_of_rows_of_the_loss_is_that_of_their_norms(write, tmp_path):
    sweep = sweep_with(write, tmp_path, "loss")
    groups = usable_groups(sweep, "all", 4)
    logged = spectral_metrics([sweep.record(i) for i in groups.index])
    assert logged["spectral/null_effective_rank"] == pytest.approx(groups["effective_rank"].astype(float).mean())


@pytest.mark.parametrize("rows", ["scores", "loss"])
def test_with_measured_norms_and_equal_texts_once_orthogonal_texts_are_their_own_null(write, tmp_path, rows):
    changes = {"weights": (0.1, 0.1, -0.1, -0.1)} if rows == "loss" else {}
    sweep = sweep_with(write, tmp_path, rows, [0, 0, 2, 3], **changes)
    groups = usable_groups(sweep, "all", 4)
    assert groups["null_both"].to_numpy(float) == pytest.approx(groups["effective_rank"].to_numpy(float), rel=1e-9)
    assert (groups["null_measured_norms"] > groups["null_both"] + 0.01).all()
    row = table1(sweep).iloc[0]
    ends = [row[f"measured_minus_null_both{end}"] for end in ("", "_low", "_high")]
    assert ends == pytest.approx([0, 0, 0], abs=1e-9)
    table = by_k(sweep)
    assert table["null_both"].notna().any() and "null_both_stable_rank" in table


def test_the_strongest_null_stands_beside_the_others_wherever_people_read_them(write, tmp_path):
    sweep = sweep_with(write, tmp_path, "scores", [0, 0, 2, 3])
    frame, k_frame = table1(sweep), by_k(sweep)
    header, (row,) = headline(frame)
    shown = dict(zip(header[3:6], row[3:6], strict=True))
    assert list(shown) == ["orthogonal null", "null, equal texts once", "null, norms and texts"]
    expected = (frame.at[0, name] for name in ("null_effective_rank", "null_distinct", "null_both"))
    assert list(shown.values()) == [f"{value:.2f}" for value in expected]
    header, rows = page._by_k(k_frame)
    assert {"null 4k(R−k)/R", "null: equal texts once", "null: norms and texts"} < set(header)
    assert rows[0][header.index("null: norms and texts")] == f"{k_frame.at[0, 'null_both']:.2f}"
    (plot,) = [plot for plot in spectral_plots(sweep, k_frame, layer_table(sweep)) if plot.name == "fig4"]
    svg = drawing.render(plot)["fig4_1.svg"].decode()
    assert "plus signs: with the measured norms as well" in plot.caption and svg.count("<path") > 20
    c8 = {claim.id: claim for claim in judge_claims(sweep)}["C8"].findings[0]
    assert f"these and equal texts once {frame.at[0, 'null_both']:.2f}" in c8.null and BELOW in c8.null


def test_equal_texts_of_different_weight_are_different_rows_of_the_loss(write, tmp_path):
    sweep = sweep_with(write, tmp_path, "loss", [0, 0, 2, 3], weights=(0.1, 0.2, -0.1, -0.2))
    groups = usable_groups(sweep, "all", 4)
    assert groups["null_both"].to_numpy(float) == pytest.approx(groups["null_measured_norms"].to_numpy(float))


def test_what_is_beyond_norms_and_equal_texts_has_an_interval_of_its_own(write, tmp_path):
    """By the textbook's formula, over prompts of one group each; and C8 prints it beside the null."""
    write(tmp_path, "s", 4, 0, "paper", steps=40, evaluate=False)
    sweep = load_sweep("s", tmp_path)
    groups = usable_groups(sweep, "all", 4).groupby("prompt_id").head(1)
    beyond = (groups["effective_rank"] - groups["null_both"]).to_numpy(float)
    found = pooled_difference(groups, null="null_both")
    assert (beyond < 1e-9).all()
    half = student_t.ppf(0.975, len(beyond) - 1) * beyond.std(ddof=1) / len(beyond) ** 0.5
    assert [found.mean, found.low, found.high] == pytest.approx(
        [beyond.mean(), beyond.mean() - half, min(0, beyond.mean() + half)]
    )
    (c8,) = (claim for claim in judge_claims(sweep) if claim.id == "C8")
    (finding,) = c8.findings
    whole = table1(sweep).iloc[0]
    assert f", measured less it {whole['measured_minus_null_both']:.3f} [" in finding.null
