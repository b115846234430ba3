"""The process in which a reward with a time limit is called; `loop.reward_process` starts it and speaks with it.

    python -m grpo_sweeps.loop.reward_child REQUESTS REPLIES LIFE       (three numbers of descriptors)

Pickles come on REQUESTS: first how to find the function, then one call after the other; each has a reply on REPLIES.
LIFE says nothing and ends with the run, also when that is killed: a guard, forked before anything of the user's is
loaded, then kills the whole group of processes, a hanging reward and its helpers too.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import random
import signal
import sys
import traceback
from typing import BinaryIO

import numpy as np

from grpo_sweeps.config.rewards import load_reward

# A scheduler sends these to every process of a job, but they are meant for the run. A handler and not SIG_IGN, which
# the reward's own children would inherit.
THE_RUNS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


def main(arguments: list[str]) -> None:
    """Answer calls until the requests end."""
    requests, replies, life = (int(word) for word in arguments)
    for number in THE_RUNS:
        signal.signal(number, _nothing)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, THE_RUNS)  # blocked by the parent until here
    if os.fork() == 0:
        os.close(requests)
        os.close(replies)
        _guard(life)
    os.close(life)
    over = contextlib.suppress(EOFError, BrokenPipeError)  # the run has ended
    with over, os.fdopen(requests, "rb") as calls, os.fdopen(replies, "wb") as answers:
        _serve(calls, answers)


def _nothing(number: int, frame: object) -> None:
    pass


def _guard(life: int) -> None:
    """Wait for the end of the run, then end everything that its rewards have started."""
    while os.read(life, 1):
        pass
    os.killpg(0, signal.SIGKILL)


def _serve(calls: BinaryIO, answers: BinaryIO) -> None:
    setting = pickle.load(calls)
    sys.path[:] = setting["path"]
    try:
        function = load_reward(setting["reward"])
    except BaseException as error:
        _answer(answers, None, error)
        return
    _answer(answers, None)
    while True:
        completions, problems, seeds = pickle.load(calls)
        _seed(seeds if isinstance(seeds, int) else seeds[0])
        try:
            value = function(completions, problems, seeds)
        except BaseException as error:  # sys.exit too: the run decides what it means
            _answer(answers, None, error)
        else:
            _answer(answers, value)


def _seed(seed: int) -> None:
    """A reward that draws from the global generators draws the same wherever the run was resumed."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(seed % 2**63)


def _answer(answers: BinaryIO, value: object, error: BaseException | None = None) -> None:
    """Send a value, or an error with the text of its traceback; what cannot be sent is described."""
    trace = "".join(traceback.format_exception(error)) if error is not None else ""
    for reply in ((value, error, trace), (None, _described(value, error), trace)):
        try:
            data = pickle.dumps(reply)
            pickle.loads(data)  # an exception whose constructor takes other arguments can be sent and not received
        except Exception:
            continue
        answers.write(data)
        answers.flush()
        return


def _described(value: object, error: BaseException | None) -> Exception:
    if error is not None:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return TypeError(f"{value!r:.200} cannot be taken out of the reward's process; a number is needed")


if __name__ == "__main__":
    main(sys.argv[1:])
