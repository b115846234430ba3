"""Rows of groups and their cache: against the slow way, segment by segment, damaged, foreign, read-only."""

from __future__ import annotations

import dataclasses
import shutil

import numpy as np
import pandas as pd
import pytest

from grpo_sweeps.maths.feasibility import effective_rank_range, effective_rank_ranges
from grpo_sweeps.maths.intervals import Clusters, mean_interval, mean_over
from grpo_sweeps.report import build, remarks
from grpo_sweeps.report.figures.kept import drawn
from grpo_sweeps.report.read import cache, kept
from grpo_sweeps.report.read.query import OF_GROUPS, load_sweep
from grpo_sweeps.report.tables import pooled
from grpo_sweeps.report.tables.estimators import estimator_table
from grpo_sweeps.tracking.local import LocalRecord, read_groups, record_tables
from grpo_sweeps.tracking.status import read_status, write_status
from tests.unit.report.slow_rows import group_rows

TABLES = ("table1.csv", "ranks.csv", "by_k.csv", "claims.csv")


@pytest.fixture
def one(write, tmp_path):
    """One run, compacted into one segment."""
    return write(tmp_path / "runs", "s", 4, 3, steps=12)


def load(run):
    return load_sweep(run.parent.name, run.parent.parent)


def cut_anew(run, at, journal=False):
    """Write the run's groups again, compacted after the steps `at`; `journal`: the rest stays uncompacted."""
    records = read_groups(run)
    for file in (run / "grams").iterdir():
        file.unlink()
    record = LocalRecord(run)
    for r in records:
        record.log_groups([r])
        if r.step in at and r.group == 3:
            record.compact()
    if not journal:
        record.close()


def with_equal_texts(g, pair, noise):
    """The group with the second of two rollouts a copy of the first, its products with others rounded otherwise."""
    i, j = pair
    if g.gram is None:
        return g
    take = np.arange(g.R)
    take[j] = i
    gram = g.gram[np.ix_(take, take)]
    gram[i, j] *= 1 - noise
    gram[j, i] *= 1 - noise
    return dataclasses.replace(g, gram=gram, same_as=tuple(int(t) for t in take))


def test_rows_agree_with_the_slow_way(write, tmp_path):
    def odd(g):
        changes = [{"rows": "loss"}, {"floor": 0.02}, {"rewards": tuple(0.5 * r for r in g.rewards)}, {}]
        g = dataclasses.replace(g, **changes[g.group])
        g = with_equal_texts(g, (0, 1) if g.step % 2 else (0, g.R - 1), 1e-6 * (g.step % 4 == 1)) if g.step % 3 else g
        return dataclasses.replace(g, same_as=(), floor=0.165) if g.step in (4, 6) else g  # as older runs wrote them

    for R in (2, 4, 8):
        write(tmp_path, "s", R, 5, "bounded", steps=8, change=odd)
    sweep = load_sweep("s", tmp_path)
    for run, part in sweep.groups.groupby("run"):
        slow = group_rows(read_groups(sweep.path / run), 5).drop(columns="R")
        fast = part.drop(columns=["run", "arm", "R", "seed", *OF_GROUPS]).reset_index(drop=True)
        pd.testing.assert_frame_equal(fast, slow[list(fast.columns)], check_dtype=False, rtol=1e-9, atol=1e-6)
        assert slow["null_gaussian"].notna().sum() > 10 and 0 < slow["older"].sum() < len(slow)
        assert 0 < (slow["distinct"] < part["R"].iloc[0]).sum() < slow["distinct"].notna().sum()


def test_a_second_reading_takes_every_number_from_the_cache(one, monkeypatch):
    first = load(one)
    kept = list((one / ".cache").iterdir())
    assert [p.name for p in kept] == [next((one / "grams").glob("*.parquet")).stem + cache.SUFFIX]
    monkeypatch.setattr("grpo_sweeps.report.read.cache.table_rows", lambda *_: pytest.fail("measured again"))
    (one / "grams" / "journal.jsonl").unlink(missing_ok=True)
    pd.testing.assert_frame_equal(load(one).groups, first.groups, check_exact=True)


@pytest.mark.parametrize("harm", ["cut", "flip", "foreign", "other seed", "empty"])
def test_a_damaged_or_foreign_cache_is_ignored_with_one_line(one, harm, monkeypatch):
    first = load(one).groups
    (kept,) = (one / ".cache").iterdir()
    data = kept.read_bytes()
    if harm == "foreign":
        monkeypatch.setattr(cache, "code_digest", lambda: "another")
    elif harm == "other seed":
        text = (one / "config.yaml").read_text()
        (one / "config.yaml").write_text(text.replace("seed: 3", "seed: 4"))
    else:
        half = len(data) // 2
        # more than the header of a page, parts of which no checksum covers
        flipped = data[:half] + bytes(byte ^ 255 for byte in data[half : half + 64]) + data[half + 64 :]
        kept.write_bytes({"cut": data[:half], "flip": flipped, "empty": b""}[harm])
    with pytest.warns(UserWarning, match=r"^Cached spectra: .*1 (damaged|made by other code).*\.$") as said:
        again = load(one).groups
    assert len(said) == 1 and "\n" not in str(said[0].message)
    same = [c for c in first if c != "seed" and not c.startswith("null_gaussian")]
    pd.testing.assert_frame_equal(again[same], first[same], check_exact=True)
    assert (harm == "other seed") == (not np.array_equal(again["null_gaussian"], first["null_gaussian"], True))


