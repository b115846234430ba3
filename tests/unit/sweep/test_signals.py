"""Signals are noted and followed at a step's end; before the run has begun, twice, or too late, at once."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from grpo_sweeps.sweep import signals
from grpo_sweeps.sweep.execute import Signals, execute
from grpo_sweeps.sweep.job import RunJob
from grpo_sweeps.sweep.launch import RunFailed
from grpo_sweeps.sweep.signals import Stops
from grpo_sweeps.tracking.status import read_status
from tests.integration.sweep.test_ends import loop  # noqa: F401  (a fixture)
from tests.unit.sweep.conftest import frozen_config

ALL = (signal.SIGUSR2, signal.SIGTERM, signal.SIGINT)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Handlers as Submitit installs them: one that leaves, one that does nothing. What was called, in order."""
    heard: list[str] = []

    def leave(number: int, frame: object) -> None:
        heard.append("requeue")
        sys.exit(-1)

    before = {number: signal.getsignal(number) for number in ALL}
    signal.signal(signal.SIGUSR2, leave)
    signal.signal(signal.SIGTERM, lambda *_: heard.append("bypassed"))
    monkeypatch.setattr(signals, "TWICE_S", 0.05)
    yield heard
    for number, handler in before.items():
        signal.signal(number, handler)


def send(number: int) -> None:
    os.kill(os.getpid(), number)


def test_a_signal_is_noted_and_the_handlers_come_back(calls: list[str]) -> None:
    before = [signal.getsignal(number) for number in ALL]
    with Stops(60.0) as stops:
        stops.begin()
        assert not stops.requested()
        send(signal.SIGUSR2)
        assert (stops.request, stops.cause, calls) == ("requeue", "SIGUSR2", [])
        assert "deadline" in threads()
        send(signal.SIGTERM)  # what scontrol requeue and a preemption send as well
        assert stops.request == "requeue" and stops.requested()
        with pytest.raises(SystemExit):
            stops.requeue()
        time.sleep(0.1)
        send(signal.SIGUSR2)  # on its way out it is not to be disturbed
        assert calls == ["requeue"]
    assert [signal.getsignal(number) for number in ALL] == before
    ended = time.monotonic() + 5
    while "deadline" in threads():
        assert time.monotonic() < ended
        time.sleep(0.01)


def threads() -> set[str]:
    return {thread.name for thread in threading.enumerate()}


def test_before_the_run_has_begun_the_old_handler_is_called_at_once(calls: list[str]) -> None:
    with Stops(60.0), pytest.raises(SystemExit):
        send(signal.SIGUSR2)
    with Stops(60.0) as stops, pytest.raises(KeyboardInterrupt):
        send(signal.SIGTERM)
    assert stops.leaving and calls == ["requeue", "bypassed"]


@pytest.mark.parametrize(("number", "raised"), [(signal.SIGUSR2, SystemExit), (signal.SIGTERM, KeyboardInterrupt)])
def test_a_second_signal_does_not_wait_for_the_step(calls: list[str], number: int, raised: Any) -> None:
    with Stops() as stops:
        stops.begin()
        send(number)
        send(number)  # at the same moment: srun passes on what its task gets anyway
        assert stops.requested()
        time.sleep(0.1)
        with pytest.raises(raised):
            send(number)


@pytest.mark.parametrize(("number", "raised"), [(signal.SIGUSR2, SystemExit), (signal.SIGTERM, KeyboardInterrupt)])
def test_a_step_that_takes_too_long_is_cut(calls: list[str], number: int, raised: Any) -> None:
    with Stops(0.2) as stops:
        stops.begin()
        started = time.monotonic()
        send(number)
        with pytest.raises(raised):
            time.sleep(5)
        assert 0.1 < time.monotonic() - started < 3 and stops.leaving


def alarms_off() -> None:
    """What math_verify does around every answer."""
    signal.signal(signal.SIGALRM, signal.SIG_IGN)
    signal.alarm(0)
    signal.setitimer(signal.ITIMER_REAL, 0)


@pytest.mark.parametrize(("number", "raised"), [(signal.SIGUSR2, SystemExit), (signal.SIGTERM, KeyboardInterrupt)])
def test_a_reward_that_clears_the_alarm_keeps_its_deadline(calls: list[str], number: int, raised: Any) -> None:
    before = signal.getsignal(signal.SIGALRM)
    try:
        with Stops(0.2) as stops:
            stops.begin()
            send(number)
            alarms_off()
            with pytest.raises(raised):
                time.sleep(5)
            assert stops.leaving
    finally:
        signal.signal(signal.SIGALRM, before)


def test_an_interrupt_that_a_library_swallows_comes_again(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals, "AGAIN_S", 0.2)
    swallowed = 0
    with pytest.raises(KeyboardInterrupt), Stops(0.1) as stops:
        stops.begin()
        send(signal.SIGTERM)
        while swallowed < 2:
            try:
                time.sleep(5)
            except BaseException:
                swallowed += 1
        time.sleep(5)
    assert swallowed == 2


