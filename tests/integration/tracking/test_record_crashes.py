"""The local record after its writer died, at every moment it can die at, and while another process writes it."""

from __future__ import annotations

import os
import shutil
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from grpo_sweeps.tracking import journal as journal_module
from grpo_sweeps.tracking.local import LocalRecord, read_completions, read_evals, read_groups, read_metrics
from grpo_sweeps.types import Completion, EvalRecord, GroupRecord

pytestmark = pytest.mark.integration


def group(step: int, prompt: str = "p0", position: int = 0, R: int = 3, measured: bool = True) -> GroupRecord:
    rng = np.random.default_rng([step, position, R])
    factor = rng.standard_normal((R, 5)) * 10.0 ** rng.integers(-12, 12, (R, 1))
    gram = factor @ factor.T
    floats = [tuple(float(x) for x in row) for row in rng.standard_normal((4, R))]
    return GroupRecord(
        step, prompt, R, floats[0], floats[1], floats[2], tuple(range(R)), floats[3], (True,) * R, (False,) * R,
        rows="loss", gram=gram if measured else None, floor=1e-7,
        gram_by={"layer.0": gram / 3, "head": gram / 7} if measured else {}, group=position,
    )  # fmt: skip


def completion(step: int, rollout: int = 0, text: str = "#### 3") -> Completion:
    return Completion(step, "p0", rollout, "2+1?", text, 1.0, 0.5, True, True, 6, False)


def same(a: GroupRecord, b: GroupRecord) -> bool:
    """Equal in every field, Grams bit for bit."""

    def bits(array: Any) -> Any:
        return None if array is None else (array.dtype.str, array.shape, array.tobytes())

    plain = replace(a, gram=None, gram_by={}) == replace(b, gram=None, gram_by={})
    parts = {k: bits(v) for k, v in a.gram_by.items()} == {k: bits(v) for k, v in b.gram_by.items()}
    return plain and parts and bits(a.gram) == bits(b.gram)


def assert_groups(run_dir: Path, expected: list[GroupRecord]) -> None:
    found = read_groups(run_dir)
    assert [(g.step, g.group) for g in found] == [(g.step, g.group) for g in expected]
    assert all(same(a, b) for a, b in zip(found, expected, strict=True))


def torn_copies(run_dir: Path, name: str, into: Path) -> list[Path]:
    """Copies of a record whose file `name` was cut inside its last line, at every third byte and before its last one.

    A cut that takes the newline alone leaves a whole line, which is kept: another test's case.
    """
    data = (run_dir / name).read_bytes()
    whole = data.rstrip(b"\n")
    start = whole.rfind(b"\n") + 1
    copies = []
    for end in [*range(start, len(whole) - 1, 3), len(whole) - 1]:
        copy = into / str(end)
        shutil.copytree(run_dir, copy)
        (copy / name).write_bytes(data[:end])
        copies.append(copy)
    return copies


def test_a_torn_last_line_is_left_out_and_the_next_writer_goes_on(tmp_path: Path) -> None:
    run = tmp_path / "run"
    record = LocalRecord(run)
    for step in range(3):
        record.log_metrics(step, {"reward": float(step)})
        record.log_groups([group(step, R=2)])
    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir()
    copies = torn_copies(run, "metrics.jsonl", tmp_path / "a")
    assert len(copies) > 3
    for copy in copies:
        assert list(read_metrics(copy)["step"]) == [0, 1]
        with LocalRecord(copy) as again:
            again.log_metrics(7, {"reward": 7.0})
        assert list(read_metrics(copy)["step"]) == [0, 1, 7]
    for copy in torn_copies(run, "grams/journal.jsonl", tmp_path / "b"):
        assert_groups(copy, [group(s, R=2) for s in (0, 1)])
        with LocalRecord(copy) as again:
            again.log_groups([group(7, R=2)])
        assert_groups(copy, [group(s, R=2) for s in (0, 1, 7)])
    record.close()


def test_a_whole_last_line_without_its_newline_is_kept(tmp_path: Path) -> None:
    with LocalRecord(tmp_path) as record:
        record.log_metrics(0, {"reward": 1.0})
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes().rstrip(b"\n"))
    assert list(read_metrics(tmp_path)["step"]) == [0]
    with LocalRecord(tmp_path) as record:
        record.log_metrics(1, {"reward": 2.0})
    assert list(read_metrics(tmp_path)["reward"]) == [1.0, 2.0]


def test_a_damaged_line_elsewhere_is_named(tmp_path: Path) -> None:
    with LocalRecord(tmp_path) as record:
        record.log_metrics(0, {"reward": 1.0})
        record.log_metrics(1, {"reward": 2.0})
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"\x00\x00" + path.read_bytes())
    with pytest.warns(UserWarning, match=r"metrics\.jsonl, line 1 is damaged"):
        assert list(read_metrics(tmp_path)["step"]) == [1]


