"""Executes one run from its frozen configuration. Every launcher ends here: folder, status, log and outcome."""

from __future__ import annotations

import logging
import os
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from grpo_sweeps.cli import say
from grpo_sweeps.config import RunConfig, to_mapping
from grpo_sweeps.paths import working_directory_kept
from grpo_sweeps.redaction import HIDDEN, redact, redact_mapping
from grpo_sweeps.sweep.identity import identity
from grpo_sweeps.sweep.ledger import status_or_none
from grpo_sweeps.sweep.origin import Origin, Stale
from grpo_sweeps.sweep.signals import Stops
from grpo_sweeps.text import visible
from grpo_sweeps.tracking import provenance
from grpo_sweeps.tracking import seal as seals
from grpo_sweeps.tracking.glance import NotWhole
from grpo_sweeps.tracking.locks import LOCK_FILE, Mine, NotOurs, only_writer
from grpo_sweeps.tracking.made_by import STALE
from grpo_sweeps.tracking.status import ENDED, RunStatus, State, StatusWriter, process_started, write_status
from grpo_sweeps.types import ConfigError

__all__ = ["CONFIG_FILE", "LOCK_FILE", "LOG_FILE", "RunResult", "Signals", "execute", "result_of"]

CONFIG_FILE, LOG_FILE = "config.yaml", "log.txt"
INTERRUPTED = "interrupted (Ctrl-C or SIGTERM)"
STALE_STATE = "stale"  # of a result: interrupted, by a start that would have been made by something else
ELSEWHERE = "another process is running this run"
TRACEBACK_LINES = 40  # of a failure, kept in status.json


@dataclass(frozen=True)
class RunResult:
    """How a run ended. `state` is that of its status, or "running" where another process holds the run and this one
    left it alone, or "stale" where something else would make it now. `config_error` tells a configuration with which
    the run could not begin, and a stale run, from a failure."""

    identity: str
    name: str
    state: str
    run_dir: str
    step: int = 0
    total: int = 0
    error: str | None = None
    config_error: bool = False

    @property
    def ok(self) -> bool:
        """True when nothing went wrong: the run has finished, or another process is running it."""
        return self.state == "finished" or self.elsewhere

    @property
    def elsewhere(self) -> bool:
        """True when another process is running it."""
        return self.state == "running"

    @property
    def log(self) -> Path:
        return Path(self.run_dir) / LOG_FILE


def _never() -> bool:
    return False


@dataclass(frozen=True)
class Signals:
    """Signals that the caller received. `interrupted`: Ctrl-C or SIGTERM; `requeued`: Submitit has put the job back in
    the queue. `grace_s`: seconds from the first signal to the moment when a job is ended in mid-step."""

    interrupted: Callable[[], bool] = _never
    requeued: Callable[[], bool] = _never
    grace_s: float | None = None


def execute(
    frozen: Mapping[str, Any],
    run_dir: Path | str,
    *,
    name: str = "",
    command: str = "",
    signals: Signals = Signals(),
    job_token: str | None = None,
) -> RunResult:
    """Train the run that `frozen` describes (the written form of RunConfig) in `run_dir` and return how it ended.

    A failure is in the result, in status.json and, with its traceback, in log.txt. A signal that asks the run to end
    (see sweep/signals.py) is obeyed at the end of the step, after a checkpoint: Ctrl-C and SIGTERM give the state
    `interrupted`, Submitit's signal puts the job back into the queue. Only what asks the process itself to end is
    raised: the SystemExit of a requeued job and submitit's UncompletedJobError. A run that has finished in the
    meantime, or that another process holds, is left alone. A folder that cannot be written (a full disk) is a failure
    too, although only the result can say so. job_token: that of the job that was submitted for this run.
    """
    config = RunConfig.from_mapping(frozen)
    run_dir, name = Path(run_dir), name or f"R={config.R} seed={config.seed}"
    # A reward may change the working directory: the record stays in one place, and so does the next run's.
    here = run_dir.absolute()
    try:
        with working_directory_kept(), Stops(signals.grace_s) as stops:
            result = _execute(config, here, name, command, job_token, signals, stops)
            return replace(result, run_dir=str(run_dir))
    except OSError as error:
        say(f"{name}: its folder could not be written ({_reason(error)})")
        total = config.trainer.steps
        return RunResult(identity(config), name, "failed", str(run_dir), total=total, error=_reason(error))


