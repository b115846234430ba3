"""A time limit on a request as a whole: time-outs of sockets begin anew with every byte that a server sends."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import NoReturn


class Late(BaseException):
    """The limit has passed. No Exception: code in between that retries after one must not go on."""


@contextlib.contextmanager
def deadline(seconds: float | None) -> Iterator[None]:
    """Raise Late in the block when it takes longer. Does nothing for None and outside the main thread, where Python
    handles no signals.

    Uses SIGALRM; a timer of the caller's goes on afterwards with what is left of it.
    """
    if seconds is None or threading.current_thread() is not threading.main_thread():
        yield
        return

    def late(number: int, frame: FrameType | None) -> NoReturn:
        raise Late

    handler, began = signal.signal(signal.SIGALRM, late), time.monotonic()
    left, interval = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if left:
            signal.setitimer(signal.ITIMER_REAL, max(0.001, left - (time.monotonic() - began)), interval)
