"""The copying process beside a job: the job's signals, servers that hang, databases that are locked or lost."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import socketserver
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from grpo_sweeps import sync
from grpo_sweeps.config import TrackingConfig
from grpo_sweeps.tracking import mirror as mirroring
from grpo_sweeps.tracking import mlflow_store
from grpo_sweeps.tracking.mirror import Follower, initialise
from grpo_sweeps.tracking.mlflow_deadline import Late, deadline
from grpo_sweeps.tracking.mlflow_store import Store, StoreError
from grpo_sweeps.tracking.mlflow_tracker import Mirror
from grpo_sweeps.tracking.status import process_lives
from tests.integration.test_mlflow_follower import free_port, runs_in, server, wait_until, write_run

pytestmark = pytest.mark.integration

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def place(tmp_path: Path, template: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copy(template, tmp_path / "mlflow.db")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def hung_server() -> Iterator[str]:
    """Takes connections and never answers."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(50)
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


def test_signals_meant_for_the_job_do_not_end_the_copy(place: Path) -> None:
    """Before its imports are done, while it waits, all of them at once: it ends when its input does."""
    with Follower("study", "runs", TrackingConfig(), place / "log") as follower:
        assert follower._child is not None
        pid = follower._child.pid
        for number in (signal.SIGUSR2, signal.SIGTERM, signal.SIGCONT):
            os.kill(pid, number)
        write_run(place / "runs" / "study" / "2", steps=3)
        wait_until(lambda: (place / "runs" / "study" / "2" / "mlflow.json").exists())
        for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGCONT):
            os.kill(pid, number)
        time.sleep(0.3)
        assert process_lives(pid)
        write_run(place / "runs" / "study" / "4", steps=2)
    assert follower._child.returncode == 0
    assert runs_in(f"sqlite:///{place}/mlflow.db")["R=4"] == ("FINISHED", [0.0, 1.0])


def test_a_job_queued_again_does_not_wait_and_its_copy_can_be_ended(place: Path, hung_server: str) -> None:
    run = place / "runs" / "study" / "2"
    write_run(run, steps=2)
    follower = Follower("study", "runs", TrackingConfig(uri=hung_server), run / "log", run="2", wait=30.0)
    started = 0.0
    with pytest.raises(SystemExit), follower:
        wait_until(lambda: b"mirror" in (run / "log").read_bytes() or _connecting(follower))
        started = time.monotonic()
        sys.exit(-1)
    assert time.monotonic() - started < 1
    assert follower._child is not None
    time.sleep(0.5)
    follower._child.terminate()  # what SLURM sends next ends it, now that its input has ended
    assert follower._child.wait(30) != 0


def _connecting(follower: Follower) -> bool:
    """Has the child come to its loop? It ignores the signals then."""
    assert follower._child is not None
    status = Path(f"/proc/{follower._child.pid}/status").read_text()
    ignored = int(next(line for line in status.splitlines() if line.startswith("SigIgn")).split()[1], 16)
    return bool(ignored >> (signal.SIGUSR2 - 1) & 1)


