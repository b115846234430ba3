"""A reward that is called in a process of its own, which can be ended when a call takes too long (`reward_timeout`).

The process is a fresh interpreter, never a fork: a parent that uses a GPU must not fork. It is started at the first
call and serves all of a run. With its group of processes it ends with the run, whichever way that ends.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import subprocess
import sys
import time
from typing import Any, BinaryIO

from grpo_sweeps.config.rewards import RewardPart
from grpo_sweeps.tracking.children import python_path

START_S = 300.0  # seconds in which the process must have imported the function: slow disks, large packages
END_S = 1.0  # seconds in which a process that has closed its descriptors is gone
NOT_YET = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)  # held back until the child handles them


class RewardStopped(RuntimeError):
    """A call of the reward took too long or ended its process; the text says what happened to it."""


class _Remote(Exception):
    """The traceback of an error in the reward's process, as the cause of that error."""

    def __str__(self) -> str:
        return f"\n{self.args[0].rstrip()}"


class RewardProcess:
    """A function of a reward (see `config.rewards.RewardCall`), called in another process.

    A call raises what the function raises, and RewardStopped where it does not return within `timeout_s` seconds or
    the process has ended; after that the process is gone, with everything that it has started.
    """

    def __init__(self, reward: RewardPart, timeout_s: float) -> None:
        self.reward, self.timeout_s = reward, timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._calls: BinaryIO | None = None
        self._answers: BinaryIO | None = None
        self._life = -1

    def __call__(self, completions: Any, problems: Any, seeds: Any) -> Any:
        if self._process is None:
            self._start()
        return self._ask((completions, problems, seeds), self.timeout_s)

    def _start(self) -> None:
        ours, theirs = [0, 0, 0], [0, 0, 0]
        theirs[0], ours[0] = os.pipe()  # calls
        ours[1], theirs[1] = os.pipe()  # answers
        theirs[2], ours[2] = os.pipe()  # says nothing, and ends with this process
        command = [sys.executable, "-m", "grpo_sweeps.loop.reward_child", *map(str, theirs)]
        environment = {**os.environ, "PYTHONPATH": python_path()}
        before = signal.pthread_sigmask(signal.SIG_BLOCK, NOT_YET)
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, pass_fds=theirs, start_new_session=True, env=environment
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            for descriptor in theirs:
                os.close(descriptor)
        self._calls, self._answers, self._life = os.fdopen(ours[0], "wb"), os.fdopen(ours[1], "rb"), ours[2]
        self._ask({"path": sys.path, "reward": self.reward}, START_S)

    def _ask(self, request: Any, seconds: float) -> Any:
        assert self._calls is not None and self._answers is not None
        deadline = time.monotonic() + seconds
        try:
            pickle.dump(request, self._calls)
            self._calls.flush()
            ready, _, _ = select.select([self._answers], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                self.close()
                raise RewardStopped(f"did not return within {seconds:g} s")
            value, error, trace = pickle.load(self._answers)
        except (EOFError, BrokenPipeError, pickle.UnpicklingError):
            raise RewardStopped(f"ended its process ({self._end()})") from None
        except BaseException:  # Ctrl-C: an answer that comes later must not be taken for another call's
            self.close()
            raise
        if error is not None:
            raise error from _Remote(trace)
        return value

    def _end(self) -> str:
        """How the process has ended, in words."""
        process = self._process
        assert process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_S)  # its descriptors are closed a moment before
        self.close()
        code = process.returncode
        return f"by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    def close(self) -> None:
        """End the process with all that it has started; the next call starts another one."""
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):  # the guard keeps the group's number taken
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for file in (self._calls, self._answers):
            if file is not None:
                with contextlib.suppress(BrokenPipeError):  # a request that nobody has read
                    file.close()
        os.close(self._life)