def test_a_step_that_ends_in_time_leaves_the_checkpoint_its_time(calls: list[str]) -> None:
    with Stops(0.1) as stops:
        stops.begin()
        send(signal.SIGUSR2)
        assert stops.requested()  # asked at the step's end: the checkpoint is written next
        time.sleep(0.3)
        assert calls == [] and not stops.leaving


def test_a_preemption_after_sigterm_is_a_requeue(calls: list[str]) -> None:
    with Stops(60.0) as stops:
        stops.begin()
        send(signal.SIGTERM)
        assert stops.request == "stop"
        send(signal.SIGUSR2)
        assert stops.request == "requeue"


def test_without_a_scheduler_the_preemption_signal_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    assert signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL
    with Stops() as stops:
        stops.begin()
        send(signal.SIGUSR2)
        assert stops.request == "stop"
    assert signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL


def test_what_is_ignored_stays_ignored_and_threads_are_left_alone() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Stops() as stops:
            send(signal.SIGINT)
            assert not stops.requested()
    finally:
        signal.signal(signal.SIGINT, before)
    found: list[Any] = []

    def work() -> None:
        with Stops(1.0) as stops:
            found.append((stops.requested(), signal.getsignal(signal.SIGTERM)))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [(False, signal.getsignal(signal.SIGTERM))]


def three_steps(number: int, at: int, seen: list[int]) -> Callable[..., None]:
    """A loop that gets a signal in the midst of a step."""

    def train(config: Any, run_dir: Path, watch: Any, name: str) -> None:
        watch.begin(0)
        for step in range(3):
            if step == at:
                send(number)
            seen.append(step)
            watch(step + 1, 3, {})

    return train


def test_a_job_is_queued_again_at_the_end_of_the_step(loop: Any, workplace: Path, calls: list[str]) -> None:  # noqa: F811
    job, seen = RunJob(), list[int]()
    at_exit: list[str] = []

    def leave(number: int, frame: object) -> None:
        at_exit.append(read_status(workplace / "one").state)  # the requeue kills the process: written before
        job.checkpoint()
        sys.exit(-1)

    signal.signal(signal.SIGUSR2, leave)
    loop(three_steps(signal.SIGUSR2, 1, seen))
    with pytest.raises(SystemExit):
        job(frozen_config(), str(workplace / "one"), "one", "", [])
    status = read_status(workplace / "one")
    assert (status.state, status.step, seen, at_exit) == ("queued", 2, [0, 1], ["queued"])
    assert "stopped after step 2 (SIGUSR2)" in (workplace / "one" / "log.txt").read_text()
    again = pickle.loads(pickle.dumps(job))
    loop(three_steps(0, 9, seen))
    assert again(frozen_config(), str(workplace / "one"), "one", "", []).state == "finished"


def test_scancel_leaves_a_job_interrupted_and_not_queued(loop: Any, workplace: Path, calls: list[str]) -> None:  # noqa: F811
    seen: list[int] = []
    loop(three_steps(signal.SIGTERM, 1, seen))
    with pytest.raises(RunFailed):
        RunJob()(frozen_config(), str(workplace / "one"), "one", "", [])
    status = read_status(workplace / "one")
    assert (status.state, status.step, seen, calls) == ("interrupted", 2, [0, 1], ["bypassed"])


@pytest.mark.parametrize("refusal", ["UncompletedJobError", "FileNotFoundError"])
def test_a_job_that_cannot_be_queued_again_says_so(loop: Any, workplace: Path, calls: list[str], refusal: str) -> None:  # noqa: F811
    from submitit.core.utils import UncompletedJobError

    error = {"UncompletedJobError": UncompletedJobError("timed-out too many times"),
             "FileNotFoundError": FileNotFoundError("scontrol")}[refusal]  # fmt: skip

    def refuse(number: int, frame: object) -> None:
        raise error

    signal.signal(signal.SIGUSR2, refuse)
    loop(three_steps(signal.SIGUSR2, 0, []))
    signals_ = Signals(requeued=lambda: False)
    if refusal == "UncompletedJobError":
        with pytest.raises(UncompletedJobError):
            execute(frozen_config(), workplace / "one", signals=signals_)
    else:
        assert execute(frozen_config(), workplace / "one", signals=signals_).state == "interrupted"
    status = read_status(workplace / "one")
    assert status.state == "interrupted" and status.error and str(error) in status.error and status.step == 1


def test_a_failure_in_the_step_of_the_signal_is_a_failure(loop: Any, workplace: Path, calls: list[str]) -> None:  # noqa: F811
    def train(config: Any, run_dir: Path, watch: Any, name: str) -> None:
        watch.begin(0)
        send(signal.SIGUSR2)
        raise FloatingPointError("diverged")

    loop(train)
    with pytest.raises(RunFailed):
        RunJob()(frozen_config(), str(workplace / "one"), "one", "", [])
    status = read_status(workplace / "one")
    assert status.state == "failed" and calls == []
    assert status.traceback and status.traceback.splitlines()[-1] == "FloatingPointError: diverged"
