"""What older runs logged of their spectra is brought to their recorded Grams: append only, once, marked."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from grpo_sweeps.sweep.overview import collect
from grpo_sweeps.tracking import recompute
from grpo_sweeps.tracking.journal import read_lines
from grpo_sweeps.tracking.lines import METRICS, RECOMPUTED
from grpo_sweeps.tracking.local import LocalRecord, read_groups, read_metrics
from grpo_sweeps.tracking.locks import only_writer
from grpo_sweeps.tracking.recompute import correct_sweep
from grpo_sweeps.tracking.status import RunStatus, read_status, write_status
from tests.older_runs import LAST, STEPS, contents, groups_of, logged_values, older_run, right_values

SENTENCE = (
    f"spectral values of {len(STEPS)} steps were recomputed from the recorded Grams: the logged ones had been cut at a "
    "precision floor"
)


def sweep_of(run: Path) -> tuple[list[str], list[str]]:
    return correct_sweep(run.parent, only_writer)


def lines_of(run: Path) -> list[dict[str, Any]]:
    return read_lines(run / METRICS)


def assert_right(run: Path, steps: list[int] = STEPS) -> None:
    metrics = read_metrics(run).set_index("step")
    for step in steps:
        right = right_values(step)
        assert metrics.loc[step, list(right)].to_dict() == pytest.approx(right, rel=1e-12)
        assert metrics.loc[step, RECOMPUTED] == 1
    assert len(lines_of(run)) == 2 * len(STEPS) + 1 + len(steps)


@pytest.mark.parametrize("form", ["parquet", "journal"])
def test_further_lines_hold_the_values_of_the_grams(tmp_path: Path, form: str) -> None:
    run = older_run(tmp_path / "study" / "0", form)
    before, shown = (run / METRICS).read_bytes(), read_metrics(run).set_index("step")
    assert (
        1.4 < shown.loc[STEPS[0], "spectral/effective_rank"] < 2.5 < right_values(STEPS[0])["spectral/effective_rank"]
    )
    assert sweep_of(run) == ([f"{run}: {SENTENCE}."], [])
    assert (run / METRICS).read_bytes().startswith(before)
    assert_right(run)
    added = lines_of(run)[2 * len(STEPS) + 1 :]
    assert [line["step"] for line in added] == STEPS
    assert added[0].keys() == {"step", "time", RECOMPUTED, *right_values(STEPS[0])}
    after = read_metrics(run).set_index("step")
    rest = [name for name in shown if not name.startswith(("spectral/", "scores/"))]
    assert after[rest].equals(shown[rest])  # the times too
    assert after.loc[LAST, ["spectral/groups", "scores/groups"]].tolist() == [0, 0]
    assert read_status(run).notes == ["a note of its own", SENTENCE]


def test_a_second_pass_changes_nothing(tmp_path: Path) -> None:
    run = older_run(tmp_path / "study" / "0")
    sweep_of(run)
    before = contents(run)
    assert sweep_of(run) == ([], [])
    assert contents(run) == before


def test_a_line_recomputed_elsewhere_is_not_recomputed_for_its_rounding(tmp_path: Path) -> None:
    run = older_run(tmp_path / "study" / "0")
    sweep_of(run)
    with open(run / METRICS, "a") as file:
        last = lines_of(run)[-1]
        file.write(json.dumps(last | {"spectral/effective_rank": last["spectral/effective_rank"] * (1 + 1e-8)}) + "\n")
    assert sweep_of(run) == ([], [])


@pytest.mark.parametrize("factor", [1 + 1e-10, 1 + 1e-7])
def test_steps_whose_values_are_those_of_their_grams_get_no_line(tmp_path: Path, factor: float) -> None:
    """Beyond 1e-9 a value differs."""
    run = older_run(tmp_path / "study" / "0")
    right = right_values(STEPS[1])
    with open(run / METRICS, "a") as file:
        values = right | {"spectral/stable_rank": right["spectral/stable_rank"] * factor}
        file.write(json.dumps({"step": STEPS[1], "time": 5.0, **values}) + "\n")
    sweep_of(run)
    marked = [line["step"] for line in lines_of(run) if RECOMPUTED in line]
    assert marked == [s for s in STEPS if s != STEPS[1] or factor > 1 + 1e-9]


def test_scores_are_added_only_where_they_were_logged(tmp_path: Path) -> None:
    run = older_run(tmp_path / "study" / "0")
    kept = [{k: v for k, v in line.items() if not k.startswith("scores/")} for line in lines_of(run)]
    (run / METRICS).write_text("".join(json.dumps(line) + "\n" for line in kept))
    assert len(sweep_of(run)[0]) == 1
    assert not [name for line in lines_of(run) for name in line if name.startswith("scores/")]


def test_a_run_of_todays_version_is_untouched(tmp_path: Path) -> None:
    """Whatever it logged: a run that says which rollouts have the same tokens is its own business."""
    run = tmp_path / "study" / "0"
    with LocalRecord(run) as local:
        for step in STEPS:
            local.log_metrics(step, logged_values(step))
            local.log_groups([replace(g, same_as=tuple(range(g.R))) for g in groups_of(step)])
    write_status(run, RunStatus("finished", "0", "R=8", "study"))
    before = {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in run.rglob("*") if p.is_file()}
    assert sweep_of(run) == ([], [])
    assert {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in run.rglob("*") if p.is_file()} == before


def test_steps_of_todays_version_in_an_older_run_are_left(tmp_path: Path) -> None:
    run = older_run(tmp_path / "study" / "0")
    with LocalRecord(run) as local:
        local.log_metrics(9, logged_values(STEPS[0]))
        local.log_groups([replace(g, step=9, same_as=tuple(range(g.R))) for g in groups_of(STEPS[0])])
    sweep_of(run)
    assert [line["step"] for line in lines_of(run) if RECOMPUTED in line] == STEPS
    assert len([g for g in read_groups(run) if g.same_as]) == len(groups_of(STEPS[0]))


@pytest.mark.parametrize("state", ["running", "queued"])
def test_a_run_that_has_not_ended_is_untouched(tmp_path: Path, state: str) -> None:
    run = older_run(tmp_path / "study" / "0", "journal", state, ended=None)
    before = contents(run)
    assert sweep_of(run) == ([], [])
    assert contents(run) == before


def test_a_run_that_died_without_a_word_has_ended(tmp_path: Path) -> None:
    run = older_run(tmp_path / "study" / "0", "journal", "running", heartbeat=time.time() - 1e4, ended=None)
    assert len(sweep_of(run)[0]) == 1
    assert_right(run)
    assert read_status(run).state == "running"


def test_a_run_that_another_process_holds_is_untouched_and_named(tmp_path: Path) -> None:
    run = older_run(tmp_path / "study" / "0")
    before = contents(run)
    with only_writer(run) as mine:
        assert mine is not None
        said, problems = sweep_of(run)
    assert said == [] and contents(run) == before
    assert problems == [f"{run}: its logged spectra are not corrected: another process is writing its record."]


def test_a_run_that_goes_on_while_it_is_read_is_untouched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = older_run(tmp_path / "study" / "0")
    original = recompute.corrections

    def slow(folder: Path) -> Any:
        found = original(folder)
        write_status(folder, replace(read_status(folder), state="running", heartbeat=time.time()))
        return found

    monkeypatch.setattr(recompute, "corrections", slow)
    before = (run / METRICS).read_bytes()
    assert len(sweep_of(run)[1]) == 1 and (run / METRICS).read_bytes() == before


class Killed(BaseException):
    """Stands for SIGKILL."""


def test_killed_before_the_note_the_next_pass_writes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = older_run(tmp_path / "study" / "0")

    def dying(*_: Any) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(recompute, "write_status", dying)
        with pytest.raises(Killed):
            sweep_of(run)
    lines = (run / METRICS).read_bytes()
    assert read_status(run).notes == ["a note of its own"]
    assert sweep_of(run) == ([], [])
    assert (run / METRICS).read_bytes() == lines and read_status(run).notes == ["a note of its own", SENTENCE]


def test_killed_in_the_middle_of_the_lines_the_next_pass_completes_them(tmp_path: Path) -> None:
    run = older_run(tmp_path / "study" / "0")
    sweep_of(run)
    whole, data = lines_of(run), (run / METRICS).read_bytes()
    write_status(run, replace(read_status(run), notes=["a note of its own"]))
    (run / METRICS).write_bytes(data[: data.rstrip().rfind(b"\n") + 40])
    assert len(sweep_of(run)[0]) == 1
    assert lines_of(run) == whole and read_status(run).notes == ["a note of its own", SENTENCE]


def test_steps_whose_groups_cannot_be_read_are_left_and_named(tmp_path: Path) -> None:
    run = older_run(tmp_path / "study" / "0", "journal")
    journal = run / "grams" / "journal.jsonl"
    lines = journal.read_bytes().split(b"\n")
    journal.write_bytes(b"\n".join([b"{" + lines[0], *lines[1:]]))  # a group of the first step
    with pytest.warns(UserWarning, match="is damaged and is left out"):
        said, problems = sweep_of(run)
    left = (
        f"spectral values of step {STEPS[0]} stay as they were logged, perhaps cut at a precision floor: not all of "
        "their groups can be read"
    )
    assert len(said) == 1 and problems == [f"{run}: {left}."]
    assert_right(run, STEPS[1:])
    logged = read_metrics(run).set_index("step").loc[STEPS[0], "spectral/effective_rank"]
    assert logged == logged_values(STEPS[0])["spectral/effective_rank"]
    assert read_status(run).notes[-1] == left and len(read_status(run).notes) == 3


def test_a_damaged_segment_stops_no_other_step_and_no_other_run(tmp_path: Path) -> None:
    run, other = older_run(tmp_path / "study" / "0", "journal"), older_run(tmp_path / "study" / "1")
    (run / "grams" / "segment-00000_steps-0000000-0000000.parquet").write_bytes(b"PAR1")
    (tmp_path / "study" / "2").mkdir()
    (tmp_path / "study" / "2" / "status.json").write_text("{")
    said, problems = sweep_of(run)
    assert len(said) == 2 and len(problems) == 2
    assert "segment-00000" in problems[0] and "2/status.json cannot be read" in problems[1]
    assert_right(run), assert_right(other)


def test_one_run_alone(tmp_path: Path) -> None:
    run, other = older_run(tmp_path / "study" / "0"), older_run(tmp_path / "study" / "1")
    before = contents(other)
    correct_sweep(run.parent, only_writer, "0")
    assert_right(run)
    assert contents(other) == before


def test_status_shows_the_corrected_value_of_the_last_step(tmp_path: Path) -> None:
    run = older_run(tmp_path / "study" / "0")
    sweep_of(run)
    (row,) = collect(tmp_path, "study")
    assert row.effective_rank == pytest.approx(right_values(STEPS[-1])["spectral/effective_rank"], rel=1e-12)
    assert row.reward == 0.0 and row.pace_s == 2.0


def test_status_shows_the_last_step_behind_many_lines_of_correction(tmp_path: Path) -> None:
    run = tmp_path / "study" / "0"
    run.mkdir(parents=True)
    write_status(run, RunStatus("finished", "0", "R=8", "study"))
    step = {"spectral/effective_rank": 1.5, "step_time": 2.0, "filler": "NaN"}
    lines = [{"step": s, "time": float(s), "reward": s / 1000, **step} for s in range(1000)]
    again = [{"step": s, "time": float(s), "spectral/effective_rank": 6.0 + s, RECOMPUTED: 1} for s in range(900)]
    again += [{"step": 998, "time": 998.0, "spectral/effective_rank": 7.25, RECOMPUTED: 1}] * 2000
    (run / METRICS).write_text("".join(json.dumps(line) + "\n" for line in lines[:-1] + again))
    (row,) = collect(tmp_path, "study")
    assert (row.reward, row.effective_rank) == (0.998, 7.25)
