"""The follower end to end: another process copies while a run is written, and survives what training must not feel."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from grpo_sweeps import sync
from grpo_sweeps.config import TrackingConfig
from grpo_sweeps.tracking.local import LocalRecord
from grpo_sweeps.tracking.mirror import Follower
from grpo_sweeps.tracking.mlflow_store import Store
from grpo_sweeps.tracking.status import RunStatus, StatusWriter, process_lives, write_status

pytestmark = pytest.mark.integration

ROOT = Path(__file__).resolve().parents[2]


def write_run(run: Path, steps: int, pause: float = 0.0) -> None:
    """A run as training leaves it, from running to finished."""
    status = RunStatus(
        "running", run.name, f"R={run.name}", run.parent.name, host=socket.gethostname(), pid=os.getpid()
    )
    run.mkdir(parents=True)
    with StatusWriter(run, status) as writer, LocalRecord(run) as record:
        for step in range(steps):
            record.log_metrics(step, {"reward": float(step)})
            writer.step(step + 1)
            time.sleep(pause)
        record.close()
        writer.update(state="finished", ended=time.time())


def runs_in(uri: str, experiment: str = "grpo_sweeps") -> dict[str, tuple[str, list[float]]]:
    """Name -> status and rewards of each run in the store."""
    store = Store(uri, experiment)
    found = store.client.search_runs([store.experiment_id])
    assert len({r.info.run_name for r in found}) == len(found)
    return {
        r.info.run_name: (r.info.status, [m.value for m in store.client.get_metric_history(r.info.run_id, "reward")])
        for r in found
    }


def wait_until(condition, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.1)


def test_a_fresh_sweep_is_in_mlflow_when_the_block_ends(tmp_path, monkeypatch, capsys) -> None:
    """From nothing: the child makes mlflow.db, copies while the run goes on, and ends after a last pass."""
    monkeypatch.chdir(tmp_path)
    log = tmp_path / "runs" / "study" / "mirror.log"
    with Follower("study", "runs", TrackingConfig(), log) as follower:
        assert follower._child is not None
        pid = follower._child.pid
        assert os.getpgid(pid) != os.getpgid(0)  # Ctrl-C in the terminal does not reach it
        write_run(tmp_path / "runs" / "study" / "2", steps=5)
        wait_until(lambda: (tmp_path / "runs" / "study" / "2" / "mlflow.json").exists())
        assert os.getpriority(os.PRIO_PROCESS, pid) >= 10
        assert str(tmp_path / "mlflow.db") not in Path(f"/proc/{pid}/cmdline").read_text()
        write_run(tmp_path / "runs" / "study" / "4", steps=3)
    assert not process_lives(pid) and log.read_text() == "" and capsys.readouterr().out == ""
    found = runs_in(f"sqlite:///{tmp_path}/mlflow.db")
    assert found == {
        "study": ("FINISHED", []), "R=2": ("FINISHED", [0.0, 1.0, 2.0, 3.0, 4.0]), "R=4": ("FINISHED", [0.0, 1.0, 2.0]),
    }  # fmt: skip
    assert not Path(f"/proc/{pid}").exists()


PARENT = """
import os, socket, sys, time
from grpo_sweeps.config import TrackingConfig
from grpo_sweeps.tracking.local import LocalRecord
from grpo_sweeps.tracking.mirror import Follower
from grpo_sweeps.tracking.status import RunStatus, StatusWriter
from pathlib import Path
run = Path("runs/study/8"); run.mkdir(parents=True)
status = RunStatus("running", "8", "R=8", "study", host=socket.gethostname(), pid=os.getpid())
follower = Follower("study", "runs", TrackingConfig(), "mirror.log")
with follower as f, StatusWriter(run, status), LocalRecord(run) as record:
    record.log_metrics(0, {"reward": 1.0})
    while not (run / "mlflow.json").exists():
        time.sleep(0.05)
    helper = os.fork() if sys.argv[1:] == ["forks"] else 1
    if helper:
        print(f._child.pid, helper, flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("forks", [[], ["forks"]])  # a reward's helper has the input of the copying process open
def test_the_follower_outlives_a_killed_parent_and_says_so_in_mlflow(
    tmp_path: Path, template: Path, forks: list[str]
) -> None:
    shutil.copy(template, tmp_path / "mlflow.db")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, *forks], cwd=tmp_path, stdout=subprocess.PIPE, env=environment
    )
    assert parent.stdout is not None
    try:
        pid, helper = map(int, parent.stdout.readline().split())
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()
    try:
        wait_until(lambda: not process_lives(pid))
    finally:
        if forks:
            os.kill(helper, signal.SIGKILL)
    assert (tmp_path / "mirror.log").read_text() == ""
    assert runs_in(f"sqlite:///{tmp_path}/mlflow.db") == {"study": ("KILLED", []), "R=8": ("KILLED", [1.0])}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def server(folder: Path, port: int, backend: str | None = None) -> Iterator[None]:
    """A real tracking server on this machine, stopped with everything it started."""
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    command += [
        "--backend-store-uri",
        backend or f"sqlite:///{folder}/server.db",
        "--artifacts-destination",
        str(folder / "served"),
    ]
    with open(folder / "server.log", "wb") as log:
        environment = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log, env=environment, start_new_session=True)
    try:

        def answers() -> bool:
            assert process.poll() is None, (folder / "server.log").read_text()
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                return True
            return False

        wait_until(answers)
        yield
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def test_a_server_that_is_down_costs_training_nothing_and_sync_completes(
    tmp_path, monkeypatch, capsys, template
) -> None:
    monkeypatch.chdir(tmp_path)
    port = free_port()
    tracking = TrackingConfig(uri=f"http://127.0.0.1:{port}", experiment="study of R")
    log = tmp_path / "mirror.log"
    with Follower("study", "runs", tracking, log):
        write_run(tmp_path / "runs" / "study" / "2", steps=4)
    said = capsys.readouterr().out
    assert said.count("\n") == 1 and "not complete" in said and "python -m grpo_sweeps.sync sweep=study" in said
    assert log.read_text().count("nobody answers") == 1 and "Traceback" not in log.read_text()

    shutil.copy(template, tmp_path / "server.db")
    (tmp_path / "runs" / "study" / "2" / "config.yaml").write_text(
        f"tracking: {{kind: mlflow, uri: 'http://127.0.0.1:{port}', experiment: study of R}}\nR: 2\n"
    )
    with server(tmp_path, port):
        assert sync.main(["sweep=study"]) == 0  # where to is in the run's own configuration
        expected = {"study": ("FINISHED", []), "R=2": ("FINISHED", [0.0, 1.0, 2.0, 3.0])}
        assert runs_in(tracking.uri, "study of R") == expected
        first = capsys.readouterr().out
        assert sync.main(["sweep=study"]) == 0
        assert runs_in(tracking.uri, "study of R") == expected
        assert "1 run, 4 points and 2 files" in first and "1 run, 0 points and 0 files" in capsys.readouterr().out
    assert sorted(p.name for p in (tmp_path / "served").rglob("*") if p.is_file()) == [
        "config.yaml",
        "environment.json",
    ]
    assert not (tmp_path / "mlflow.db").exists()


