"""The local record: what is written comes back, whatever moment the writer dies at."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, fields, make_dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_sweeps.tracking import journal as journal_module
from grpo_sweeps.tracking.journal import Columns
from grpo_sweeps.tracking.local import (
    LocalRecord,
    completions_frame,
    evals_frame,
    groups_frame,
    read_completions,
    read_evals,
    read_groups,
    read_metrics,
)
from grpo_sweeps.types import Completion, EvalRecord, GroupRecord


def group(step: int, prompt: str = "p0", position: int = 0, R: int = 3, measured: bool = True) -> GroupRecord:
    rng = np.random.default_rng([step, position, R])
    factor = rng.standard_normal((R, 5)) * 10.0 ** rng.integers(-12, 12, (R, 1))
    gram = factor @ factor.T
    floats = [tuple(float(x) for x in row) for row in rng.standard_normal((4, R))]
    return GroupRecord(
        step, prompt, R, floats[0], floats[1], floats[2], tuple(range(R)), floats[3], (True,) * R, (False,) * R,
        rows="loss", gram=gram if measured else None, floor=1e-7,
        gram_by={"layer.0": gram / 3, "head": gram / 7} if measured else {}, group=position,
        same_as=(0, 0, *range(2, R)) if position else (),
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


def test_groups_come_back_bit_for_bit_from_journal_segments_and_both(tmp_path: Path) -> None:
    expected = [group(s, f"p{i}", i, R=2 + s % 3, measured=(s + i) % 3 > 0) for s in range(6) for i in range(3)]
    record = LocalRecord(tmp_path)
    record.log_groups(expected[:6])
    assert_groups(tmp_path, expected[:6])
    record.compact()
    assert not (tmp_path / "grams" / "journal.jsonl").read_bytes()
    assert_groups(tmp_path, expected[:6])
    record.log_groups(expected[6:])
    assert_groups(tmp_path, expected)
    record.compact()
    names = sorted(p.name for p in (tmp_path / "grams").glob("*.parquet"))
    assert names == ["segment-00000_steps-0000000-0000001.parquet", "segment-00001_steps-0000002-0000005.parquet"]
    record.close()
    assert len(list((tmp_path / "grams").glob("*.parquet"))) == 1
    assert_groups(tmp_path, expected)


@given(st.lists(st.floats(width=64), min_size=4, max_size=4), st.booleans())
@settings(max_examples=60, deadline=None)
def test_every_float64_survives(values: list[float], compacted: bool) -> None:
    import tempfile

    gram = np.array(values).reshape(2, 2)
    sent = replace(group(0, R=2), gram=gram, rewards=tuple(values[:2]), floor=values[2], gram_by={})
    with tempfile.TemporaryDirectory() as folder:
        record = LocalRecord(folder)
        record.log_groups([sent])
        if compacted:
            record.compact()
        (found,) = read_groups(folder)
        record.close()
    assert found.gram is not None and found.gram.tobytes() == gram.tobytes()
    np.testing.assert_array_equal(found.rewards, sent.rewards)  # NaN equals NaN here
    np.testing.assert_array_equal(found.floor, sent.floor)


def test_gram_in_parquet_is_a_list_of_float64(tmp_path: Path) -> None:
    with LocalRecord(tmp_path) as record:
        record.log_groups([group(0)])
    (path,) = (tmp_path / "grams").glob("*.parquet")
    assert str(pq.read_schema(path).field("gram").type) == "list<element: double>"


def test_metrics_merge_lines_of_a_step_and_keep_the_last_value(tmp_path: Path) -> None:
    with LocalRecord(tmp_path) as record:
        record.log_metrics(0, {"eval/accuracy": 0.25})
        record.log_metrics(0, {"reward": np.float32(0.5), "groups": np.int64(3), "flag": True})
        record.log_metrics(2, {"reward": math.nan, "loss": -math.inf, "big": math.inf})
        record.log_metrics(1, {"reward": 0.1})
        record.log_metrics(1, {"reward": 0.1 + 0.2})
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == 5 and '"NaN"' in lines[2] and '"-Infinity"' in lines[2]
    frame = read_metrics(tmp_path)
    assert list(frame["step"]) == [0, 1, 2]
    assert frame["reward"].tolist()[:2] == [0.5, 0.1 + 0.2] and math.isnan(frame["reward"][2])
    assert frame["eval/accuracy"][0] == 0.25 and math.isnan(frame["eval/accuracy"][1])
    assert frame["loss"][2] == -math.inf and frame["big"][2] == math.inf
    assert frame["groups"][0] == 3.0 and frame["flag"][0] == 1.0


@pytest.mark.parametrize("value", ["0.5", None, [1.0], object()])
def test_a_metric_that_is_no_number_is_refused(tmp_path: Path, value: object) -> None:
    with LocalRecord(tmp_path) as record, pytest.raises(TypeError, match="reward"):
        record.log_metrics(0, {"reward": value})
    assert read_metrics(tmp_path).empty


def test_an_empty_folder_reads_as_nothing(tmp_path: Path) -> None:
    assert read_groups(tmp_path) == [] and read_completions(tmp_path) == [] and read_evals(tmp_path) == []
    assert list(read_metrics(tmp_path).columns) == ["step", "time"]
    assert len(groups_frame(tmp_path)) == 0 and "gram" in groups_frame(tmp_path)
    assert not list(tmp_path.iterdir())


def test_frames_hold_what_the_records_hold(tmp_path: Path) -> None:
    groups = [group(s, R=2, measured=s != 1) for s in range(3)]
    with LocalRecord(tmp_path) as record:
        record.log_groups(groups)
        record.log_completions([completion(0, i, text=f"=cmd|'\n\x00{i} é") for i in range(2)])
        record.log_evals([EvalRecord(0, "q1", 4, 2, 3, True, False, 0.5, 1.0)])
    frame = groups_frame(tmp_path)
    assert frame["gram"][0].tobytes() == groups[0].gram.tobytes() and frame["gram"][1] is None  # type: ignore[union-attr]
    assert frame["rewards"][2] == groups[2].rewards and list(frame["R"]) == [2, 2, 2]
    assert list(completions_frame(tmp_path)["text"]) == [c.text for c in read_completions(tmp_path)]
    assert read_completions(tmp_path)[1].text == "=cmd|'\n\x001 é"
    assert read_evals(tmp_path) == [EvalRecord(0, "q1", 4, 2, 3, True, False, 0.5, 1.0)] and evals_frame(
        tmp_path
    ).shape == (1, 9)


def test_the_same_prompt_twice_in_a_step_stays_two_groups(tmp_path: Path) -> None:
    with LocalRecord(tmp_path) as record:
        record.log_groups([group(0, "p", 0), group(0, "p", 1)])
        record.log_completions([replace(completion(0), group=g) for g in (0, 1)])
    assert [g.group for g in read_groups(tmp_path)] == [0, 1]
    assert [c.group for c in read_completions(tmp_path)] == [0, 1]


@pytest.mark.parametrize(
    "change", [{"gram": np.zeros((2, 2))}, {"weights": (1.0,)}, {"gram_by": {"x": np.zeros((3, 2))}}]
)
def test_a_group_whose_shapes_disagree_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    with LocalRecord(tmp_path) as record, pytest.raises(ValueError, match="R=3"):
        record.log_groups([replace(group(0), **change)])
    assert read_groups(tmp_path) == []


@dataclass(frozen=True)
class OldRecord:
    step: int
    name: str


@dataclass(frozen=True)
class NewRecord:
    step: int
    name: str
    extra: float = 1.5
    more: tuple[int, ...] = ()


def test_records_written_before_a_field_was_added_are_read_with_its_default(tmp_path: Path) -> None:
    old = journal_module.Journal(tmp_path, OldRecord, ("step",), ("step",))
    old.append([OldRecord(0, "a")])
    old.compact()
    old.append([OldRecord(1, "b")])
    old.close()
    new = journal_module.Journal(tmp_path, NewRecord, ("step",), ("step",))
    assert new.read() == [NewRecord(0, "a"), NewRecord(1, "b")]
    new.compact(merge=True)
    assert new.read() == [NewRecord(0, "a"), NewRecord(1, "b")]
    new.close()


def test_groups_written_before_same_as_are_read_without_it(tmp_path: Path) -> None:
    """A segment and a journal as an older version wrote them, and a later group behind them."""
    expected = [group(0), group(1), group(2, position=1)]
    names = [f.name for f in fields(GroupRecord) if f.name != "same_as"]
    Older = make_dataclass("GroupRecord", [(f.name, f.type, f) for f in fields(GroupRecord) if f.name in names])
    old = journal_module.Journal(tmp_path / "grams", Older, ("step", "prompt_id", "group"), ("step", "group"))
    old.append([Older(**{name: getattr(expected[0], name) for name in names})])
    old.compact()
    old.append([Older(**{name: getattr(expected[1], name) for name in names})])
    old.close()
    assert "same_as" not in pq.read_schema(next((tmp_path / "grams").glob("*.parquet"))).names
    with LocalRecord(tmp_path) as record:
        record.log_groups(expected[2:])
    assert_groups(tmp_path, expected)


def test_evaluations_written_before_rewards_are_read_as_they_were(tmp_path: Path) -> None:
    expected = [EvalRecord(step, "q1", 4, 2, 3, True, False) for step in range(3)]
    names = [f.name for f in fields(EvalRecord) if "reward" not in f.name]
    Older = make_dataclass("EvalRecord", [(f.name, f.type, f) for f in fields(EvalRecord) if f.name in names])
    old = journal_module.Journal(tmp_path / "evals", Older, ("step", "problem_id"), ("step",))
    for written in expected[:2]:  # one in a segment, one in the journal
        old.append([Older(**{name: getattr(written, name) for name in names})])
        if written.step == 0:
            old.compact()
    old.close()
    with LocalRecord(tmp_path) as record:
        record.log_evals([replace(expected[2], reward=0.5, greedy_reward=1.0)])
    found = read_evals(tmp_path)
    assert [[getattr(one, name) for name in names] for one in found] == [
        [getattr(one, name) for name in names] for one in expected
    ]
    assert [np.isnan([one.reward, one.greedy_reward]).all() for one in found] == [True, True, False]


@pytest.mark.parametrize("same_as", [(0, 1), (0, 0, 1), (0, 2, 2), (-1, 1, 2), (1, 1, 2)])
def test_positions_that_name_no_first_rollout_are_refused(tmp_path: Path, same_as: tuple[int, ...]) -> None:
    with LocalRecord(tmp_path) as record, pytest.raises(ValueError, match=r"same_as is .* allowed are R=3 positions"):
        record.log_groups([replace(group(0), same_as=same_as)])


def test_a_field_without_a_stored_form_is_refused_at_once() -> None:
    @dataclass(frozen=True)
    class Strange:
        step: int
        thing: complex

    with pytest.raises(TypeError, match="thing: complex"):
        Columns(Strange)


def test_journal_lines_are_strict_json(tmp_path: Path) -> None:
    record = LocalRecord(tmp_path)
    record.log_groups([replace(group(0, R=2), rewards=(math.nan, math.inf))])

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    for line in (tmp_path / "grams" / "journal.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=refuse)
    record.close()