def _execute(
    config: RunConfig, run_dir: Path, name: str, command: str, token: str | None, signals: Signals, stops: Stops
) -> RunResult:
    """Do the work of `execute`, which reports what the file system refuses."""
    run_dir.mkdir(parents=True, exist_ok=True)
    status = RunStatus(
        state="running", identity=identity(config), name=name, sweep=config.sweep,
        total=config.trainer.steps, host=provenance.host(), pid=os.getpid(), pid_started=process_started(os.getpid()),
        job_id=provenance.job_id(), job_token=token, started=time.time(), command=command,
    )  # fmt: skip
    with only_writer(run_dir) as mine:
        previous = status_or_none(run_dir)
        step = previous.step if previous else 0
        if mine is None:
            return _result(run_dir, replace(status, step=step, error=ELSEWHERE))
        if previous and previous.state == "finished" and previous.reached(config.trainer.steps):
            return _result(run_dir, previous)
        origin = Origin(config, run_dir, command)
        if changed := origin.start():
            refused = replace(previous or status, state="interrupted", ended=time.time(), error=changed)
            write_status(run_dir, refused)
            say(f"{name}: {changed}")
            return _result(run_dir, refused)
        status = replace(
            status, commit=provenance.commit(), dirty=provenance.dirty(), versions=provenance.versions(),
            step=step, notes=previous.notes if previous else [],
        )  # fmt: skip
        write_config(run_dir, to_mapping(config))
        result = None
        try:
            with _logged_to(run_dir / LOG_FILE) as log, StatusWriter(run_dir, status, mine=mine) as writer:
                _log_start(writer, log, origin)
                result = _train(config, run_dir, writer, log, _Ears(signals, stops, mine, origin))
        except OSError as error:
            if result is None or result.ok:  # its status says nothing, or not the truth
                raise
            _say_unwritten(result.name, error)
        return result


@dataclass(frozen=True)
class _Ears:
    """Everything that may end a run from outside, and what makes it."""

    signals: Signals
    stops: Stops
    mine: Mine
    origin: Origin


def _log_start(writer: StatusWriter, log: logging.Logger, origin: Origin) -> None:
    """Write the log's first line, and a note where the code is no longer what was submitted."""
    status = writer.status
    log.info("run %s (%s) starts on %s, process %d", status.identity, status.name, status.host, os.getpid())
    for sentence in origin.write():
        log.info("%s", sentence)
        writer.note(sentence)


def _train(config: RunConfig, run_dir: Path, writer: StatusWriter, log: logging.Logger, ears: _Ears) -> RunResult:
    """Call the training loop and record how it ended."""
    config_error = False
    try:
        _loop(config, run_dir, writer, log, ears)
    except NotOurs:
        say(f"{writer.status.name}: {ELSEWHERE}; this one has stopped")
        return _result(run_dir, replace(writer.status, state="running", error=ELSEWHERE))
    except Stale as changed:
        log.info("%s", changed)
        say(f"{writer.status.name}: {changed}")
        _note(writer, state="interrupted", ended=time.time(), error=str(changed))
    except KeyboardInterrupt:
        log.info("interrupted")
        _note(writer, state="interrupted", ended=time.time(), error=INTERRUPTED)
    except NotWhole as error:
        # Before training nothing has been touched: once what is missing is back, the run can go on.
        log.error("%s", error)
        state: State = "failed" if error.trained else "interrupted"
        _note(writer, state=state, ended=time.time(), error=str(error))
        return replace(_result(run_dir, writer.status), state="failed")
    except (Exception, SystemExit) as error:  # SystemExit: a function of the user's own may call sys.exit
        if isinstance(error, SystemExit) and ears.signals.requeued():
            log.info("stopped by a signal; the job is queued again")
            _note(writer, state="queued")
            raise
        if _is_not_requeued(error):
            log.info("%s", error)
            _note(writer, state="interrupted", ended=time.time(), error=str(error))
            raise
        trace = traceback.format_exc().rstrip()
        log.error("%s", trace)
        if ears.stops.leaving:  # a library turned the interruption into an error of its own, or there is no scontrol
            reason = INTERRUPTED if ears.stops.request == "stop" else f"not queued again: {_reason(error)}"
            _note(writer, state="interrupted", ended=time.time(), error=reason)
        else:
            sentence = isinstance(error, ConfigError)
            config_error = sentence and not ears.stops.begun  # later a function's value or the data are at fault
            tail = None if sentence else redact("\n".join(trace.splitlines()[-TRACEBACK_LINES:]))
            reason = str(error) if sentence else _reason(error)
            _note(writer, state="failed", ended=time.time(), error=reason, traceback=tail)
    else:
        log.info("finished")
        done = writer.status.step if writer.status.ended_by else max(config.trainer.steps, writer.status.step)
        writer.update(state="finished", ended=time.time(), step=done, error=None)
    result = _result(run_dir, writer.status)
    return replace(result, config_error=config_error or result.config_error)