def test_no_follower_for_local_tracking_or_without_mlflow(tmp_path, monkeypatch, capsys) -> None:
    with Follower("study", tmp_path, TrackingConfig(kind="local"), tmp_path / "log") as follower:
        assert follower._child is None
    assert capsys.readouterr().out == ""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with Follower("study", tmp_path, TrackingConfig(), tmp_path / "log") as follower:
        assert follower._child is None
    assert "mlflow is not installed" in capsys.readouterr().out
    assert sync.main([f"runs_dir={tmp_path}"]) == 2


def test_a_bad_store_address_does_not_stop_training(tmp_path, capsys) -> None:
    with Follower("study", tmp_path, TrackingConfig(uri="mlruns"), tmp_path / "log") as follower:
        assert follower._child is None
    assert "not started" in capsys.readouterr().out


def test_a_slow_last_pass_is_not_waited_for_longer_than_asked(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "runs" / "study" / "2"
    run.mkdir(parents=True)
    write_status(run, RunStatus("finished", "2", "R=2", "study"))
    with Follower("study", "runs", TrackingConfig(), tmp_path / "log", wait=0.0) as follower:
        pass
    assert "going on by itself" in capsys.readouterr().out
    assert follower._child is not None
    os.kill(follower._child.pid, signal.SIGKILL)
    follower._child.wait()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["sweep"], "'sweep' is not understood; allowed are sweep=..."),
        (["colour=red"], "'colour=red' is not understood"),
        (["sweep="], "'sweep=' is not understood"),
        (["sweep=../x"], "the name of one folder"),
        (["run=x"], "needs sweep=NAME"),
        (["sweep=nope"], "no runs of it"),
        (["runs_dir=nowhere"], "there is no such folder"),
        (["sweep=study", "uri=file:///tmp/mlruns"], "no longer writes to a folder"),
    ],
)
def test_a_bad_command_is_one_sentence_and_exit_code_2(tmp_path, monkeypatch, capsys, words, sentence) -> None:
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "runs" / "study" / "2"
    run.mkdir(parents=True)
    write_status(run, RunStatus("finished", "2"))
    assert sync.main(words) == 2
    error = capsys.readouterr().err
    assert sentence in error and error.count("\n") == 1


def test_help_needs_no_mlflow() -> None:
    code = "import sys; sys.modules['mlflow'] = None; from grpo_sweeps import sync; sys.exit(sync.main(['--help']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0 and "sweep=NAME" in done.stdout
