"""Notes signals that ask a run to end, so that it can stop at a step's end with nothing lost.

Submitit's own handler of SIGUSR2 requeues the job and leaves wherever the run happens to be; its handler of SIGTERM
does nothing. While a `Stops` is active:

- the preemption signal (SIGUSR2 unless SUBMITIT_PREEMPT_SIGNAL says otherwise) is noted; when the run stands at a
  step's end, `requeue` calls Submitit's handler. Where nobody handles it (no SLURM) it is a request to stop;
- SIGTERM and Ctrl-C are noted as requests to stop without a requeue. SIGTERM after the preemption signal is ignored:
  `scontrol requeue` and a preemption send it too;
- before the run has begun (`begin`: a model takes minutes to load, and there is nothing to save), and when the same
  signal comes again or the time is up, the earlier handler is called at once.

The time is kept by a thread, which sends the main thread the signal that was heard once more. The process's timers
(`alarm`, `setitimer`) are left to the run's functions: rewards such as math_verify's set and clear them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, Literal, Self

TWICE_S = 1.0  # the same signal within this time counts once: srun passes on what its tasks get as well
TERM_GRACE_S = 20.0  # SLURM kills 30 s after SIGTERM unless KillWait says otherwise
AGAIN_S = 10.0  # between attempts to end a run whose time is up: a library's bare `except` may swallow one
Request = Literal["requeue", "stop"]


def preemption_signal() -> int:
    """The signal that Submitit has SLURM send before a time limit and at a preemption."""
    name = os.environ.get("SUBMITIT_PREEMPT_SIGNAL", "USR2")
    return int(getattr(signal, f"SIG{name}", signal.SIGUSR2))


class Stops:
    """A context in which the process notes what it is asked. In a thread other than the main one it notes nothing.

    grace_s: seconds from the first request to the moment when a job is ended, even in mid-step; None: no limit.
    request: what has been asked for: None, "requeue" or "stop"; `cause` is the signal's name.
    leaving: the run has been ended where it was, or the job given back; that causes whatever is raised then.
    """

    def __init__(self, grace_s: float | None = None) -> None:
        self.grace_s = grace_s
        self.request: Request | None = None
        self.cause = ""
        self.leaving = False
        self._begun = False
        self._before: dict[int, Any] = {}
        self._last: dict[int, float] = {}
        self._forced: Callable[[], object] | None = None
        self._deadline: _Deadline | None = None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in dict.fromkeys((signal.SIGTERM, signal.SIGINT, preemption_signal())):
                before = signal.getsignal(number)
                if before is signal.SIG_IGN or before is None:  # ignored on purpose, or not Python's to handle
                    continue
                self._before[int(number)] = before
                signal.signal(number, self._heard)
        return self

    def __exit__(self, *exc: object) -> None:
        self._set_deadline(0, 0.0)
        for number, before in self._before.items():
            signal.signal(number, before)

    def begin(self) -> None:
        """Note that the run's loop has begun: from here on there is something to save."""
        self._begun = True

    @property
    def begun(self) -> bool:
        """True once the run's loop has begun."""
        return self._begun

    def requested(self) -> bool:
        """True when the run is to end now, where it asks: no step is cut any more, so the checkpoint has its time."""
        if self.request is not None:
            self._set_deadline(0, 0.0)
        return self.request is not None

    def requeue(self) -> None:
        """Put the job back into the queue, once everything is saved, by Submitit's handler, which leaves the process.

        Raises SystemExit (queued again) or what Submitit raises where the job may not be requeued.
        """
        self._set_deadline(0, 0.0)
        self.leaving = True
        number = preemption_signal()
        self._before[number](number, None)

    def _heard(self, number: int, frame: FrameType | None) -> None:
        if self._deadline is not None and self._deadline.over(number):
            self._time_is_up()
            return
        now = time.monotonic()
        again = number in self._last and now - self._last[number] >= TWICE_S
        repeated = number in self._last and not again
        self._last[number] = now
        requeues = number == preemption_signal() and callable(self._before[number])
        if self.leaving and again and self.request == "stop":
            _interrupt()  # the first one was lost: Python ignores what is raised while an object is taken down
        if self.leaving or repeated or (self.request == "requeue" and not requeues):
            return
        self.cause = signal.Signals(number).name
        if requeues:
            self._forced = lambda: self._before[number](number, frame)
        else:
            self._forced = _interrupt
            self._tell(number, frame)
        self.request = "requeue" if requeues else "stop"
        if again or not self._begun:
            self._leave()
            return
        self._set_deadline(number, self._grace())
        _say(f"{self.cause}: stopping after this step" + ("" if requeues else "; once more to stop at once"))

    def _grace(self) -> float:
        if self.grace_s is None:
            return 0.0
        return self.grace_s if self.request == "requeue" else min(self.grace_s, TERM_GRACE_S)

    def _tell(self, number: int, frame: FrameType | None) -> None:
        """Call the earlier handler, but drop what it raises to end the run in mid-step."""
        before = self._before[number]
        if callable(before):
            with contextlib.suppress(KeyboardInterrupt):
                before(number, frame)

    def _time_is_up(self) -> None:
        """End the run: the current step is lost, the job is not."""
        if not self.leaving:
            _say("no time left to finish the step")
            self._leave()
        elif self.request == "stop":
            _interrupt()  # the last one was swallowed

    def _leave(self) -> None:
        """End the run where it is."""
        assert self._forced is not None
        self.leaving = True
        self._forced()

    def _set_deadline(self, number: int, seconds: float) -> None:
        """Have the signal sent again after so many seconds; 0: never, nor an earlier one."""
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = _Deadline(number, seconds) if seconds else None


class _Deadline:
    """A thread that sends the main thread a signal when the time is up, and again until it is cancelled."""

    def __init__(self, number: int, seconds: float) -> None:
        self._number, self._ends = number, time.monotonic() + seconds
        self._cancelled = threading.Event()
        threading.Thread(target=self._wait, name="deadline", daemon=True).start()

    def over(self, number: int) -> bool:
        """True for this signal once the time is up: then it is this thread's, or as urgent."""
        return number == self._number and time.monotonic() >= self._ends

    def cancel(self) -> None:
        self._cancelled.set()

    def _wait(self) -> None:
        main = threading.main_thread().ident
        assert main is not None
        pause = max(0.0, self._ends - time.monotonic())
        while not self._cancelled.wait(pause):
            signal.pthread_kill(main, self._number)
            pause = AGAIN_S


def _interrupt() -> None:
    raise KeyboardInterrupt


def _say(text: str) -> None:
    """Write to standard error; print() is not safe in a signal handler that interrupted another print."""
    with contextlib.suppress(OSError):  # nobody reads standard error any more
        os.write(2, f"{text}\n".encode())
