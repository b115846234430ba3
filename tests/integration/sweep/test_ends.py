"""How runs end that do not end well: sys.exit in the user's code, swallowed signals, a full disk, unusable folders."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from grpo_sweeps.sweep.execute import RunResult
from grpo_sweeps.tracking import status as status_module

pytestmark = pytest.mark.integration

Run = Callable[..., int]
Statuses = Callable[..., dict[str, Any]]


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch, workplace: Path) -> Callable[[Callable[..., None]], None]:
    """Put a function in the place of the training loop."""

    def install(train: Callable[..., None]) -> None:
        monkeypatch.setitem(sys.modules, "grpo_sweeps.loop.train", types.SimpleNamespace(train=train))

    return install


def test_sys_exit_in_the_users_code_is_a_failure(
    run: Run, loop: Any, statuses: Statuses, capfd: pytest.CaptureFixture[str]
) -> None:
    def train(config: Any, *_: Any) -> None:
        if config.seed == 0:
            sys.exit(0)

    loop(train)
    assert run("-m", "R=4", "seed=0,5") == 1
    assert {name: status.state for name, status in statuses().items()} == {
        "R=4 seed=0": "failed", "R=4 seed=5": "finished",
    }  # fmt: skip
    assert "1 of 2 runs did not finish:" in capfd.readouterr().err


def test_a_reward_that_changes_the_working_directory_splits_no_record(
    run: Run, loop: Any, statuses: Statuses, workplace: Path
) -> None:
    (workplace / "elsewhere").mkdir()

    def train(config: Any, run_dir: Path, watch: Any, name: str) -> None:
        watch.begin(0)
        os.chdir(workplace / "elsewhere")
        for step in range(config.trainer.steps):
            with open(run_dir / "metrics.jsonl", "a") as file:
                file.write(f'{{"step": {step}, "time": 0.0, "reward": 0.5}}\n')
            watch(step + 1, config.trainer.steps, {})

    loop(train)
    assert run("-m", "R=4", "seed=0,5") == 0
    assert Path.cwd() == workplace and not list((workplace / "elsewhere").iterdir())
    assert {name: (status.state, status.step) for name, status in statuses().items()} == {
        "R=4 seed=0": ("finished", 3), "R=4 seed=5": ("finished", 3),
    }  # fmt: skip
    assert len(list((workplace / "runs" / "adhoc").glob("*/metrics.jsonl"))) == 2


def test_a_module_and_a_task_that_change_the_working_directory_change_no_path(
    run: Run, workplace: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (workplace / "elsewhere").mkdir()
    (workplace / "wandering.py").write_text(
        "import os\nos.chdir('elsewhere')\n"
        "from grpo_sweeps.tasks.arithmetic import arithmetic\n"
        "def reward(completion, problem, seed):\n    return 0.0\n"
        "def task(**options):\n    os.chdir('/')\n    return arithmetic(**options)\n"
    )
    assert run("R=4", "reward._target_=wandering.reward", "task._target_=wandering.task") == 0
    assert Path.cwd() == workplace and not list((workplace / "elsewhere").iterdir())
    assert len(list((workplace / "runs" / "adhoc").glob("*/metrics.jsonl"))) == 1


def test_sys_exit_in_a_job_is_a_requeue_only_after_the_checkpoint(loop: Any, workplace: Path) -> None:
    import pickle

    from grpo_sweeps.sweep.job import RunJob
    from grpo_sweeps.sweep.launch import RunFailed
    from grpo_sweeps.tracking.status import read_status
    from tests.unit.sweep.conftest import frozen_config

    job = RunJob()

    def preempted(*_: Any) -> None:
        job.checkpoint()
        sys.exit(-1)

    loop(preempted)
    with pytest.raises(SystemExit):
        job(frozen_config(), str(workplace / "one"), "one", "", [])
    assert read_status(workplace / "one").state == "queued"
    loop(lambda *_: sys.exit(0))
    with pytest.raises(RunFailed):
        pickle.loads(pickle.dumps(job))(frozen_config(), str(workplace / "one"), "one", "", [])
    assert read_status(workplace / "one").state == "failed"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("last", [False, True])
def test_a_swallowed_signal_still_interrupts(
    number: signal.Signals, last: bool, run: Run, loop: Any, statuses: Statuses
) -> None:
    def train(config: Any, run_dir: Path, heartbeat: Any, name: str) -> None:
        with contextlib.suppress(BaseException):
            os.kill(os.getpid(), number)
        if not last:
            heartbeat(1, 3, {})

    loop(train)
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    assert run("-m", "R=4", "seed=0,5") == 130
    states = {name: status.state for name, status in statuses().items()}
    assert states == {"R=4 seed=0": "finished" if last else "interrupted", "R=4 seed=5": "queued"}
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_an_error_made_of_a_signal_is_an_interruption(run: Run, loop: Any, statuses: Statuses) -> None:
    def train(*_: Any) -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        except BaseException as error:
            raise RuntimeError("unexpected pos") from error

    loop(train)
    assert run("R=4") == 130
    assert [status.state for status in statuses().values()] == ["interrupted"]


@pytest.mark.parametrize("fails", [False, True])
def test_a_full_disk_ends_one_run_and_keeps_the_table(
    fails: bool, run: Run, loop: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    full: list[str] = []
    write = status_module.write_status

    def write_status(run_dir: Path, status: Any) -> None:
        if status.identity in full:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(run_dir, status)

    def train(config: Any, run_dir: Path, *_: Any) -> None:
        if config.seed == 0:
            full.append(run_dir.name)
            if fails:
                raise RuntimeError("boom")

    monkeypatch.setattr(status_module, "write_status", write_status)
    loop(train)
    assert run("-m", "R=4", "seed=0,5") == 1
    err = capfd.readouterr().err
    assert "1 of 2 runs did not finish:" in err and "Traceback" not in err
    assert ("failed  RuntimeError: boom" if fails else "failed  OSError: [Errno 28] No space left on device") in err
    assert "could not be written" in err


def test_a_folder_that_cannot_be_made_is_a_failed_result(workplace: Path) -> None:
    from grpo_sweeps.sweep.execute import execute
    from tests.unit.sweep.conftest import frozen_config

    (workplace / "file").write_text("")
    result = execute(frozen_config(), workplace / "file", name="mine")
    assert isinstance(result, RunResult) and (result.name, result.state) == ("mine", "failed")
    assert result.error and result.error.startswith("FileExistsError")


def test_a_file_in_the_way_is_one_sentence(run: Run, workplace: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (workplace / "runs").mkdir()
    (workplace / "runs" / "adhoc").write_text("")
    for more in ((), ("dry_run=true",)):
        assert run("R=4", *more) == 2
        err = capfd.readouterr().err
        assert err.startswith("error: runs_dir=runs: a folder is needed") and "runs/adhoc is none" in err
    (workplace / "runs" / "adhoc").unlink()
    assert run("R=4") == 0
    (folder,) = (workplace / "runs" / "adhoc").glob("*/status.json")
    for file in folder.parent.iterdir():
        file.unlink()
    folder.parent.rmdir()
    folder.parent.write_text("")
    capfd.readouterr()
    assert run("R=4") == 2
    assert "cannot be made or written" in capfd.readouterr().err


def test_a_task_that_raises_is_refused_before_the_start(
    run: Run, workplace: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (workplace / "bad_task_module.py").write_text("def load():\n    raise OSError('no such\\n data')\n")
    assert run("-m", "R=2,4", "task=custom", "task._target_=bad_task_module.load") == 2
    err = capfd.readouterr().err
    assert "error: task=bad_task_module.load: its problems could not be loaded (OSError: no such data)" in err
    assert not (workplace / "runs").exists()
