"""python -m grpo_sweeps.status: the table, JSON, stale runs, errors."""

from __future__ import annotations

import json
import socket
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from grpo_sweeps.status import collect, main
from grpo_sweeps.tracking.status import RunStatus, read_status, write_status

DEAD = 2**22 + 1


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A sweep with a run of each kind."""
    import os

    now, host = time.time(), socket.gethostname()
    kinds: dict[str, dict[str, Any]] = {
        "R=2 seed=0": {"state": "finished", "step": 4},
        "R=4 seed=0": {"state": "running", "step": 2, "pid": os.getpid()},
        "R=8 seed=0": {"state": "running", "step": 1, "pid": DEAD},
        "R=16 seed=0": {"state": "queued", "step": 0, "pid": DEAD},
        "R=32 seed=0": {"state": "failed", "step": 0, "error": "RuntimeError: \x1b[31mboom"},
    }
    for index, (name, fields) in enumerate(kinds.items()):
        run_dir = tmp_path / "mine" / f"id{index}"
        run_dir.mkdir(parents=True)
        write_status(run_dir, RunStatus(name=name, sweep="mine", total=4, host=host, heartbeat=now, **fields))
        lines = [{"step": step, "time": 10.0 * step, "reward": 0.25 * step, "spectral/effective_rank": 1.0 + step,
                  "step_time": 8.0 + step, "time/sample": 1.0 + step, "time/update": 0.5,
                  "sampling/tokens_per_second": 1000.0 * (1 + step), "memory/peak_gib": 3.0 + step}
                 for step in range(fields["step"])]  # fmt: skip
        lines.append({"step": fields["step"], "time": 99.0, "eval/accuracy": 0.1})
        (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 99, "rew')
    (tmp_path / "mine" / "broken").mkdir()
    (tmp_path / "mine" / "broken" / "status.json").write_text("{")
    return tmp_path


def test_rows(runs: Path) -> None:
    rows = {row.name or row.identity: row for row in collect(runs, "mine")}
    assert {name: row.state for name, row in rows.items()} == {
        "R=2 seed=0": "finished", "R=4 seed=0": "running", "R=8 seed=0": "interrupted", "R=16 seed=0": "not started",
        "R=32 seed=0": "failed", "broken": "unreadable",
    }  # fmt: skip
    assert rows["R=4 seed=0"].reward == 0.25 and rows["R=4 seed=0"].effective_rank == 2.0
    assert rows["R=4 seed=0"].left_s == pytest.approx(20.0)  # two steps left at ten seconds each
    assert rows["R=4 seed=0"].pace_s == 8.5 and rows["R=4 seed=0"].node == socket.gethostname()
    assert rows["R=4 seed=0"].tokens_per_second == 1500.0 and rows["R=4 seed=0"].memory_gib == 4.0
    assert rows["R=4 seed=0"].parts_s == {"sample": 1.5, "update": 0.5}
    assert rows["R=2 seed=0"].left_s is None and rows["R=16 seed=0"].parts_s == {}
    assert rows["R=16 seed=0"].reward is None
    assert list(rows)[:3] == ["R=2 seed=0", "R=4 seed=0", "R=8 seed=0"]


def test_table_and_json(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([f"runs_dir={runs}"]) == 0
    text = capsys.readouterr().out
    assert "tok/s" in text and "1,500" in text
    assert "sweep mine: 6 runs" in text and "1 not started" in text and str(runs / "mine" / "id0" / "log.txt") in text
    assert main([f"runs_dir={runs}", "sweep=mine", "json=true"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert len(rows) == 6 and {row["total"] for row in rows} == {0, 4}
    running = next(row for row in rows if row["name"] == "R=4 seed=0")
    fields = {
        "state",
        "step",
        "total",
        "pace_s",
        "left_s",
        "reward",
        "effective_rank",
        "node",
        "job_id",
        "job_token",
        "queue",
        "stuck",
        "silent",
        "log",
    }
    assert fields | {"heartbeat", "commit", "versions", "command", "traceback", "notes"} <= set(running)


def test_a_run_that_is_silent_for_long_is_named(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = runs / "mine" / "id1" / "metrics.jsonl"
    steps = [{"step": step, "reward": 0.5, "step_time": 30.0} for step in range(2)]
    for age, silent in ((500.0, False), (1200.0, True)):
        path.write_text("".join(json.dumps({**one, "time": time.time() - age}) + "\n" for one in steps))
        assert main([f"runs_dir={runs}"]) == 0
        sentence = "R=4 seed=0 running: no step for 20 minutes, which takes 30 s as a rule; a reward that hangs"
        assert (sentence in capsys.readouterr().out) == silent
    slow = [{**one, "step_time": 300.0, "time": time.time() - 1200.0} for one in steps]
    path.write_text("".join(json.dumps(one) + "\n" for one in slow))
    assert main([f"runs_dir={runs}"]) == 0
    assert "no step for" not in capsys.readouterr().out, "twenty minutes are four of its steps"
    path.unlink()
    status = read_status(path.parent)
    for started, silent in ((time.time() - 60.0, False), (time.time() - 1800.0, True)):
        write_status(path.parent, replace(status, started=started))
        assert main([f"runs_dir={runs}"]) == 0
        assert ("R=4 seed=0 running: no step for 30 minutes; a reward" in capsys.readouterr().out) == silent


def test_a_run_that_has_diverged_is_named(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status = read_status(runs / "mine" / "id0")
    notes = ["a disk that is full", "looks wrong after step 1 (divergence): the update changed the weights"]
    write_status(runs / "mine" / "id0", replace(status, notes=notes))
    assert main([f"runs_dir={runs}"]) == 0
    out = capsys.readouterr().out
    assert f"  R=2 seed=0 {notes[1]}\n" in out and notes[0] not in out


def test_why_runs_ended_stands_below_the_table(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([f"runs_dir={runs}"]) == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert "R=32 seed=0 failed: RuntimeError:  [31mboom" in lines
    assert f"R=8 seed=0 interrupted: process {DEAD} on {socket.gethostname()} has ended without a word" in lines


@pytest.mark.parametrize("state", ["queued", "running", "interrupted"])
def test_the_queue_says_why_a_job_waits(
    runs: Path, state: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from grpo_sweeps.sweep import ledger
    from grpo_sweeps.sweep.jobs import note_jobs
    from grpo_sweeps.sweep.queue import Queue

    tools = tmp_path / ".tools"
    tools.mkdir()
    (tools / "squeue").write_text("#!/bin/sh\necho '17_3|PENDING|Resources|||grpo_sweeps:aa'\n")
    (tools / "squeue").chmod(0o755)
    monkeypatch.setenv("PATH", str(tools))
    monkeypatch.setattr(ledger, "QUEUE", Queue(keep_s=0))
    write_status(runs / "mine" / "id2", RunStatus(state=state, name="R=8 seed=0", step=1, total=4, job_id="17_3"))
    note_jobs(runs / "mine", ["17_3"], "aa")
    row = {row.name: row for row in collect(runs, "mine")}["R=8 seed=0"]
    assert (row.state, row.queue, row.node, row.job_id) == ("queued", "PENDING, Resources", "", "17_3")
    assert main([f"runs_dir={runs}"]) == 0
    assert "queued: PENDING, Resources  1/4" in capsys.readouterr().out
    (tools / "squeue").write_text("#!/bin/sh\necho '17_3|PENDING|PartitionConfig|||grpo_sweeps:aa'\n")
    assert main([f"runs_dir={runs}"]) == 0
    assert "  R=8 seed=0: job 17_3 can never start as it was asked for (PartitionConfig)\n" in capsys.readouterr().out
    (tools / "squeue").write_text("#!/bin/sh\necho '17_3|RUNNING|None|||grpo_sweeps:bb'\n")
    assert main([f"runs_dir={runs}"]) == 0
    assert "job 17_3: the queue's job of that number is another one\n" in capsys.readouterr().out
    (tools / "squeue").write_text("#!/bin/sh\necho 'Unable to contact slurm controller' >&2; exit 1\n")
    row = {row.name: row for row in collect(runs, "mine")}["R=8 seed=0"]
    assert row.state == "queued" and "squeue does not answer (Unable to contact slurm controller)" in row.queue
    (tools / "squeue").unlink()
    row = {row.name: row for row in collect(runs, "mine")}["R=8 seed=0"]
    assert row.state == "interrupted" and not row.queue


def test_a_table_that_lives_ends_when_nothing_runs_any_more(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import os
    from dataclasses import replace

    from grpo_sweeps import status as entry
    from grpo_sweeps.tracking.status import read_status

    looks: list[float] = []

    def sleep(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 2:
            run_dir = runs / "mine" / "id1"
            write_status(run_dir, replace(read_status(run_dir), state="finished", step=4))

    monkeypatch.setattr(entry.time, "sleep", sleep)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert read_status(runs / "mine" / "id1").pid == os.getpid()
    assert main([f"runs_dir={runs}", "watch=true"]) == 0
    assert looks == [entry.WATCH_S] * 2 and "2 finished" in capsys.readouterr().out

    def interrupted(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(entry.time, "sleep", interrupted)
    write_status(runs / "mine" / "id1", replace(read_status(runs / "mine" / "id1"), state="running", pid=os.getpid()))
    assert main([f"runs_dir={runs}", "watch=true"]) == 0


def test_watching_off_a_terminal_prints_once(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([f"runs_dir={runs}", "watch=true"]) == 0
    assert "sweep mine: 6 runs" in capsys.readouterr().out


def test_terminal_table_hides_control_characters(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from grpo_sweeps.status import _print_rich

    _print_rich(collect(runs))
    assert "\x1b[31m" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["runs_dir=/nowhere"], "runs_dir=/nowhere: no such folder"),
        (["sweep=other"], "sweep=other: not in"),
        (["sweeps=mine"], "sweeps=mine: not understood; allowed are sweep=NAME"),
        (["json=yes"], "json=yes: true or false is expected"),
        (["watch=yes"], "watch=yes: true or false is expected"),
        (["json=true", "watch=true"], "json=true watch=true: a table that lives is no JSON"),
    ],
)
def test_errors_are_one_sentence(
    runs: Path, words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    place = [] if words[0].startswith("runs_dir=") else [f"runs_dir={runs}"]
    assert main([*place, *words]) == 2
    err = capsys.readouterr().err
    assert sentence in err and err.count("\n") == 1


def test_records_without_a_status_are_shown(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lost = runs / "a" / "lost"
    lost.mkdir(parents=True)
    (lost / "metrics.jsonl").write_text('{"step": 0, "reward": 0.5}\n')
    assert main([f"runs_dir={runs}", "sweep=a"]) == 0
    assert "unreadable" in capsys.readouterr().out


def test_runs_are_chosen_and_what_they_share_stands_once(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for at, lr in ((0, "0.0001"), (1, "1.0e-05"), (2, "1.0e-05")):
        text = f"R: {2 << at}\nmodel: {{name: tiny}}\ntrainer: {{lr: {lr}}}\n"
        (runs / "mine" / f"id{at}" / "config.yaml").write_text(text)
    assert main([f"runs_dir={runs}", "where=lr=1e-5"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "sweep mine: 2 runs: 1 interrupted, 1 running; all model=tiny lr=1e-05"
    assert [line.split()[0] for line in lines[2:4]] == ["R=4", "R=8"]
    assert main([f"runs_dir={runs}", "where=lr=0.0001"]) == 0
    assert capsys.readouterr().out.startswith("sweep mine: 1 run: 1 finished")
    assert main([f"runs_dir={runs}", "where=R=2,4,lr=0.0001,1e-05", "json=true"]) == 0
    assert [row["name"] for row in json.loads(capsys.readouterr().out)] == ["R=2 seed=0", "R=4 seed=0"]
    assert main([f"runs_dir={runs}", "where=lr=1"]) == 2
    assert capsys.readouterr().err == "error: where=lr=1: no run has lr=1; there are lr=1e-05,0.0001\n"
    assert main([f"runs_dir={runs}"]) == 0
    assert "; all " not in capsys.readouterr().out, "runs without a configuration share nothing that is known"


def test_names_are_ordered_by_their_numbers(tmp_path: Path) -> None:
    names = ["R=2 seed=0 lr=1e-05", "R=2 seed=0 lr=0.0001", "R=16 seed=0 lr=1e-05"]
    for name in reversed(names):
        run_dir = tmp_path / "mine" / name.replace(" ", "-")
        run_dir.mkdir(parents=True)
        write_status(run_dir, RunStatus(state="finished", name=name, sweep="mine"))
    assert [row.name for row in collect(tmp_path, "mine")] == names