class Killed(BaseException):
    """Stands for SIGKILL at a chosen moment."""


def kill_at(monkeypatch: pytest.MonkeyPatch, moment: int) -> None:
    """Die just before the moment-th operation that changes files for good."""
    count = 0

    def dying(function: Any) -> Any:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            if count == moment:
                raise Killed
            return function(*args, **kwargs)

        return wrapper

    monkeypatch.setattr(os, "replace", dying(os.replace))
    monkeypatch.setattr(Path, "unlink", dying(Path.unlink))
    monkeypatch.setattr(journal_module.LineFile, "clear", dying(journal_module.LineFile.clear))


@pytest.mark.parametrize("moment", range(1, 7))
def test_killed_anywhere_in_a_compaction_nothing_is_lost_or_doubled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: int
) -> None:
    expected = [group(s, R=2) for s in range(6)]
    record = LocalRecord(tmp_path)
    for start in (0, 2):
        record.log_groups(expected[start : start + 2])
        record.compact()
    record.log_groups(expected[4:])
    with monkeypatch.context() as patch:
        kill_at(patch, moment)
        try:
            record.compact(merge=True)
            killed = False
        except Killed:
            killed = True
    assert killed == (moment <= 6)  # segment, clear, merged segment, three parts go
    assert_groups(tmp_path, expected)
    with LocalRecord(tmp_path) as again:  # the next process goes on, compacts and merges
        again.log_groups([group(6, R=2)])
    assert_groups(tmp_path, [*expected, group(6, R=2)])
    assert len(list((tmp_path / "grams").glob("*.parquet"))) == 1


@pytest.mark.parametrize("moment", range(1, 6))
def test_truncation_may_be_killed_and_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: int) -> None:
    record = LocalRecord(tmp_path)
    for start in range(0, 6, 3):
        for step in range(start, start + 3):
            record.log_metrics(step, {"reward": float(step)})
            record.log_groups([group(step, R=2)])
        record.compact()
    record.log_metrics(6, {"reward": 6.0})
    record.log_groups([group(6, R=2)])
    with monkeypatch.context() as patch:
        kill_at(patch, moment)
        with pytest.raises(Killed):
            record.truncate_after(1)
    with LocalRecord(tmp_path) as again:
        again.truncate_after(1)
        again.log_metrics(2, {"reward": -1.0})
        again.log_groups([group(2, "other", R=2)])
    assert list(read_metrics(tmp_path)["reward"]) == [0.0, 1.0, -1.0]
    assert_groups(tmp_path, [group(0, R=2), group(1, R=2), group(2, "other", R=2)])


def test_truncation_keeps_bytes_and_drops_everything_later(tmp_path: Path) -> None:
    record = LocalRecord(tmp_path)
    for step in range(4):
        record.log_metrics(step, {"reward": 0.1 * step})
        record.log_completions([completion(step)])
        record.log_evals([EvalRecord(step, "q", 4, 2, 3, True, False)])
        if step == 1:
            record.compact()
            kept = (tmp_path / "metrics.jsonl").read_bytes()
    record.truncate_after(1)
    assert (tmp_path / "metrics.jsonl").read_bytes() == kept
    assert [c.step for c in read_completions(tmp_path)] == [e.step for e in read_evals(tmp_path)] == [0, 1]
    record.truncate_after(-1)
    assert read_metrics(tmp_path).empty and read_completions(tmp_path) == []
    record.close()


def test_many_segments_are_merged_without_being_asked(tmp_path: Path) -> None:
    record = LocalRecord(tmp_path)
    most = 0
    for step in range(2 * journal_module.MERGE_AT):
        record.log_groups([group(step, R=2)])
        record.compact()
        most = max(most, len(list((tmp_path / "grams").glob("*.parquet"))))
    assert most < journal_module.MERGE_AT
    assert_groups(tmp_path, [group(s, R=2) for s in range(2 * journal_module.MERGE_AT)])
    record.close()


def test_a_reader_beside_a_writer_always_sees_a_whole_prefix(tmp_path: Path) -> None:
    """Every read during writing, compacting and merging gives the groups 0..n, each once, and n never falls."""
    done = threading.Event()

    def write() -> None:
        with LocalRecord(tmp_path) as record:
            for step in range(60):
                record.log_groups([group(step, R=2)])
                record.compact(merge=step % 5 == 4)
        done.set()

    writer = threading.Thread(target=write)
    writer.start()
    seen = [0]
    while not done.is_set():
        steps = [g.step for g in read_groups(tmp_path)]
        assert steps == list(range(len(steps)))
        seen.append(len(steps))
    writer.join()
    assert seen == sorted(seen) and len(read_groups(tmp_path)) == 60
