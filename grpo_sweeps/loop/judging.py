"""Verdicts of a run: on each completion by its task's kind, that of `math` in a process that can be ended, as is one of
the user's own where calls have a limit."""

from __future__ import annotations

from collections.abc import Sequence

from grpo_sweeps.config import FunctionConfig, functions
from grpo_sweeps.config.rewards import RewardPart
from grpo_sweeps.loop.reward_process import RewardProcess, RewardStopped
from grpo_sweeps.rewards import verdicts
from grpo_sweeps.types import Problem, Verdict

MATH_S = 5.0  # seconds for one verdict of math-verify: it takes milliseconds, and on some expressions for ever
KEPT = 8192  # verdicts that are remembered with their texts: the reward and the record ask for the same one
NOT_RIGHT = Verdict(strict=False, flexible=False, parsed=False)


class Judge:
    """Verdicts of one kind. What is not decided within the limit is not right, and is counted in `stopped`.

    own_limit_s: seconds for a call of a verdict of the user's own, in a process of its own; None: no limit.

    Raises:
        ConfigError: for one of the user's own that cannot be imported, and from a call, for an answer that is none.
    """

    def __init__(self, kind: str, own_limit_s: float | None = None) -> None:
        self.kind, self.stopped = kind, 0
        own = verdicts.is_own(kind)
        self._own = functions.load_verdict(kind) if own else None
        called, limit_s = (functions.own_verdict_on, own_limit_s) if own else (verdicts.verdict_on, MATH_S)
        part = RewardPart(FunctionConfig(f"{called.__module__}.{called.__name__}", {"verdict": kind}))
        there = limit_s is not None and (own or kind == "math")
        self._process = RewardProcess(part, limit_s) if there and limit_s is not None else None
        self._known: dict[tuple[str, str], Verdict] = {}

    def __call__(self, text: str, problem: Problem) -> Verdict:
        key = text, problem.id if self._own is not None else problem.answer
        if key not in self._known:
            if len(self._known) >= KEPT:
                self._known.clear()
            self._known[key] = self._judged(text, problem)
        return self._known[key]

    def all(self, texts: Sequence[str], problems: Sequence[Problem]) -> list[Verdict]:
        """One verdict a text; none of them right where the task has no verdict."""
        if self.kind == "none":
            return [NOT_RIGHT] * len(texts)
        return [self(text, problem) for text, problem in zip(texts, problems, strict=True)]

    def _judged(self, text: str, problem: Problem) -> Verdict:
        try:
            if self._process is not None:
                found: Verdict = self._process(text, problem, 0)
                return found
            if self._own is not None:
                return self._own(text, problem)
        except RewardStopped:
            self.stopped += 1
            return NOT_RIGHT
        except Exception as error:
            error.add_note(f"verdict {self.kind} failed on a completion of problem {problem.id}")
            raise
        return verdicts.judge(self.kind)(text, problem.answer)

    def metrics(self) -> dict[str, float]:
        """`verdict/stopped`: verdicts of the run so far that took longer than their limit, where they have one."""
        return {"verdict/stopped": float(self.stopped)} if self._process is not None else {}

    def close(self) -> None:
        if self._process is not None:
            self._process.close()
