"""The opening of a sweep's runs: from deciding what is due until it is known which jobs do it.

It holds the sweep's lock, so that two commands given at once cannot both find a run missing and start it twice. What it
writes into the runs' folders (the status `queued` and the configuration as it was composed) is taken back for every run
whose submission is refused: nothing ran, so nothing may say that something did.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from grpo_sweeps.cli import say
from grpo_sweeps.files import write_text
from grpo_sweeps.sweep.execute import CONFIG_FILE, write_config
from grpo_sweeps.sweep.ledger import set_aside, status_or_none
from grpo_sweeps.sweep.plan import Plan, PlannedRun
from grpo_sweeps.sweep.recover import NOTE, recover
from grpo_sweeps.tracking import provenance
from grpo_sweeps.tracking import seal as seals
from grpo_sweeps.tracking.locks import locked
from grpo_sweeps.tracking.status import FILE_NAME, RunStatus, process_started, write_status
from grpo_sweeps.types import ConfigError

LOCK_FILE = ".launch.lock"
LOCK_WAIT_S = 120.0
WRITTEN = (FILE_NAME, CONFIG_FILE, seals.FILE_NAME, provenance.SOURCE_JSON, provenance.SOURCE_DIFF)  # at submission


@dataclass(frozen=True)
class _Before:
    """What a run's folder held before it was opened."""

    files: dict[str, str | None]  # name -> text; None where there was no such file
    new: bool  # the folder was not there
    aside: Path | None  # where the replaced folder was moved to


class Opening:
    """A context that decides the plan under the sweep's lock and can restore the runs' folders before releasing it."""

    def __init__(self, plan: Plan, wait_s: float = LOCK_WAIT_S) -> None:
        self.plan = plan
        self._wait_s = wait_s
        self._stack = contextlib.ExitStack()
        self._before: dict[str, _Before] = {}
        self._source: provenance.Source | None = None  # the same for all runs of a command

    def __enter__(self) -> Opening:
        """Recover lost statuses, take the lock and decide again. Raises ConfigError where another command holds it."""
        if not self.plan.dry_run and self.plan.redo != "all":
            for run in self.plan.runs:
                if recover(run.run_dir):
                    say(f"{run.name}: {NOTE} ({run.run_dir})")
        if not self.plan.due:
            return self
        folder, config = self.plan.folder, self.plan.runs[0].config
        with refused_by_the_file_system(config.runs_dir, folder):
            folder.mkdir(parents=True, exist_ok=True)
            held = self._stack.enter_context(locked(folder / LOCK_FILE, self._wait_s))
        if not held:
            self._stack.close()
            raise ConfigError(
                f"sweep={config.sweep}: another command has been starting its runs for {self._wait_s:.0f} s; give this "
                f"one again when that one has said what it submitted"
            )
        self.plan = self.plan.decided()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Release the lock; after an error before anything was submitted, put the folders back first."""
        try:
            if isinstance(error, Exception):
                self.put_back([run for run in self.plan.due if run.identity in self._before])
        finally:
            self._stack.close()

    def submitted(self) -> None:
        """Release the lock: it is written down who does the runs, so other commands may decide."""
        self._before.clear()
        self._stack.close()

    def queue(self, run: PlannedRun) -> None:
        """Make the run's folder with its status, configuration and source: `status` then shows that it waits, and what
        was composed is what runs."""
        with refused_by_the_file_system(run.config.runs_dir, run.run_dir):
            aside = set_aside(run.run_dir) if run.decision.action == "redo" else None
            new = not run.run_dir.exists()
            run.run_dir.mkdir(parents=True, exist_ok=True)
            files = {name: _text_or_none(run.run_dir / name) for name in WRITTEN}
            self._before[run.identity] = _Before(files, new, aside)
            write_config(run.run_dir, run.frozen)
            self._source = self._source or provenance.snapshot(self.plan.command)
            made_by = run.made_by
            if run.decision.action == "continue":
                status = status_or_none(run.run_dir)
                made_by = made_by.going_on(provenance.read_made_by(run.run_dir), status.step if status else 0)
            provenance.write(run.run_dir, replace(self._source, made_by=made_by, choices=dict(run.choices)))
            write_status(run.run_dir, _queued(run, self.plan.command))

    def put_back(self, runs: Iterable[PlannedRun]) -> None:
        """Leave the folders of these runs as `queue` found them."""
        for run in runs:
            before = self._before.pop(run.identity)
            for name, text in before.files.items():
                if text is None:
                    (run.run_dir / name).unlink(missing_ok=True)
                else:
                    write_text(run.run_dir / name, text)
            if before.aside:
                shutil.rmtree(run.run_dir)
                before.aside.rename(run.run_dir)
            elif before.new:
                run.run_dir.rmdir()


@contextlib.contextmanager
def refused_by_the_file_system(runs_dir: str, path: Path) -> Any:
    """A context that turns an OSError into one sentence about runs_dir."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"runs_dir={runs_dir}: {path} cannot be made or written ({error.strerror or error}); "
            f"a folder that this user may write is needed"
        ) from error


def _queued(run: PlannedRun, command: str) -> RunStatus:
    before = status_or_none(run.run_dir) or RunStatus(state="queued", identity=run.identity)
    return replace(
        before, state="queued", name=run.name, sweep=run.config.sweep, total=run.config.trainer.steps, command=command,
        host=provenance.host(), pid=os.getpid(), pid_started=process_started(os.getpid()), job_id=None, job_token=None,
        heartbeat=time.time(), error=None, ended=None,
    )  # fmt: skip


def _text_or_none(path: Path) -> str | None:
    """The file's text, None without a file. Bytes that are no text are replaced: such a file was damaged before."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return None
