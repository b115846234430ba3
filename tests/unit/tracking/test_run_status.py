"""status.json: written whole, read tolerantly, and a dead run is known for one."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from pathlib import Path

import pytest

from grpo_sweeps import files
from grpo_sweeps.tracking.status import (
    STALE_AFTER,
    RecordError,
    RunStatus,
    StatusWriter,
    process_started,
    read_status,
    write_status,
)


def test_round_trip(tmp_path: Path) -> None:
    status = RunStatus(
        "failed",
        identity="ab12",
        name="R=8 seed=0",
        step=3,
        total=9,
        error="boom",
        versions={"torch": "2"},
        pid_started=77,
        traceback="Traceback\nboom",
        notes=["a", "b"],
    )
    write_status(tmp_path, status)
    assert read_status(tmp_path) == status


def test_unknown_keys_and_missing_ones_are_tolerated(tmp_path: Path) -> None:
    (tmp_path / "status.json").write_text(json.dumps({"state": "running", "from_the_future": 1}))
    assert read_status(tmp_path) == RunStatus("running")


@pytest.mark.parametrize("content", ["", "{", '{"state": "flying"}', "[]", "null", '{"state": "runn'])
def test_a_damaged_file_gives_one_sentence_that_names_it(tmp_path: Path, content: str) -> None:
    (tmp_path / "status.json").write_text(content)
    with pytest.raises(RecordError, match=r"status\.json"):
        read_status(tmp_path)


def test_a_missing_file_and_an_unknown_state_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="does not exist"):
        read_status(tmp_path)
    with pytest.raises(RecordError, match="'flying'"):
        write_status(tmp_path, RunStatus("flying"))  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


def test_a_living_process_counts_for_more_than_the_clock() -> None:
    here, now = socket.gethostname(), time.time()
    began = process_started(os.getpid())
    assert began is not None and process_started(2**22 + 1) is None
    own = RunStatus("running", host=here, pid=os.getpid(), pid_started=began, heartbeat=now - 10 * STALE_AFTER)
    assert not own.stale()  # the clock was set forward, or the disk has been full for an hour
    assert RunStatus("running", host=here, pid=os.getpid(), pid_started=began + 1, heartbeat=now).stale()  # recycled
    assert RunStatus("running", host=here, pid=os.getpid(), heartbeat=now - 10 * STALE_AFTER).stale()  # an old record
    assert RunStatus("running", host="elsewhere", pid=os.getpid(), pid_started=began, heartbeat=1.0).stale()


@pytest.mark.parametrize(("field", "value"), [("notes", "one"), ("notes", [1]), ("pid_started", 1.5)])
def test_a_field_of_another_type_is_damage(tmp_path: Path, field: str, value: object) -> None:
    (tmp_path / "status.json").write_text(json.dumps({"state": "running", field: value}))
    with pytest.raises(RecordError, match=field):
        read_status(tmp_path)


def test_notes_are_kept_once_and_not_without_end(tmp_path: Path) -> None:
    with StatusWriter(tmp_path, RunStatus("running")) as writer:
        for i in range(120):
            writer.note(f"note {i // 2}")
    notes = read_status(tmp_path).notes
    assert len(notes) == 50 and notes[-1] == "note 59" and len(set(notes)) == 50


def test_a_writer_whose_folder_is_taken_writes_no_more(tmp_path: Path) -> None:
    mine = [True]
    with StatusWriter(tmp_path, RunStatus("running", pid=1), mine=lambda: mine[0]) as writer:
        mine[0] = False
        write_status(tmp_path, RunStatus("running", pid=2))
        writer.update(step=5)
    assert read_status(tmp_path) == RunStatus("running", pid=2)


def test_the_writer_beats_while_a_step_lasts(tmp_path: Path) -> None:
    with StatusWriter(tmp_path, RunStatus("running", total=5), every=0.05) as writer:
        writer.step(1)
        first = read_status(tmp_path).heartbeat
        deadline = time.monotonic() + 5
        while read_status(tmp_path).heartbeat <= first and time.monotonic() < deadline:
            time.sleep(0.02)
        assert read_status(tmp_path).heartbeat > first and read_status(tmp_path).step == 1
        writer.step(2)
        writer.update(state="finished", ended=1.0)
    status = read_status(tmp_path)
    assert (status.state, status.step, status.ended) == ("finished", 2, 1.0)
    assert not [t for t in threading.enumerate() if t.name == "heartbeat"]


def test_the_last_step_is_written_on_leaving(tmp_path: Path) -> None:
    with StatusWriter(tmp_path, RunStatus("running"), every=60) as writer:
        for step in range(1, 50):
            writer.step(step)
    assert read_status(tmp_path).step == 49


def test_a_write_that_fails_leaves_the_old_file_and_no_litter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    files.write_text(path, "old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        files.write_text(path, "new")
    assert path.read_text() == "old" and [p.name for p in tmp_path.iterdir()] == ["file"]


def test_files_have_the_mode_that_the_umask_allows(tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("")
    files.write_text(tmp_path / "file", "x")
    assert (tmp_path / "file").stat().st_mode == (tmp_path / "plain").stat().st_mode
