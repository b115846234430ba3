"""The mirror: copies local records to MLflow while runs go on, from another process.

`Follower` starts `python -m grpo_sweeps.sync sweep=NAME --follow` at low priority in a session of its own, so that
neither MLflow's import nor a slow server costs the training process anything and Ctrl-C reaches the training alone.
The child ends after a last pass when its standard input closes, which also happens when its parent is killed. Nothing
that goes wrong in it reaches the training: it prints a line into its log, and `python -m grpo_sweeps.sync` completes
the copy later.

This module imports MLflow only in the child, when a store is opened.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import grpo_sweeps
from grpo_sweeps.tracking.locks import locked
from grpo_sweeps.tracking.mlflow_store import (
    RefusedError,
    Store,
    StoreError,
    import_mlflow,
    resolve_uri,
    sqlite_path,
)
from grpo_sweeps.tracking.provenance import redact
from grpo_sweeps.types import ConfigError

if TYPE_CHECKING:
    from grpo_sweeps.tracking.mlflow_copy import Copied

FILE_NAME, LOCK_NAME = "mlflow.json", ".mlflow.lock"
EVERY = 5.0  # seconds between passes
EVERY_DOWN = 30.0  # after a pass that found no store
WAIT = 60.0  # seconds that a launcher waits for the last pass
JOB_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM)  # SIGCONT does nothing to a process that runs


class Mirror:
    """Copies one sweep (or one run of it) to one store, pass by pass; remembers what needs no look."""

    def __init__(self, sweep_dir: Path, uri: str, experiment: str, only: str | None = None) -> None:
        self.sweep_dir, self.uri, self.experiment, self.only = sweep_dir, uri, experiment, only
        self._store: Store | None = None
        self._seen: dict[Path, Any] = {}
        self.problems: list[str] = []

    def copy(self, wait: float = 0.0) -> Copied | None:
        """One pass. None when another process copies to the same place for longer than `wait` seconds.

        Afterwards `problems` holds a sentence for each run that could not be copied. Raises StoreError when the store
        cannot be reached.
        """
        with contextlib.ExitStack() as locks:
            path = sqlite_path(self.uri)
            if path is not None:  # one writer at a time, and one that initialises the file
                path.parent.mkdir(parents=True, exist_ok=True)
                if not locks.enter_context(locked(path.with_name(path.name + ".lock"), wait)):
                    return None
            if self.only is None and not locks.enter_context(locked(self.sweep_dir / LOCK_NAME, wait)):
                return None
            try:
                return self._copy(wait)
            except StoreError as error:
                if not isinstance(error, RefusedError):
                    self._store = (
                        None  # opened anew by the next pass, which notices within seconds when nobody is there
                    )
                raise

    @property
    def begun(self) -> bool:
        """Has anything been copied yet?"""
        return bool(self._seen)

    def _copy(self, wait: float) -> Copied:
        from grpo_sweeps.tracking import mlflow_copy as copying

        total = copying.Copied()
        runs, self.problems = copying.read_statuses(self.sweep_dir, self.only)
        # A run that waits for its first turn has nothing to show; one that was requeued goes on under its id.
        begun = [(f, s) for f, s in runs if s.state != "queued" or _has_metrics(f)]
        looks = {folder: _look(folder, status.stale()) for folder, status in begun}
        todo = [(folder, status) for folder, status in begun if self._seen.get(folder) != looks[folder]]
        if not todo:
            return total
        if self._store is None:
            self._store = Store(self.uri, self.experiment)
        parent_lock = self.sweep_dir / (LOCK_NAME + ".parent")  # jobs that mirror one run each share the parent
        statuses = [status for _, status in runs]
        with locked(parent_lock, 30.0):
            parent_id = copying.copy_parent(self._store, self.sweep_dir, statuses, verify=not self._seen)
        for folder, status in todo:
            verify = folder not in self._seen
            self._seen.pop(folder, None)
            try:
                with locked(folder / LOCK_NAME, wait) as mine:
                    if mine:
                        total.add(copying.copy_run(self._store, folder, status, parent_id, verify))
                        self._seen[folder] = looks[folder]
            except (RefusedError, OSError, ValueError) as error:
                self.problems.append(f"{folder}: {redact(' '.join(str(error).split()))}")
            except (KeyError, TypeError, AttributeError) as error:  # a damaged file must not stop the other runs
                self.problems.append(f"{folder}: its files are damaged ({redact(repr(error))}).")
        if self.only is not None and statuses[0].state != "running":  # else the parent runs, whatever the others do
            statuses = [status for _, status in copying.read_statuses(self.sweep_dir)[0]]
        with locked(parent_lock, 30.0):
            copying.finish_parent(self._store, self.sweep_dir, statuses)
        return total


def prepare_store(uri: str, experiment: str, wait: float = 60.0) -> None:
    """Make the store and its experiment where they are missing; imports MLflow. Raises StoreError.

    A dozen processes that meet on a fresh database fail in its migrations: one makes it, under the lock that copies to
    it take as well, and the others find it made.
    """
    path = sqlite_path(uri)
    if path is not None:
        import_mlflow(uri)  # before the lock, or the last of them waits for the imports of all others
    with contextlib.ExitStack() as locks:
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            if not locks.enter_context(locked(path.with_name(path.name + ".lock"), wait)):
                raise StoreError(f"{redact(uri)}: another process has been writing to it for {wait:.0f} s.")
        Store(uri, experiment)


def initialise(tracking: Any, timeout: float = 120.0) -> str | None:
    """`prepare_store` in another process (the import of MLflow takes seconds), for a launcher before it queues jobs.

    tracking: kind, uri, experiment (TrackingConfig). Returns a sentence where the store cannot be made, else None.
    """
    if tracking.kind != "mlflow" or importlib.util.find_spec("mlflow") is None:
        return None
    command = [sys.executable, "-m", "grpo_sweeps.sync", "--init", "uri=env", f"experiment={tracking.experiment}"]
    try:
        done = subprocess.run(
            command, env=_environment(resolve_uri(tracking.uri)), capture_output=True, text=True, timeout=timeout
        )
    except subprocess.TimeoutExpired:
        return f"the tracking store did not answer for {timeout:.0f} s."
    lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
    return None if done.returncode == 0 else redact(lines[-1])


def _environment(uri: str) -> dict[str, str]:
    """Of a child that copies: the address is not on the command line, which every user of the machine can read."""
    root = str(Path(grpo_sweeps.__path__[0]).parent)
    return {
        **os.environ,
        "MLFLOW_TRACKING_URI": uri,
        "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")])),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }


def _has_metrics(folder: Path) -> bool:
    try:
        return (folder / "metrics.jsonl").stat().st_size > 0
    except FileNotFoundError:
        return False


def _look(folder: Path, stale: bool) -> tuple[Any, ...]:
    """What changes when there is something to copy."""
    sizes: list[tuple[int, int] | None] = []
    for name in ("status.json", "metrics.jsonl", "config.yaml", "log.txt"):
        try:
            stat = (folder / name).stat()
        except FileNotFoundError:
            sizes.append(None)
        else:
            sizes.append((stat.st_size, stat.st_mtime_ns))
    return (stale, *sizes)


def _handle(action: signal.Handlers) -> None:
    """Ignore the signals that a scheduler sends to every process of a job, this one included, but that mean the run;
    or take them again."""
    for number in JOB_SIGNALS:
        signal.signal(number, action)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, JOB_SIGNALS)


def _is_follower() -> bool:
    """`Follower` starts its child with the job's signals blocked; by hand nobody does."""
    return set(JOB_SIGNALS) <= signal.pthread_sigmask(signal.SIG_BLOCK, [])


