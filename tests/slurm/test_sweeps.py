"""Sweeps on a real SLURM: only what is missing is submitted, nothing is doubled, nothing alive is given up."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
from typing import Any

import pytest

pytestmark = [pytest.mark.slurm, pytest.mark.integration]
Workplace = Any


def test_only_the_missing_runs_are_submitted_again(workplace: Workplace) -> None:
    done = workplace.sweep("R=2,4,8", "seed=0,5,6")
    assert done.returncode == 0, done.stderr
    assert "9 of 9 runs finished" in done.stderr and workplace.submitted() == 9
    assert "sacct" not in done.stderr, "Submitit's warnings about sacct"
    for name in ("R=4 seed=5", "R=8 seed=0"):
        shutil.rmtree(workplace.path / "runs" / "adhoc" / workplace.statuses()[name]["identity"])
    again = workplace.sweep("R=2,4,8", "seed=0,5,6")
    assert again.returncode == 0, again.stderr
    assert "9 runs, 2 to do, 7 skipped" in again.stderr and "9 of 9 runs finished" in again.stderr
    assert workplace.submitted() == 9 + 2
    assert len(workplace.statuses()) == 9 and workplace.all_are("finished")
    nothing = workplace.sweep("R=2,4,8", "seed=0,5,6")
    assert nothing.returncode == 0 and workplace.submitted() == 9 + 2


def test_what_is_queued_or_runs_is_not_submitted_twice(workplace: Workplace) -> None:
    workplace.hold()
    first = workplace.sweep("R=2,4", "wait=false", "hydra.launcher.array_parallelism=1")
    assert first.returncode == 0, first.stderr
    workplace.until(lambda: {one["state"] for one in workplace.statuses().values()} == {"running", "queued"})
    again = workplace.sweep("R=2,4,8", "wait=false")
    assert again.returncode == 0, again.stderr
    assert "3 runs, 1 to do, 2 skipped" in again.stderr
    assert "running already (job " in again.stderr and "queued already (job " in again.stderr
    assert "PENDING, JobArrayTaskLimit)" in again.stderr
    assert workplace.submitted() == 3
    shown = workplace.call("status", "sweep=adhoc").stdout
    assert "queued: PENDING, JobArrayTaskLimit" in shown and "  running  " in shown, shown
    workplace.release()
    workplace.until(lambda: workplace.all_are("finished"))


def test_two_commands_at_once_submit_each_run_once(workplace: Workplace) -> None:
    commands = [workplace.start_sweep("R=2,4", "seed=0,5", "wait=false") for _ in range(3)]
    said = [command.communicate(timeout=180)[1] for command in commands]
    assert [command.returncode for command in commands] == [0, 0, 0], said
    assert workplace.submitted() == 4, said
    workplace.until(lambda: workplace.all_are("finished"))


def test_a_requeued_job_is_waited_for(workplace: Workplace) -> None:
    """Killed and pending again: the status says running, and no process is there."""
    workplace.hold()
    command = workplace.start_sweep("R=4")
    workplace.until(lambda: workplace.statuses() and workplace.all_are("running"))
    (status,) = workplace.statuses().values()
    subprocess.run(["scontrol", "requeuehold", status["job_id"]], check=True, timeout=30)
    workplace.until(lambda: "JobHeldUser" in queue_line(status["job_id"]) or "requeued" in queue_line(status["job_id"]))
    with pytest.raises(subprocess.TimeoutExpired):
        command.wait(timeout=15)
    skipped = workplace.sweep("R=4", "wait=false")
    assert "queued already (job " in skipped.stderr, skipped.stderr
    shown = workplace.call("status", "sweep=adhoc").stdout
    held = f"job {status['job_id']} is held; scontrol release lets it start (job requeued in held state)"
    assert f": {held}\n" in shown, shown
    workplace.release()
    subprocess.run(["scontrol", "release", status["job_id"]], check=True, timeout=30)
    said = command.communicate(timeout=180)[1]
    assert command.returncode == 0 and "1 of 1 run finished" in said, said
    assert said.count(f"still waiting: {held}\n") == 1, said
    assert workplace.submitted() == 1


def test_a_job_that_queues_itself_again_is_still_its_own(workplace: Workplace) -> None:
    """By the signal that comes before a time limit: its number and its comment stay."""
    workplace.hold()
    command = workplace.start_sweep("R=4")
    workplace.until(lambda: workplace.statuses() and workplace.all_are("running"))
    (before,) = workplace.statuses().values()
    workplace.until(lambda: next(iter(workplace.statuses().values()))["step"] >= 1)
    subprocess.run(["scancel", "--signal=USR2", before["job_id"]], check=True, timeout=30)

    def has_begun_again() -> bool:
        (now,) = workplace.statuses().values()
        return now["state"] == "running" and now["started"] > before["started"]

    workplace.until(has_begun_again)
    (now,) = workplace.statuses().values()
    assert (now["job_id"], now["job_token"]) == (before["job_id"], before["job_token"])
    workplace.release()
    said = command.communicate(timeout=180)[1]
    assert command.returncode == 0 and "1 of 1 run finished" in said, said
    assert workplace.submitted() == 1


def queue_line(job_id: str) -> str:
    done = subprocess.run(
        ["squeue", "-h", "-r", "-o", "%T %r", "-j", job_id], capture_output=True, text=True, timeout=30, check=False
    )
    return done.stdout


def test_ctrl_c_leaves_the_jobs_and_cancel_ends_them(workplace: Workplace) -> None:
    workplace.hold()
    command = workplace.start_sweep("R=2,4", "hydra.launcher.array_parallelism=1")
    workplace.until(lambda: {one["state"] for one in workplace.statuses().values()} == {"running", "queued"})
    workplace.until(lambda: all(one["job_id"] for one in workplace.statuses().values()))
    command.send_signal(signal.SIGINT)
    said = command.communicate(timeout=60)[1]
    assert command.returncode == 130
    assert "the jobs go on; end them with python -m grpo_sweeps.cancel sweep=adhoc" in said
    (job_id,) = workplace.job_ids()
    assert len(queue_line(job_id).splitlines()) == 2
    done = workplace.call("cancel", "sweep=adhoc")
    assert done.returncode == 0, done.stderr
    assert "sweep adhoc: 2 runs cancelled" in done.stderr
    assert not queue_line(job_id).strip()
    assert {(one["state"], one["error"]) for one in workplace.statuses().values()} == {("interrupted", "cancelled")}
    assert "nothing of it is queued or running" in workplace.call("cancel", "sweep=adhoc").stderr
    workplace.release()
    again = workplace.sweep("R=2,4")
    assert again.returncode == 0, again.stderr
    assert "continue  R=2" in again.stderr and "2 of 2 runs finished" in again.stderr
    assert [one["step"] for one in workplace.statuses().values()] == [3, 3]


def test_a_strangers_job_with_our_number_is_neither_believed_nor_cancelled(workplace: Workplace) -> None:
    """As after a controller has lost its state: the number in the record is that of an innocent job."""
    workplace.hold()
    assert workplace.sweep("R=4", "wait=false").returncode == 0
    workplace.until(lambda: workplace.all_are("running"))
    assert workplace.call("cancel", "sweep=adhoc").returncode == 0
    (before,) = workplace.statuses().values()
    done = subprocess.run(
        ["sbatch", "--parsable", "--mem=100", "-o", "/dev/null", "--wrap", "sleep 300"], capture_output=True, text=True,
        check=True, timeout=30,
    )  # fmt: skip
    stranger = done.stdout.strip()
    try:
        folder = workplace.path / "runs" / "adhoc"
        path, jobs = folder / before["identity"] / "status.json", folder / ".jobs"
        path.write_text(json.dumps({**before, "state": "queued", "job_id": stranger}))
        _, *rest = jobs.read_text().split()
        jobs.write_text(" ".join([stranger, *rest[:-1], "1000.0"]) + "\n")
        shown = workplace.call("status", "sweep=adhoc").stdout
        assert f"job {stranger}: the queue's job of that number is another one" in shown, shown
        assert "nothing of it is queued or running" in workplace.call("cancel", "sweep=adhoc").stderr
        assert queue_line(stranger).strip(), "the innocent job was cancelled"
        workplace.release()
        again = workplace.sweep("R=4")
        assert again.returncode == 0 and "1 of 1 run finished" in again.stderr, again.stderr
        assert workplace.submitted() == 2 and queue_line(stranger).strip()
    finally:
        subprocess.run(["scancel", stranger], timeout=30, check=False)


def test_the_node_is_reached_from_this_machine_alone(slurm_node: None) -> None:
    shown = subprocess.run(["ss", "-ltnpH"], capture_output=True, text=True, timeout=30, check=True).stdout
    addresses = [line.split()[3] for line in shown.splitlines() if "slurm" in line or "srun" in line]
    assert len(addresses) >= 2, f"neither controller nor node: {shown}"
    assert all(address.startswith("127.0.0.1:") for address in addresses), addresses


def test_a_job_that_cannot_start_python_says_why(workplace: Workplace) -> None:
    done = workplace.sweep("R=4", "hydra.launcher.setup=['echo no such module: cuda >&2', 'exit 3']")
    assert done.returncode == 1, done.stderr
    assert "ended without a word" in done.stderr and "its last words: no such module: cuda" in done.stderr
    (status,) = workplace.statuses().values()
    assert status["state"] == "interrupted"
    again = workplace.sweep("R=4")
    assert again.returncode == 0, again.stderr


def test_one_failure_hides_no_other_run(workplace: Workplace) -> None:
    done = workplace.sweep("R=4", "seed=0,1,5")
    assert done.returncode == 1
    assert "1 of 3 runs did not finish:" in done.stderr and "RuntimeError: boom" in done.stderr
    again = workplace.sweep("R=4", "seed=0,1,5")
    assert again.returncode == 1 and "3 runs, 0 to do, 3 skipped" in again.stderr
    assert workplace.submitted() == 3


def test_a_refused_submission_leaves_nothing(workplace: Workplace) -> None:
    done = workplace.sweep("R=2,4", "hydra.launcher.partition=nope")
    assert done.returncode == 2, done.stderr
    assert "the submission was refused" in done.stderr and "invalid partition" in done.stderr
    assert not workplace.statuses()


def test_what_no_node_can_give_is_refused_before_anything_is_written(workplace: Workplace) -> None:
    done = workplace.sweep("R=2,4", "hydra.launcher.mem_gb=100000")
    assert done.returncode == 2, done.stderr
    assert "error: hydra.launcher.mem_gb=100000: no node of the default partition can ever give it" in done.stderr
    assert not (workplace.path / "runs").exists()
