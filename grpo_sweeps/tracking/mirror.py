"""The mirror: lets the sweep's tracker copy local records from another process while runs go on; and `sync`, by hand.

`Follower` starts `python -m grpo_sweeps.sync sweep=NAME --follow` at low priority in its own session, so that neither
a tracker's imports nor a slow server costs the training process anything, and Ctrl-C reaches only the training.
The child ends after a last pass when its standard input closes, which also happens when its parent is killed, or when
it has another parent: what a reward has forked may keep that input open; at the latest LAST_PASS seconds later. Nothing
that goes wrong in it reaches the training: it prints a line into its log, and `python -m grpo_sweeps.sync` completes
the copy later.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from grpo_sweeps.config import TrackingConfig
from grpo_sweeps.redaction import HIDDEN, redact
from grpo_sweeps.text import count, show
from grpo_sweeps.tracking.children import python_path
from grpo_sweeps.tracking.provenance import mixed_in
from grpo_sweeps.tracking.tracker import (
    BUILT_IN,
    LOCAL,
    NotInstalled,
    Tracker,
    TrackerError,
    attached_by,
    beside_records,
    copied_by,
    load,
    prepared_by,
)
from grpo_sweeps.types import ConfigError

URI = "GRPO_SWEEPS_TRACKING_URI"  # tells a child the address, since every user of the machine can read its command line
EVERY = 5.0  # seconds between passes
EVERY_DOWN = 30.0  # after a pass that found no store
WAIT = 60.0  # seconds that a launcher waits for the last pass
LAST_PASS = 120.0  # seconds after the end of its input in which a follower is gone, done or not
JOB_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM)  # SIGCONT does nothing to a process that runs


def initialise(tracking: TrackingConfig, timeout: float = 120.0) -> str | None:
    """Make the tracker's place before a launcher queues jobs, by `sync --init` in another process (the import of MLflow
    takes seconds). Returns a sentence where it cannot be made, else None."""
    try:
        if load(tracking) is None:
            return None
    except NotInstalled:
        return None
    command = [sys.executable, "-m", "grpo_sweeps.sync", "--init", *_words(tracking)]
    try:
        done = subprocess.run(command, env=_environment(tracking), capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        return f"the tracking store did not answer for {timeout:.0f} s."
    lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
    return None if done.returncode == 0 else redact(lines[-1].removeprefix("error: "))


def _words(tracking: TrackingConfig) -> list[str]:
    """The words that tell `sync` the tracker."""
    return [f"tracker={tracking.kind}", "uri=env", f"experiment={tracking.experiment}"]


def _environment(tracking: TrackingConfig) -> dict[str, str]:
    """The environment of a child that copies; it finds a tracker of the user's own where this process does."""
    own = [path for path in sys.path if path and not path.startswith((sys.prefix, sys.base_prefix))]
    return {
        **os.environ,
        URI: tracking.uri or "",
        "PYTHONPATH": python_path(*(own if tracking.kind not in BUILT_IN else ())),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }


def _handle(action: signal.Handlers) -> None:
    """Ignore, or obey again, the signals that a scheduler sends to every process of a job but that are meant for the
    run."""
    for number in JOB_SIGNALS:
        signal.signal(number, action)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, JOB_SIGNALS)


def _is_follower() -> bool:
    """True in a child of `Follower`, which starts it with the job's signals blocked; by hand nobody does."""
    return set(JOB_SIGNALS) <= signal.pthread_sigmask(signal.SIG_BLOCK, [])


def follow(tracker: Tracker, sweep_dir: Path, only: str | None, stdin: TextIO, every: float = EVERY) -> int:
    """Copy what is new every few seconds until `stdin` ends, then once more. Exit code 0 when all has been copied.

    In a job, signals end it only in that last pass: `sync` completes what it then leaves undone. The process ends
    LAST_PASS seconds after its input at the latest, with exit code 1, whatever the store does.
    """
    with _gone_after(stdin, LAST_PASS):
        return _follow(tracker, sweep_dir, only, stdin, every)


@contextlib.contextmanager
def _gone_after(stdin: TextIO, seconds: float) -> Iterator[None]:
    """End this process so many seconds after the end of `stdin`, if the block still runs then. A thread does it: the
    driver of a database that hangs lets no signal through."""
    done = threading.Event()

    def watch() -> None:
        while not done.is_set():
            if _readable(stdin, 1.0):
                break
        if not done.wait(seconds):
            show(
                f"{time.strftime('%H:%M:%S')} mirror: not complete {seconds:.0f} s after the end, it is given up; "
                f"python -m grpo_sweeps.sync completes the copy.",
            )
            os._exit(1)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()