def follow(mirror: Mirror, stdin: TextIO, every: float = EVERY) -> int:
    """Copy what is new every few seconds until `stdin` ends, then once more. Exit code 0 when all has been copied.

    As a job's follower it is ended by signals only in that last pass: what it leaves undone then, `sync` completes.
    """
    if deaf := _is_follower():
        _handle(signal.SIG_IGN)
    with contextlib.suppress(OSError):
        os.nice(10)
    said: list[str] = []
    ended, down = False, False
    while not ended:
        # Until the first run shows up, look more often: the sweep should be seen in MLflow from its first steps on.
        ended = _ended(stdin, EVERY_DOWN if down else every if said or mirror.begun else min(1.0, every))
        if ended and deaf:
            _handle(signal.SIG_DFL)
        try:
            copied = mirror.copy(wait=WAIT if ended else 0.0)
            down, lines = False, mirror.problems
            if copied is None and ended:
                lines = [
                    "another process copies to the same store; python -m grpo_sweeps.sync completes this copy later."
                ]
        except (StoreError, OSError) as error:
            down, lines = True, [f"{redact(str(error))} The local record is whole; trying again."]
        for line in lines:
            if line not in said:
                print(f"{time.strftime('%H:%M:%S')} mirror: {line}", flush=True)
        said = lines
    return 1 if said else 0


