"""What updates do to the weights, in the report: tables against plain sums, figure, C6's words."""

from __future__ import annotations

import math

import numpy as np
import pytest

from grpo_sweeps.publish.drawing import render
from grpo_sweeps.report.claims.verdicts import judge_claims
from grpo_sweeps.report.figures.layers import update_figure
from grpo_sweeps.report.read.query import load_sweep
from grpo_sweeps.report.tables.layers import SHOWN_STEPS, shown_steps, update_parts, update_steps
from grpo_sweeps.tracking.local import LocalRecord
from grpo_sweeps.types import UpdateRecord

SHAPES = {
    "model.embed_tokens.weight": (9, 4), "model.layers.0.self_attn.q_proj.weight": (4, 4),
    "model.layers.0.mlp.up_proj.weight": (6, 4), "model.layers.1.self_attn.q_proj.weight": (4, 4),
    "model.norm.weight": (4,),
}  # fmt: skip
STILL = 9  # a step without a gradient


def changes_of(R: int, seed: int, step: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng([R, seed, step])
    return {name: 0.0 * np.ones(s) if step == STILL else rng.standard_normal(s) for name, s in SHAPES.items()}


def ranks(change: np.ndarray) -> tuple[float, float]:
    if change.ndim != 2 or not change.any():
        return math.nan, math.nan
    s = np.linalg.svd(change, compute_uv=False)
    return float((s**2).sum() / s[0] ** 2), float(s.sum() ** 2 / (s**2).sum())


def hoyer(x: np.ndarray) -> float:
    return float((np.sqrt(x.size) - np.abs(x).sum() / np.linalg.norm(x)) / (np.sqrt(x.size) - 1))


def record_of(step: int, name: str, x: np.ndarray) -> UpdateRecord:
    stable, effective = ranks(x)
    sparsity = hoyer(x) if x.any() else math.nan
    return UpdateRecord(step, name, "", x.shape, float((x**2).sum()), float(np.abs(x).sum()), sparsity,
                        int((x > 0).sum()), int((x != 0).sum()), stable, effective)  # fmt: skip


@pytest.fixture(scope="module")
def runs(write, tmp_path_factory):
    """runs/ with two R and two seeds whose updates were measured at every third step. To be read only."""
    folder = tmp_path_factory.mktemp("updates")
    for R in (2, 4):
        for seed in (0, 1):
            with LocalRecord(write(folder, "moved", R, seed, steps=15)) as record:
                for step in range(0, 15, 3):
                    changes = changes_of(R, seed, step)
                    record.log_updates([record_of(step, name, x) for name, x in changes.items()])
                    norm = float(np.linalg.norm(np.concatenate([x.ravel() for x in changes.values()])))
                    still = {"update/changed_share": float(norm > 0), "update/norm": norm}
                    share = 0.5 - 0.01 * step + 0.002 * (seed - 0.5)
                    moved = {"update/changed_share": share, "update/changed_share_float32": 1.0,
                             "gradient/hoyer": 0.2 + 0.01 * step, "update/hoyer": 0.1,
                             "update/relative_norm": 1e-4}  # fmt: skip
                    record.log_metrics(step, still | (moved if norm > 0 else {}))
    return folder


def test_steps_are_means_over_runs_and_leave_out_those_without_a_gradient(runs):
    table = update_steps(load_sweep("moved", runs))
    assert list(table["step"]) == [0, 3, 6, 12] * 2 and (table["runs"] == 2).all()
    assert table["changed_share"].to_numpy() == pytest.approx(0.5 - 0.01 * table["step"].to_numpy())
    assert table["changed_share_low"].isna().all(), "two runs do not tell how far runs differ"
    header, rows = shown_steps(table)
    assert len(header) == len(rows[0]) == 7 and [r[:2] for r in rows[:2]] == [["2", "0"], ["2", "3"]]
    assert rows[0][-1] == "1.0e-04" and rows[0][3].startswith("1.000") and len(rows) <= 2 * SHOWN_STEPS


def test_every_part_against_plain_sums(runs):
    sweep = load_sweep("moved", runs)
    table = update_parts(sweep)
    kinds = {"model.embed_tokens.weight": "embedding+head", "model.norm.weight": "norms"}
    kind_of = {name: kinds.get(name, "q" if "q_proj" in name else "up") for name in SHAPES}
    outer = {"model.embed_tokens.weight": "embedding+head", "model.norm.weight": "norm"}
    layer_of = {name: outer.get(name, name.split(".")[2]) for name in SHAPES}
    for row in table.to_dict("records"):
        names = [n for n in SHAPES if row["name"] in ("", n) and row["layer"] in ("all", layer_of[n])
                 and row["kind"] in ("all", kind_of[n])]  # fmt: skip
        by_run = []
        for seed in (0, 1):
            values = []
            for step in (0, 3, 6, 12):
                changes = changes_of(row["R"], seed, step)
                part = np.concatenate([changes[n].ravel() for n in names])
                total = sum((x**2).sum() for x in changes.values())
                found = [ranks(changes[n]) for n in names if changes[n].ndim == 2]
                effective = np.mean([f[1] for f in found]) if found else np.nan
                share = np.mean(
                    [ranks(changes[n])[1] / min(SHAPES[n]) for n in names if changes[n].ndim == 2] or np.nan
                )
                values.append(((part**2).sum() / total, effective, share, hoyer(part), (part > 0).mean(), 1.0))
            by_run.append(np.mean(values, axis=0))
        columns = ("energy_share", "effective_rank", "rank_share", "hoyer", "changed_share", "changed_share_float32")
        assert [row[c] for c in columns] == pytest.approx(np.mean(by_run, axis=0), nan_ok=True)
        assert row["steps"] == 4 and row["runs"] == 2
    sums = table.groupby(["R", "level"])["energy_share"].sum()
    assert sums.to_numpy() == pytest.approx(np.ones(8))


def test_the_figure_draws_both_and_says_what_it_shows(runs):
    sweep = load_sweep("moved", runs)
    steps, parts = update_steps(sweep), update_parts(sweep)
    (plot,) = update_figure(sweep, steps, parts)
    assert "R = 2: from 0.5 to 0.38, in float32 from 1 to 1" in plot.panels[0].alt
    deepest = parts[(parts["R"] == 4) & (parts["level"] == "kind")].set_index("kind")["energy_share"]
    assert f"R = 4: most {deepest.max():.3g} ({deepest.idxmax()})" in plot.panels[5].alt
    assert len(render(plot)) == 2 + len(plot.panels)
    assert update_figure(sweep, steps.iloc[:0], parts) == []


def test_without_measured_updates_nothing_is_shown_and_c6_says_so(full_sweep):
    sweep = load_sweep("full", full_sweep)
    assert len(sweep.updates) == len(update_steps(sweep)) == len(update_parts(sweep)) == 0
    (c6,) = [c for c in judge_claims(sweep) if c.id == "C6"]
    assert any("analysis.update_every above 0" in r for r in c6.remarks)


@pytest.mark.parametrize(("every", "counts", "told"), [(10, (1, 1), False), (2, (5, 5), True)])
def test_c6_says_of_how_many_measured_updates_a_third_is_made(write, tmp_path, every, counts, told):
    """Of 30 steps, measured at every tenth, the first third is step 0 alone."""
    for seed in range(3):
        with LocalRecord(write(tmp_path, "rare", 4, seed, steps=30)) as record:
            for step in range(0, 30, every):
                record.log_metrics(step, {"update/norm": 1.0, "gradient/hoyer": 0.2 + 0.01 * step + 0.001 * seed})
    (c6,) = [c for c in judge_claims(load_sweep("rare", tmp_path)) if c.id == "C6"]
    said = c6.findings[0].measured.split("Hoyer sparsity of the gradient")[1]
    assert f"{counts[0]} and {counts[1]} measured steps in the first and the last third" in said
    assert ("change 0." in said) is told and ("fewer than 3: no change is told" in said) is not told


def test_runs_in_which_nothing_ever_moved(write, tmp_path):
    with LocalRecord(write(tmp_path, "still", 2, 0, steps=3)) as record:
        record.log_updates([record_of(STILL, name, x) for name, x in changes_of(2, 0, STILL).items()])
        record.log_metrics(STILL, {"update/norm": 0.0, "update/changed_share": 0.0})
    sweep = load_sweep("still", tmp_path)
    assert len(sweep.updates) == len(SHAPES) and len(update_steps(sweep)) == len(update_parts(sweep)) == 0
