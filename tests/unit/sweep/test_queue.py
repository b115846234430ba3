"""What squeue's answers, and its silence, mean for a job."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from grpo_sweeps.sweep.queue import Queue, cluster_config, read

Squeue = Callable[[str], Path]


@pytest.fixture
def squeue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Squeue:
    """Put a shell script in the place of squeue; gives the file that holds one line for each call."""

    def install(script: str) -> Path:
        calls = tmp_path / "calls"
        fake = tmp_path / "squeue"
        fake.write_text(f'#!/bin/sh\necho "$@" >> {calls}\n{script}\n')
        fake.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
        return calls

    return install


def test_one_call_answers_for_all(squeue: Squeue) -> None:
    calls = squeue(
        "echo '17_3|RUNNING|None|node4|1795969933|my words grpo_sweeps:a|b'; echo '18|PENDING|Resources|'; "
        "echo '19_0|COMPLETED|None|node1'"
    )
    queue = Queue(keep_s=60)
    answers = queue.ask(["17_3", "17_4", "18", "19_0"])
    assert {job_id: answer.kind for job_id, answer in answers.items()} == {
        "17_3": "yes", "17_4": "no", "18": "yes", "19_0": "no",
    }  # fmt: skip
    assert answers["17_3"].node == "node4" and answers["17_3"].text() == "RUNNING"
    assert answers["17_3"].comment == "my words grpo_sweeps:a|b" and answers["17_3"].submitted == 1795969933
    assert answers["18"].pending and answers["18"].submitted is None and answers["18"].text() == "PENDING, Resources"
    assert queue.one("17").alive, "an array is alive while one of its tasks is"
    assert len(calls.read_text().splitlines()) == 1
    queue.one("20")  # a job that it was not asked about yet
    assert calls.read_text().splitlines()[1].endswith("-j 17,18,19,20")


def test_an_answer_gets_old(squeue: Squeue) -> None:
    calls = squeue("exit 0")
    queue = Queue(keep_s=0)
    assert queue.one("17").kind == "no" and queue.one("17").kind == "no"
    assert len(calls.read_text().splitlines()) == 2
    assert queue.ask([]) == {}
    assert len(calls.read_text().splitlines()) == 2, "nothing to ask, nothing asked"


def test_a_forgotten_job_and_a_silent_controller_differ(squeue: Squeue) -> None:
    squeue("echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    assert Queue().one("17").kind == "no"
    squeue("echo 'slurm_load_jobs error: Unable to contact slurm controller (connect failure)' >&2; exit 1")
    answer = Queue().one("17")
    assert answer.kind == "unknown" and answer.alive and "connect failure" in answer.text()
    squeue("exec sleep 5")
    assert Queue(timeout_s=0.1).one("17").kind == "unknown"
    assert not answer.pending


def test_without_squeue_nothing_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    answer = Queue().one("17_3")
    assert answer.kind == "absent" and not answer.alive


def test_read_takes_short_and_empty_lines() -> None:
    assert read("\n") == {}
    assert read("12_0|PENDING\n")["12_0"].state == "PENDING"


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("JobHeldUser", "is held; scontrol release lets it start (JobHeldUser)"),
        ("job requeued in held state", "is held; scontrol release lets it start (job requeued in held state)"),
        ("launch failed requeued held", "is held; scontrol release lets it start (launch failed requeued held)"),
        ("BadConstraints", "can never start as it was asked for (BadConstraints)"),
        ("QOSMaxWallDurationPerJobLimit", "can never start as it was asked for (QOSMaxWallDurationPerJobLimit)"),
        ("ReqNodeNotAvail, UnavailableNodes:node4", "waits for nodes that are not available (ReqNodeNotAvail, Unavail"),
        ("Resources", ""), ("Priority", ""), ("JobArrayTaskLimit", ""), ("BeginTime", ""), ("QOSGrpGRES", ""),
    ],
)  # fmt: skip
def test_reasons_that_do_not_pass_by_themselves(reason: str, words: str) -> None:
    (answer,) = read(f"17|PENDING|{reason}||0|x").values()
    assert answer.stuck.startswith(words) and bool(answer.stuck) == bool(words)
    (running,) = read(f"17|RUNNING|{reason}||0|x").values()
    assert not running.stuck


def test_the_clusters_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert cluster_config("ClusterName") == ""
    (tmp_path / "scontrol").write_text("#!/bin/sh\necho 'ClusterName             = east'\n")
    (tmp_path / "scontrol").chmod(0o755)
    assert cluster_config("ClusterName") == "east" and cluster_config("MaxArraySize") == ""