def _follow(tracker: Tracker, sweep_dir: Path, only: str | None, stdin: TextIO, every: float) -> int:
    if deaf := _is_follower():
        _handle(signal.SIG_IGN)
    with contextlib.suppress(OSError):
        os.nice(10)
    said: list[str] = []
    parent, ended, down, begun = os.getppid(), False, False, False
    while not ended:
        # Until the first run shows up, look more often: the tracker should show the sweep from its first steps on.
        ended = _ended(stdin, EVERY_DOWN if down else every if said or begun else min(1.0, every))
        ended = ended or (deaf and os.getppid() != parent)
        if ended and deaf:
            _handle(signal.SIG_DFL)
        try:
            copied = copied_by(tracker, sweep_dir, only, WAIT if ended else 0.0)
            down, lines = False, [] if copied is None else list(copied.problems)
            begun |= copied is not None and copied.runs > 0
            if copied is None and ended:
                lines = [
                    "another process copies to the same store; python -m grpo_sweeps.sync completes this copy later."
                ]
        except (TrackerError, OSError) as error:
            down, lines = True, [f"{redact(str(error))} The local record is whole; trying again."]
        for line in lines:
            if line not in said:
                show(f"{time.strftime('%H:%M:%S')} mirror: {line}")
        said = lines
    return 1 if said else 0


def _ended(stdin: TextIO, seconds: float) -> bool:
    """Wait, at most so long, for the end of the input or a line on it."""
    try:
        return _readable(stdin, seconds)
    except KeyboardInterrupt:
        return True


def _readable(stdin: TextIO, seconds: float) -> bool:
    ready, _, _ = select.select([stdin], [], [], seconds)
    return bool(ready)


def _last_change(folder: Path, log: Path) -> int:
    """When a file of the run's folder was last written, except the log: a tracker notes there what it has copied."""
    times = []
    with contextlib.suppress(FileNotFoundError):
        for entry in os.scandir(folder):
            if Path(entry.path) != log:
                times.append(entry.stat().st_mtime_ns)
    return max(times, default=0)


class Follower:
    """Mirrors a sweep while the block runs; does nothing with `tracking=local` or without what the tracker needs.

        with Follower("default", "runs", config.tracking, "runs/default/mirror.log"):
            ...  # train

    run: the identity of one run, for a job that mirrors its own alone. Never raises on account of a tracker. Leaving
    waits up to `wait` seconds for the last pass (for one run: for a sign of it) and then says how to complete it; it
    does not wait when a SystemExit passes, a job queued again.
    """

    def __init__(
        self,
        sweep: str,
        runs_dir: Path | str,
        tracking: TrackingConfig,
        log_path: Path | str,
        run: str | None = None,
        wait: float = WAIT,
    ) -> None:
        self.sweep, self.runs_dir, self.tracking = sweep, Path(runs_dir).absolute(), tracking
        self.log_path, self.run, self.wait = Path(log_path), run, wait
        self._child: subprocess.Popen[bytes] | None = None
        self._name = ""

    def __enter__(self) -> Follower:
        try:
            tracker = load(self.tracking)
            if tracker is not None:
                self._name, self._child = tracker.name, self._start()
        except NotInstalled as error:
            show(
                f"mirror: {error.package} is not installed; the local record is kept alone "
                f"(tracking=local: without this line)."
            )
        except (OSError, ConfigError) as error:
            show(f"mirror: not started ({error}); {self._later()}")
        return self

    def _start(self) -> subprocess.Popen[bytes]:
        environment = _environment(self.tracking)
        command = [sys.executable, "-m", "grpo_sweeps.sync", f"sweep={self.sweep}", f"runs_dir={self.runs_dir}"]
        command += [*_words(self.tracking), "--follow"]
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
            show(
                f"mirror: still copying to {self._name} after {self.wait:.0f} s and going on by itself; {self._later()}"
            )
            return
        except KeyboardInterrupt:
            show(f"mirror: not waited for; {self._later()}")
            raise
        if code != 0:
            show(f"mirror: the copy in {self._name} is not complete (see {self.log_path}); {self._later()}")

    def _waited_for(self, child: subprocess.Popen[bytes]) -> int:
        """The child's exit code. For one run, `wait` is how long nothing may come of it: a server that hangs is told
        from one that has much to take."""
        began = last = time.monotonic()
        before = self._sign()
        while True:
            left = min(self.wait - (time.monotonic() - last), max(self.wait, WAIT) - (time.monotonic() - began))
            try:
                return child.wait(max(0.0, min(left, 0.5)))
            except subprocess.TimeoutExpired:
                if left <= 0:
                    raise
            if (now := self._sign()) != before:
                before, last = now, time.monotonic()

    def _sign(self) -> int:
        """A value that changes while the copy of one run advances."""
        if self.run is None:
            return 0
        return _last_change(self.runs_dir / self.sweep / self.run, self.log_path.absolute())

    def _later(self) -> str:
        return f"nothing is lost: python -m grpo_sweeps.sync sweep={self.sweep} runs_dir={self.runs_dir} completes it."