def _loop(config: RunConfig, run_dir: Path, writer: StatusWriter, log: logging.Logger, ears: _Ears) -> None:
    """Train until the end or until somebody asks to stop.

    Raises KeyboardInterrupt after a stop, and what Submitit raises when the job has been queued again or may not be.
    """
    from grpo_sweeps.loop.train import train
    from grpo_sweeps.loop.watch import Stopped, Watch

    def begin(done: int) -> None:
        writer.update(step=done)  # at once: the records of later steps are gone
        ears.stops.begin()

    def step(done: int, total: int, metrics: Mapping[str, float]) -> None:
        writer.step(done)
        ears.stops.begin()
        log.info("step %d/%d  %s", done, total, _numbers(metrics))

    def guard() -> None:
        if not ears.mine():
            raise NotOurs

    def stop() -> bool:
        guard()
        return ears.stops.requested() or ears.signals.interrupted()

    def note(sentence: str) -> None:
        say(f"{writer.status.name}: {sentence}")
        log.info("%s", sentence)
        try:
            writer.note(sentence)
        except OSError as error:  # the full disk that the sentence may be about
            _say_unwritten(writer.status.name, error)

    def doing(sentence: str) -> None:
        say(f"{writer.status.name}: {sentence}")
        log.info("%s", sentence)

    def spent(done: int, sentence: str) -> None:
        log.info("%s", sentence)
        writer.update(step=done, total=done, ended_by="trainer.tokens")

    try:
        watch = Watch(begin, step, stop, note, guard, doing, ears.origin.loaded, spent)
        train(config, run_dir, watch, writer.status.name)
    except Stopped:
        log.info("stopped after step %d (%s)", writer.status.step, ears.stops.cause or "asked to")
        if ears.stops.request == "requeue":
            _note(writer, state="queued")  # before the requeue, which kills this process
            ears.stops.requeue()
        raise KeyboardInterrupt from None


def _note(writer: StatusWriter, **changes: Any) -> None:
    """Write how a run ended; where that cannot be written, the result still says it."""
    try:
        writer.update(**changes)
    except OSError as error:
        _say_unwritten(writer.status.name, error)


def _say_unwritten(name: str, error: OSError) -> None:
    say(f"{name}: its status could not be written ({_reason(error)})")


def result_of(run_dir: Path) -> RunResult | None:
    """The result that an ended run left in its status.json; None while it has not ended."""
    status = status_or_none(run_dir)
    return _result(run_dir, status) if status and status.state in ENDED else None


def _result(run_dir: Path, status: RunStatus) -> RunResult:
    stale = status.state == "interrupted" and (status.error or "").startswith(STALE)
    state = STALE_STATE if stale else status.state
    return RunResult(
        status.identity, status.name, state, str(run_dir), status.step, status.total, status.error, config_error=stale
    )  # fmt: skip


def _reason(error: BaseException) -> str:
    """The error's type, the first line of its message, and what was noted of it on the way here."""
    lines = str(error).strip().splitlines()
    notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
    return (f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__) + notes


def _is_not_requeued(error: BaseException) -> bool:
    """True for UncompletedJobError, which Submitit raises in the loop when a job's time is up for good."""
    return any(
        cls.__name__ == "UncompletedJobError" and cls.__module__.startswith("submitit.") for cls in type(error).__mro__
    )


def _numbers(metrics: Mapping[str, float]) -> str:
    shown = {"reward": "reward", "spectral/effective_rank": "effective rank"}
    return "  ".join(f"{label} {metrics[key]:.3f}" for key, label in shown.items() if key in metrics)


def write_config(run_dir: Path, mapping: Mapping[str, Any]) -> None:
    """Write config.yaml. A secret in the configuration is what runs has, and not in the file: `***` stands for it, and
    the file is for its owner alone. Whoever starts the run again gives the secret again.
    """
    import yaml

    text = str(yaml.safe_dump(redact_mapping(mapping), sort_keys=False, allow_unicode=True, width=120))
    seals.rewrite(run_dir, CONFIG_FILE, text, private=HIDDEN in text)


class _Redacting(logging.Formatter):
    """Writes a record's text without secrets, and without characters that a terminal would obey."""

    def format(self, record: logging.LogRecord) -> str:
        return visible(redact(super().format(record)))


@contextmanager
def _logged_to(path: Path) -> Iterator[logging.Logger]:
    """Send every log record to `path` too; the yielded logger writes there alone, so the terminal keeps its progress
    bar."""
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(_Redacting("%(asctime)s  %(message)s", "%Y-%m-%d %H:%M:%S"))
    root, own = logging.getLogger(), logging.getLogger("grpo_sweeps.run_log")
    own.setLevel(logging.INFO)
    own.propagate = False
    root.addHandler(handler)
    own.addHandler(handler)
    try:
        yield own
    finally:
        root.removeHandler(handler)
        own.removeHandler(handler)
        handler.close()