def test_a_changed_segment_is_measured_again(one):
    load(one)
    (segment,) = (one / "grams").glob("*.parquet")
    with LocalRecord(one) as record:
        record.truncate_after(5)
    assert load(one).groups["step"].max() == 5
    assert not (one / ".cache" / f"{segment.stem}{cache.SUFFIX}").exists()  # of a segment that is gone


def test_a_folder_that_cannot_be_written_to_works_without(one):
    (one / ".cache").write_text("a file where the folder would be")
    with pytest.warns(UserWarning, match="not written, so the next report measures again"):
        assert len(load(one).groups) == 48


def test_a_journal_is_never_cached(one):
    before = load(one).groups
    shutil.rmtree(one / ".cache")
    cut_anew(one, (), journal=True)
    pd.testing.assert_frame_equal(load(one).groups, before, check_exact=True)
    assert not (one / ".cache").exists()


def test_records_are_read_when_asked_for_and_match_their_rows(one):
    sweep = load(one)
    assert len(sweep.records) == 48 == record_tables(one)["grams"]().num_rows
    assert sweep.record(-1).step == 11 and [r.group for r in sweep.records[:4]] == [0, 1, 2, 3]
    with pytest.raises(IndexError, match="there are 48 groups"):
        sweep.record(48)


def test_clusters_numbered_once_give_the_intervals_of_each_column_alone():
    rng = np.random.default_rng(0)
    prompts, seeds = rng.integers(0, 40, 300).astype(str), rng.integers(0, 3, 300)
    by = Clusters(prompts, seeds)
    for missing in (0.0, 0.3, 1.0):
        values = np.where(rng.random(300) < missing, np.nan, rng.standard_normal(300))
        keep = np.isfinite(values)
        alone = mean_interval(values[keep], prompts[keep], seeds[keep])
        np.testing.assert_equal(dataclasses.astuple(mean_over(values, by)), dataclasses.astuple(alone))
    with pytest.raises(ValueError, match="as long as the values"):
        mean_over(np.ones(2), by)


@pytest.mark.parametrize("R", [2, 4, 8])
def test_ranges_of_many_matrices_are_those_of_each(R):
    top1 = np.linspace(1 / R, 1, 57)
    low, high = effective_rank_ranges(top1, R)
    np.testing.assert_allclose(np.stack([low, high], 1), [effective_rank_range(x, R) for x in top1], rtol=1e-14)
    with pytest.raises(ValueError, match="lies between"):
        effective_rank_ranges(np.array([0.01]), R)


@pytest.fixture
def large(one, monkeypatch):
    """The same run, its files of the size from which what is made of them is kept."""
    monkeypatch.setattr(kept, "LARGE", 1)
    return one


def tables_of(run):
    sweep = load(run)
    return sweep, estimator_table(sweep), remarks.missing(sweep)


def test_metrics_estimators_and_the_check_of_a_whole_run_are_kept(large, monkeypatch):
    first, estimators, lacking = tables_of(large)
    kept = {"metrics.parquet", "estimators.parquet", "whole.parquet"}
    assert kept < {path.name for path in (large / ".cache").iterdir()}
    for place in ("tracking.local.metrics_and_faults", "report.read.alternatives._made", "report.remarks.examine"):
        monkeypatch.setattr(f"grpo_sweeps.{place}", lambda *_: pytest.fail("made again"))
    again, estimators_again, lacking_again = tables_of(large)
    pd.testing.assert_frame_equal(again.metrics, first.metrics, check_exact=True)
    pd.testing.assert_frame_equal(estimators_again, estimators, check_exact=True)
    assert lacking_again == lacking


def test_what_is_kept_is_made_again_when_its_files_change(large):
    tables_of(large)
    with LocalRecord(large) as record:
        record.log_metrics(3, {"reward": 77.0})
    (large / "log.txt").write_text("one more line")
    sweep, _, _ = tables_of(large)
    assert sweep.metrics.set_index("step").loc[3, "reward"] == 77.0
    segment = next((large / "grams").glob("*.parquet"))
    data = segment.read_bytes()
    segment.write_bytes(data[:-20])
    assert any("is not whole" in sentence for sentence in remarks.missing(sweep))


def test_metrics_with_a_fault_are_not_kept_so_that_each_report_says_it(large):
    path = large / "metrics.jsonl"
    path.write_bytes(b"\x00\x00" + path.read_bytes())
    for _ in range(2):
        with pytest.warns(UserWarning, match=r"metrics\.jsonl, line 1 is damaged"):
            load(large)
    assert not (large / ".cache" / "metrics.parquet").exists()


def test_a_run_that_is_not_finished_is_looked_at_each_time(large):
    write_status(large, dataclasses.replace(read_status(large), state="running", heartbeat=0.0))
    tables_of(large)
    assert not (large / ".cache" / "whole.parquet").exists()


def test_pictures_are_drawn_anew_only_for_other_records(one, monkeypatch):
    sweep = load(one)
    plots = build.spectral_plots(sweep, pooled.by_k(sweep), pd.DataFrame())
    first = drawn(sweep, plots)
    assert {"fig1.png", "fig1.pdf", "fig1_1.svg"} <= set(first)
    monkeypatch.setattr("grpo_sweeps.report.figures.kept.rendered", lambda _: {"drawn.png": b"again"})
    assert drawn(sweep, plots) == first
    (one / "metrics.jsonl").touch()
    assert drawn(sweep, plots) == {"drawn.png": b"again"}
    (sweep.path / ".cache" / "figures.parquet").write_bytes(b"damaged")
    assert drawn(sweep, plots) == {"drawn.png": b"again"}
