"""Copies local records of runs to another place: the `Tracker` protocol, and how a configuration chooses one.

`tracking=mlflow` and `tracking=local` (none) are built in. Any other is a class by its dotted path, without a change to
the package:

    python -m grpo_sweeps.run R=4 tracking=custom tracking.kind=my_module.MyTracker
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from grpo_sweeps.config import TrackingConfig
from grpo_sweeps.types import ConfigError

LOCAL = "local"  # the local record alone
BUILT_IN = {"mlflow": "grpo_sweeps.tracking.mlflow_tracker.MLflowTracker"}


class TrackerError(RuntimeError):
    """The place cannot be reached now: one sentence. The local record is whole, and a later copy completes it."""


class NotInstalled(ConfigError):
    """A package that a tracker needs is not installed here."""

    def __init__(self, package: str) -> None:
        super().__init__(f"{package} is not installed here: pip install {package}, or run sync where it is.")
        self.package = package


@dataclass
class Copied:
    """What one pass sent, with a sentence for each run that could not be copied."""

    runs: int = 0
    points: int = 0
    artifacts: int = 0
    problems: tuple[str, ...] = ()

    def add(self, other: Copied) -> None:
        """Count what another run took as well."""
        self.runs += other.runs
        self.points += other.points
        self.artifacts += other.artifacts


class Tracker(Protocol):
    """Copies the local records of sweeps to one place. The class is called with the run's TrackingConfig.

    The local record (docs/records.md) is the truth and a tracker's place a copy of it that can be made again at any
    time. A tracker runs outside the training loop, in a process of its own at low priority: `copy` is called every few
    seconds while runs go on, once more when they have ended, and by `python -m grpo_sweeps.sync` when somebody asks. It
    reads run folders (`grpo_sweeps.tracking.local`, `grpo_sweeps.tracking.status`) and never writes into the records;
    a file of its own in a run's folder may note what was copied. It must be idempotent: killed at any moment and called
    again, nothing is missing and nothing is there twice. Records may also go back behind what was copied, when a run
    goes on from a checkpoint, and `sync` may add lines of correction to them.

    The launching process makes the object as well, before anything starts, to ask for `name` and `shared`: the
    constructor opens nothing and imports nothing heavy. It raises ConfigError, one sentence, for settings that it
    cannot use, and NotInstalled where a package is missing; the runs then go on with the local record alone.

    It may also have `compare(sweep_dir, only)`, which `python -m grpo_sweeps.verify` calls: (run, sentence) for each
    run whose copy is not as its record. `complete`, with the arguments of `copy`, is called in its place by
    `python -m grpo_sweeps.sync`: it trusts no note of what was copied and mends what differs. `beside(runs_dir, sweep,
    prune, wait)` returns sentences about copies whose records are gone, and removes them with prune=True;
    `attach(sweep_dir, report, wait)` copies the files of a report's folder and returns how many, None as `copy`.

    Attributes:
        name: what the place is called in sentences ("MLflow").
        place: the address in sentences, without user and password.
        shared: True when many processes may write at once. Then each job of a cluster copies its own run while it
            trains; otherwise only the launching process copies.
    """

    name: str
    place: str
    shared: bool

    def prepare(self) -> None:
        """Make the place where it is missing. Called once before many jobs meet there, and by `sync --init`.

        Raises:
            TrackerError: when it cannot be made now. The runs go on without it.
        """

    def copy(self, sweep_dir: Path, only: str | None = None, wait: float = 0.0) -> Copied | None:
        """Bring the copy of a sweep up to date with its records; a call that finds nothing new is cheap.

        Args:
            sweep_dir: the sweep's folder, `runs/<sweep>`, with a folder for each run. It may hold no run yet.
            only: the identity of the one run to copy; None: all of them.
            wait: seconds to wait for another process that copies to the same place.

        Returns:
            What was sent, with a sentence in `problems` for each run that could not be copied; None when another
            process kept the place for longer than `wait`.

        Raises:
            TrackerError, OSError: when the place cannot be reached. `copy` is called again, half a minute later.
        """


MEMBERS = ("name", "place", "shared", "prepare", "copy")


def load(tracking: TrackingConfig) -> Tracker | None:
    """The tracker that `tracking.kind` names; None for `local`.

    Raises:
        ConfigError: when it cannot be imported or made, or lacks a part of the protocol.
        NotInstalled: when a package that it needs is not here.
    """
    if tracking.kind == LOCAL:
        return None
    said = f"tracking.kind={tracking.kind}"
    module, _, name = BUILT_IN.get(tracking.kind, tracking.kind).rpartition(".")
    try:
        made: Tracker = getattr(importlib.import_module(module), name)(tracking)
    except ConfigError:
        raise
    except Exception as error:  # an error of the user's module, whatever its type
        raise ConfigError(
            f"{said}: no tracker can be made of it ({type(error).__name__}: {error}); the dotted path of a class "
            f"that takes a TrackingConfig is needed, such as my_module.MyTracker"
        ) from error
    missing = [member for member in MEMBERS if not hasattr(made, member)]
    if missing:
        raise ConfigError(f"{said}: it has no {', '.join(missing)}; see grpo_sweeps.tracking.tracker.Tracker")
    return made


def prepared_by(tracker: Tracker) -> None:
    """Call `tracker.prepare`. A fault in a tracker of the user's own is one sentence.

    Raises:
        TrackerError, OSError: as `Tracker.prepare`; the first also for any other error of a user's own tracker.
    """
    with _in_one_sentence(tracker, "prepare"):
        tracker.prepare()


def copied_by(tracker: Tracker, sweep_dir: Path, only: str | None, wait: float, whole: bool = False) -> Copied | None:
    """What `tracker.copy` returns; with whole, `tracker.complete` where it has that. A fault in a tracker of the user's
    own is one sentence, and its copy is tried again.

    Raises:
        TrackerError, OSError: as `Tracker.copy`; the first also for any other error of a tracker outside the package.
    """
    with _in_one_sentence(tracker, "copy"):
        copied = (getattr(tracker, "complete", tracker.copy) if whole else tracker.copy)(sweep_dir, only, wait)
    if copied is not None and not isinstance(copied, Copied):
        raise TrackerError(f"{tracker.name}: copy returned {copied!r}; a Copied or None is needed.")
    return copied


def beside_records(tracker: Tracker, runs_dir: Path, sweep: str | None, prune: bool, wait: float) -> list[str]:
    """What `tracker.beside` returns; nothing where it has no such method.

    Raises:
        TrackerError, OSError: as `copied_by`.
        ConfigError: for prune where it has no such method.
    """
    look = getattr(tracker, "beside", None)
    if look is None:
        if prune:
            raise ConfigError(f"prune=true: {tracker.name} has no beside(...), which would remove what is left there")
        return []
    with _in_one_sentence(tracker, "beside"):
        return list(look(runs_dir, sweep, prune, wait))


def attached_by(tracker: Tracker, sweep_dir: Path, report: Path, wait: float) -> int | None:
    """What `tracker.attach` returns; 0 where it has no such method.

    Raises:
        TrackerError, OSError: as `copied_by`.
    """
    attach = getattr(tracker, "attach", None)
    if attach is None:
        return 0
    with _in_one_sentence(tracker, "attach"):
        files: int | None = attach(sweep_dir, report, wait)
        return files


@contextmanager
def _in_one_sentence(tracker: Tracker, method: str) -> Iterator[None]:
    """A context in which any error of a user's own tracker becomes a TrackerError, one sentence; others pass."""
    try:
        yield
    except (TrackerError, OSError, ConfigError):
        raise
    except Exception as error:
        if _ours(tracker):
            raise
        raise _fault(tracker, method, error) from error


def _ours(tracker: Tracker) -> bool:
    return type(tracker).__module__.startswith("grpo_sweeps.")


def _fault(tracker: Tracker, method: str, error: Exception) -> TrackerError:
    """One sentence that names the tracker, its method and an error that the protocol does not know."""
    reason = " ".join(f"{type(error).__name__}: {error}".split())
    return TrackerError(f"{tracker.name}: {method} failed ({reason}).")


def shared(tracking: TrackingConfig) -> bool:
    """True when the jobs of a sweep may copy their own records at the same time."""
    tracker = load(tracking)
    return tracker is not None and tracker.shared