def _ended(stdin: TextIO, seconds: float) -> bool:
    """Wait, at most so long, for the end of the input or a line on it."""
    try:
        ready, _, _ = select.select([stdin], [], [], seconds)
        return bool(ready)
    except KeyboardInterrupt:
        return True


def _changed(path: Path | None) -> int:
    try:
        return path.stat().st_mtime_ns if path is not None else 0
    except FileNotFoundError:
        return 0


class Follower:
    """Mirrors a sweep while the block runs; does nothing with `tracking=local` or without MLflow installed.

        with Follower("default", "runs", config.tracking, "runs/default/mirror.log"):
            ...  # train

    tracking: kind, uri, experiment (TrackingConfig). run: the identity of one run, for a job that mirrors its own
    alone. Never raises on account of MLflow. Leaving waits up to `wait` seconds for the last pass (for one run: for a
    sign of it) and then says how to complete it; it does not wait when a SystemExit passes, a job queued again.
    """

    def __init__(
        self,
        sweep: str,
        runs_dir: Path | str,
        tracking: Any,
        log_path: Path | str,
        run: str | None = None,
        wait: float = WAIT,
    ) -> None:
        self.sweep, self.runs_dir, self.tracking = sweep, Path(runs_dir).absolute(), tracking
        self.log_path, self.run, self.wait = Path(log_path), run, wait
        self._child: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Follower:
        if self.tracking.kind != "mlflow":
            return self
        if importlib.util.find_spec("mlflow") is None:
            print(
                "mirror: mlflow is not installed; the local record is kept alone (tracking=local: without this line)."
            )
            return self
        try:
            self._child = self._start()
        except (OSError, ConfigError) as error:
            print(f"mirror: not started ({error}); {self._later()}")
        return self

    def _start(self) -> subprocess.Popen[bytes]:
        environment = _environment(resolve_uri(self.tracking.uri))
        command = [sys.executable, "-m", "grpo_sweeps.sync", f"sweep={self.sweep}", f"runs_dir={self.runs_dir}"]
        command += [f"experiment={self.tracking.experiment}", "uri=env", "--follow"]
        if self.run is not None:
            command.append(f"run={self.run}")
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        # Inherited, so that a signal in the seconds before `follow` is reached does not kill it.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, JOB_SIGNALS)
        try:
            with open(self.log_path, "ab") as log:
                return subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=environment, start_new_session=True
                )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        child = self._child
        if child is None:
            return
        assert child.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended early: its exit code says so below
            child.stdin.write(b"end\n")
            child.stdin.flush()
        with contextlib.suppress(BrokenPipeError):
            child.stdin.close()
        if kind is not None and issubclass(kind, SystemExit):
            return  # the job is queued again, and its next turn copies on
        try:
            code = self._waited_for(child)
        except subprocess.TimeoutExpired:
            print(f"mirror: still copying to MLflow after {self.wait:.0f} s and going on by itself; {self._later()}")
            return
        except KeyboardInterrupt:
            print(f"mirror: not waited for; {self._later()}")
            raise
        if code != 0:
            print(f"mirror: the copy in MLflow is not complete (see {self.log_path}); {self._later()}")

    def _waited_for(self, child: subprocess.Popen[bytes]) -> int:
        """The child's exit code. For one run, `wait` is how long nothing may come of it: a server that hangs is told
        from one that has much to take."""
        began = last = time.monotonic()
        note = None if self.run is None else self.runs_dir / self.sweep / self.run / FILE_NAME
        before = _changed(note)
        while True:
            left = min(self.wait - (time.monotonic() - last), max(self.wait, WAIT) - (time.monotonic() - began))
            try:
                return child.wait(max(0.0, min(left, 0.5)))
            except subprocess.TimeoutExpired:
                if left <= 0:
                    raise
            if (now := _changed(note)) != before:
                before, last = now, time.monotonic()

    def _later(self) -> str:
        return f"nothing is lost: python -m grpo_sweeps.sync sweep={self.sweep} runs_dir={self.runs_dir} completes it."
