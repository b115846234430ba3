"""python -m grpo_sweeps.cancel: what is ended, what is left alone, and what a cancelled run looks like."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from grpo_sweeps.cancel import main
from grpo_sweeps.sweep.cancel import cancel
from grpo_sweeps.sweep.jobs import note_jobs
from grpo_sweeps.tracking.status import RunStatus, read_status, write_status

ROOT = Path(__file__).resolve().parents[3]


def note(folder: Path, name: str, state: Any, **more: Any) -> Path:
    run_dir = folder / name
    run_dir.mkdir(parents=True)
    base: dict[str, Any] = {"host": "elsewhere", "heartbeat": time.time(), "step": 2, "total": 5}
    write_status(run_dir, RunStatus(state=state, identity=name, name=name, **(base | more)))
    return run_dir


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """squeue prints the file `queue`, scancel takes its jobs out of it; gives the file of what scancel was told."""

    def install(listing: str, failing: str = "") -> Path:
        tools, queue, told = tmp_path / "tools", tmp_path / "queue", tmp_path / "told"
        tools.mkdir(exist_ok=True)
        queue.write_text(listing)
        scancel = f'for job; do echo $job >> {told}; sed -i "/^$job|/d" {queue}; done'
        for name, script in (("squeue", failing or f"cat {queue}"), ("scancel", scancel)):
            (tools / name).write_text(f"#!/bin/sh\n{script}\n")
            (tools / name).chmod(0o755)
        monkeypatch.setenv("PATH", f"{tools}:/usr/bin:/bin")
        return told

    return install


def test_only_the_sweeps_own_jobs_that_the_queue_knows(tmp_path: Path, slurm: Any) -> None:
    told = slurm(
        "17_0|RUNNING|None|a|0|grpo_sweeps:aa\n17_1|PENDING|Priority||0|x grpo_sweeps:aa\n99|RUNNING|None|a\n"
        "18|RUNNING|None|a|0|grpo_sweeps:aa\n"
    )
    folder = tmp_path / "runs" / "mine"
    running = note(folder, "running", "running", job_id="17_0")
    waiting = note(folder, "waiting", "queued", job_id="17_1", step=0)
    note(folder, "allocation", "running", job_id="99")
    done = note(folder, "done", "finished", job_id="18")
    gone = note(folder, "gone", "interrupted", job_id="17_4", error="earlier")
    note_jobs(folder, ["17_0", "18"], "aa")
    found = cancel(folder, wait_s=5, poll_s=0.01)
    assert set(found.jobs) == {"running", "waiting"} and not found.processes and not found.problems
    assert sorted(told.read_text().split()) == ["17_0", "17_1"]
    for run_dir in (running, waiting):
        status = read_status(run_dir)
        assert (status.state, status.error) == ("interrupted", "cancelled") and status.ended
    assert read_status(done).state == "finished" and read_status(gone).error == "earlier"


def test_strangers_with_a_number_of_ours_live_on(tmp_path: Path, slurm: Any) -> None:
    """After a controller has lost its state, or on the other cluster of a shared home."""
    told = slurm(
        f"17_0|RUNNING|None|a|{time.time():.0f}|grpo_sweeps:bb\n18|RUNNING|None|a|{time.time():.0f}|\n"
        f"19|RUNNING|None|a|{time.time() - 9999:.0f}|\n20|PENDING|None|a|{time.time():.0f}|grpo_sweeps:aa\n"
    )
    folder = tmp_path / "runs" / "mine"
    for name, job_id in (("one", "17_0"), ("unsure", "18"), ("old", "19"), ("ours", "20")):
        note(folder, name, "queued", job_id=job_id)
    note_jobs(folder, ["17", "18", "19", "20"], "aa")
    found = cancel(folder, wait_s=5, poll_s=0.01)
    assert found.jobs == ("ours",) and told.read_text().split() == ["20"]
    (problem,) = found.problems
    assert problem.startswith("unsure: job 18 cannot be told from another one of that number")
    assert read_status(folder / "one").state == "queued", "its job has gone, which is not for cancel to say"


def test_a_silent_controller_is_a_problem(tmp_path: Path, slurm: Any, capfd: pytest.CaptureFixture[str]) -> None:
    told = slurm("", failing="echo 'Unable to contact slurm controller' >&2; exit 1")
    folder = tmp_path / "runs" / "mine"
    run_dir = note(folder, "one", "running", job_id="17_0")
    note_jobs(folder, ["17"], "aa")
    assert main(["sweep=mine", f"runs_dir={tmp_path / 'runs'}"]) == 1
    assert "one: job 17_0: squeue does not answer (Unable to contact slurm controller)" in capfd.readouterr().err
    assert read_status(run_dir).state == "running" and not told.exists()


def test_a_job_that_queues_itself_again_is_cancelled_again(tmp_path: Path, slurm: Any) -> None:
    told = slurm("17|PENDING|BeginTime||0|grpo_sweeps:aa\n")
    (tmp_path / "tools" / "scancel").write_text(
        f"#!/bin/sh\necho $1 >> {told}\n[ $(wc -l < {told}) -ge 2 ] && : > {tmp_path / 'queue'}\nexit 0\n"
    )
    folder = tmp_path / "runs" / "mine"
    note(folder, "one", "running", job_id="17")
    note_jobs(folder, ["17"], "aa")
    assert not cancel(folder, wait_s=10, poll_s=0.01).problems
    assert told.read_text().split() == ["17", "17"]


def test_a_job_that_stays_is_named(tmp_path: Path, slurm: Any) -> None:
    slurm("17|RUNNING|None|a|0|grpo_sweeps:aa\n")
    (tmp_path / "tools" / "scancel").write_text("#!/bin/sh\nexit 0\n")
    folder = tmp_path / "runs" / "mine"
    note(folder, "one", "running", job_id="17")
    note_jobs(folder, ["17"], "aa")
    assert cancel(folder, wait_s=0.1, poll_s=0.02).problems == ("job 17: still in the queue after 0 s",)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "sweep: a value is required and none is given; allowed are sweep=NAME and runs_dir=FOLDER"),
        (["sweep=x", "runs_dir=/nowhere"], "runs_dir=/nowhere: no such folder"),
        (["sweep=other"], "sweep=other: not in"),
        (["name=x"], "name=x: not understood; allowed are sweep=NAME"),
    ],
)
def test_errors_are_one_sentence(
    tmp_path: Path, words: list[str], sentence: str, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine").mkdir()
    place = [] if "runs_dir=/nowhere" in words else [f"runs_dir={tmp_path}"]
    assert main([*place, *words]) == 2
    err = capfd.readouterr().err
    assert sentence in err and err.count("\n") == 1


def test_nothing_to_cancel_is_well(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine").mkdir()
    assert main([f"runs_dir={tmp_path}", "sweep=mine"]) == 0
    assert "sweep mine: nothing of it is queued or running" in capfd.readouterr().err