def test_a_hung_server_holds_the_end_of_a_job_for_seconds(
    place: Path, hung_server: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = place / "runs" / "study" / "2"
    with Follower("study", "runs", TrackingConfig(uri=hung_server), place / "log", run="2", wait=2.0) as follower:
        write_run(run, steps=2)
        ended = time.monotonic()
    assert time.monotonic() - ended < 4
    assert "still copying" in capsys.readouterr().out
    assert follower._child is not None
    follower._child.kill()
    follower._child.wait()


@pytest.fixture
def dripping_server() -> Iterator[str]:
    """Answers every request with one byte every twentieth of a second: it is never silent for long."""

    class Drips(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            self.rfile.readline()
            self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 100000\r\n\r\n")
            with contextlib.suppress(OSError):
                while not ended.wait(0.05):
                    self.wfile.write(b" ")
                    self.wfile.flush()

    ended = threading.Event()
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Drips) as serving:
        threading.Thread(target=serving.serve_forever, args=(0.05,), daemon=True).start()
        yield f"http://127.0.0.1:{serving.server_address[1]}"
        ended.set()
        serving.shutdown()


def test_a_server_that_drips_is_given_up_at_a_deadline(
    place: Path, dripping_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mlflow_store, "DEADLINE", 0.4)
    write_run(place / "runs" / "study" / "2", steps=2)
    before = signal.getsignal(signal.SIGALRM)
    began = time.monotonic()
    with pytest.raises(StoreError, match="has not answered a request in"):
        Mirror(place / "runs" / "study", dripping_server, "grpo_sweeps").copy()
    assert time.monotonic() - began < 5
    assert signal.getsignal(signal.SIGALRM) is before and signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_a_deadline_leaves_an_outer_timer_running() -> None:
    with contextlib.ExitStack() as stack:
        stack.enter_context(pytest.raises(Late))
        stack.enter_context(deadline(0.2))
        with deadline(30.0):
            pass
        time.sleep(0.5)


HANGING = """
import sys, time, pathlib
from grpo_sweeps.tracking import mirror
class Hangs:
    name, place, shared = "a place", "nowhere", True
    def copy(self, *words):
        print("copying", flush=True)
        time.sleep(600)
mirror.LAST_PASS = 0.5
sys.exit(mirror.follow(Hangs(), pathlib.Path("."), None, sys.stdin, every=0.01))
"""


@pytest.mark.parametrize("how", ["its input ends", "it is told to end"])
def test_a_follower_is_gone_soon_after_its_run_whatever_the_store_does(tmp_path: Path, how: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    child = subprocess.Popen(
        [sys.executable, "-c", HANGING], cwd=tmp_path, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert child.stdin is not None and child.stdout is not None
    try:
        assert child.stdout.readline() == b"copying\n"
        began = time.monotonic()
        if how == "it is told to end":
            child.stdin.write(b"end\n")
            child.stdin.flush()
        else:
            child.stdin.close()
        assert child.wait(10) == 1 and time.monotonic() - began < 3
        assert b"it is given up; python -m grpo_sweeps.sync completes the copy." in child.stdout.read()
    finally:
        child.kill()
        child.wait()
        child.stdout.close()
        child.stdin.close()


def test_a_copy_that_gets_on_is_waited_for(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Signs of life come from the run's mlflow.json."""
    run = place / "runs" / "study" / "2"
    run.mkdir(parents=True)
    touch = f"pathlib.Path({str(run / 'mlflow.json')!r}).write_text(str(i))"
    script = f"import time, pathlib\nfor i in range(12): {touch}; time.sleep(0.25)"
    follower = Follower("study", "runs", TrackingConfig(), run / "log", run="2", wait=1.2)
    follower._child = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE)
    started = time.monotonic()
    follower.__exit__(None)
    assert follower._child.returncode == 0 and time.monotonic() - started > 2.5
    monkeypatch.setattr(mirroring, "WAIT", 1.5)  # and not without end
    follower._child = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE)
    started = time.monotonic()
    follower.__exit__(None)
    assert time.monotonic() - started < 2.6
    follower._child.kill()
    follower._child.wait()


def test_many_processes_meet_on_a_fresh_store(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "grpo_sweeps.sync", "--init", "experiment=study"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    processes = [
        subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        for _ in range(8)
    ]
    said = [process.communicate()[0].decode() for process in processes]
    assert [process.returncode for process in processes] == [0] * 8, said
    assert len(Store(f"sqlite:///{tmp_path}/mlflow.db", "study").client.search_experiments()) == 2  # and the default


def test_a_store_is_made_from_the_launching_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert initialise(TrackingConfig()) is None and (tmp_path / "mlflow.db").exists()
    assert initialise(TrackingConfig(kind="local")) is None
    said = initialise(TrackingConfig(uri=f"http://ann:s3cret@127.0.0.1:{free_port()}"))
    assert said and "nobody answers" in said and "s3cret" not in said and "\n" not in said


@pytest.mark.parametrize("words", [["--init", "sweep=x"], ["--init", "--follow"], ["--init", "uri=ftp://x"]])
def test_init_refuses_what_it_does_not_do(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert sync.main(words) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_locked_database_is_a_store_that_cannot_be_reached(place: Path) -> None:
    run = place / "runs" / "study" / "2"
    write_run(run, steps=2)
    mirror = Mirror(place / "runs" / "study", f"sqlite:///{place}/mlflow.db", "grpo_sweeps")
    assert mirror.copy() is not None
    write_run(place / "runs" / "study" / "4", steps=2)
    with sqlite3.connect(place / "mlflow.db") as other:
        other.execute("BEGIN EXCLUSIVE")
        with pytest.raises(StoreError, match="locked"):
            mirror.copy()
    other.close()
    assert mirror.copy() is not None
    assert runs_in(f"sqlite:///{place}/mlflow.db")["R=4"] == ("FINISHED", [0.0, 1.0])


def test_a_lost_database_is_a_store_that_cannot_be_reached(place: Path) -> None:
    write_run(place / "runs" / "study" / "2", steps=2)
    mirror = Mirror(place / "runs" / "study", f"sqlite:///{place}/mlflow.db", "grpo_sweeps")
    assert mirror.copy() is not None
    write_run(place / "runs" / "study" / "4", steps=2)
    (place / "mlflow.db").write_bytes(b"")  # its tables are gone
    with pytest.raises(StoreError):
        mirror.copy()


def test_a_server_prints_nothing_into_the_log(place: Path) -> None:
    """MLflow's own lines ("View run ... at ...") told every pass of every run."""
    port = free_port()
    shutil.copy(place / "mlflow.db", place / "server.db")
    tracking = TrackingConfig(uri=f"http://127.0.0.1:{port}")
    with server(place, port), Follower("study", "runs", tracking, place / "log"):
        write_run(place / "runs" / "study" / "2", steps=2)
        wait_until(lambda: (place / "runs" / "study" / "2" / "mlflow.json").exists())
    assert (place / "log").read_text() == ""