def configured(sweep_dir: Path) -> dict[str, Any]:
    """The `tracking` part of the configuration of the sweep's first run, empty when there is none."""
    from grpo_sweeps.tracking.local import read_config
    from grpo_sweeps.tracking.status import RecordError

    for path in sorted(sweep_dir.glob("*/config.yaml")):
        try:
            tracking = read_config(path.parent).get("tracking")
        except RecordError:
            continue  # the copy of this run names it
        if isinstance(tracking, dict):
            return tracking
    return {}


def settings(given: dict[str, Any], kind: str | None, uri: str | None, experiment: str | None) -> TrackingConfig:
    """The tracker that `sync` copies to: by its command, else as the runs were configured (`given`), else MLflow.

    An address belongs to its tracker: a configured one is used for no other. `uri="env"` leaves it out as well.
    """
    before = str(given.get("kind") or LOCAL)
    kind = kind or (before if before != LOCAL else "mlflow")
    if uri == "env":
        uri = os.environ.get(URI)
    elif not uri and before in (LOCAL, kind):
        uri = given.get("uri")
        if uri and HIDDEN in str(uri):
            if not os.environ.get("MLFLOW_TRACKING_URI"):
                raise ConfigError(
                    f"uri={uri}: the runs' configuration keeps no password; give uri=... or MLFLOW_TRACKING_URI"
                )
            uri = None
    name = experiment or given.get("experiment") or "grpo_sweeps"
    return TrackingConfig(kind=kind, uri=str(uri) if uri else None, experiment=str(name))


def prepare(tracking: TrackingConfig) -> int:
    """Make the tracker's place for `sync --init`; says so and returns the exit code."""
    tracker = _loaded(tracking)
    try:
        prepared_by(tracker)
    except (TrackerError, OSError) as error:
        show(redact(str(error)), sys.stderr)
        return 1
    show(f"experiment {tracking.experiment} is ready -> {tracker.place}")
    return 0


def sync(
    sweep_dir: Path,
    tracking: TrackingConfig,
    only: str | None = None,
    going_on: bool = False,
    report: Path | None = None,
) -> int:
    """Copy a sweep, or the one run `only`, once; with going_on until the standard input ends. Says what was done and
    returns the exit code. report: the folder of the sweep's report, whose files become artifacts of the parent run.

    Raises:
        ConfigError: for a tracker that cannot be made. NotInstalled comes after the records have been corrected.
    """
    try:
        tracker = _loaded(tracking)
    except NotInstalled:
        if not going_on:
            correct(sweep_dir, only)
        raise
    problems = [] if going_on else correct(sweep_dir, only)
    sweep_dir.mkdir(parents=True, exist_ok=True)
    if going_on and sys.stdin is not None:
        return follow(tracker, sweep_dir, only, sys.stdin)
    name = sweep_dir.name
    try:
        copied = copied_by(tracker, sweep_dir, only, WAIT, whole=True)
        if copied is not None and report is not None and report.is_dir():
            copied.artifacts += attached_by(tracker, sweep_dir, report, WAIT) or 0
    except (TrackerError, OSError) as error:
        show(
            f"{name}: {redact(str(error))} The local record is whole; run this again when the store is there.",
            sys.stderr,
        )
        return 1
    if copied is None:
        show(f"{name}: another process has been copying to {tracker.place} for a minute; try again.", sys.stderr)
        return 1
    for sentence in (*copied.problems, *(f"{name}: {sentence}" for sentence in mixed_in(sweep_dir))):
        show(sentence, sys.stderr)
    new = f"{count(copied.runs)}, {count(copied.points, 'point')} and {count(copied.artifacts, 'file')} new"
    show(f"{name}: {new} -> {tracker.place}")
    return 1 if copied.problems or problems else 0


def look_beside(runs_dir: Path, tracking: TrackingConfig, sweep: str | None, prune: bool) -> int:
    """Say what the tracker holds of this folder's runs without a record here, or remove it; returns the exit code."""
    try:
        for sentence in beside_records(_loaded(tracking), runs_dir, sweep, prune, WAIT):
            show(sentence)
    except (TrackerError, OSError) as error:
        show(f"{redact(str(error))} What is there beside the records is not known.", sys.stderr)
        return 1
    return 0


def _loaded(tracking: TrackingConfig) -> Tracker:
    tracker = load(tracking)
    if tracker is None:
        raise ConfigError("tracker=local: copies nothing; give mlflow or the dotted path of a class")
    return tracker


def correct(sweep_dir: Path, only: str | None) -> list[str]:
    """Recompute what older versions logged; prints what was done and could not be done, and returns the latter."""
    from grpo_sweeps.tracking.locks import only_writer
    from grpo_sweeps.tracking.recompute import correct_sweep

    said, problems = correct_sweep(sweep_dir, only_writer, only)
    for sentence in said:
        show(sentence)
    for problem in problems:
        show(problem, sys.stderr)
    return problems
