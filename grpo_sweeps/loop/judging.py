"""Verdicts of a run: on each completion by its task's kind, that of `math` in a process that can be ended."""

from __future__ import annotations

from collections.abc import Sequence

from grpo_sweeps.config import FunctionConfig
from grpo_sweeps.config.rewards import RewardPart
from grpo_sweeps.loop.reward_process import RewardProcess, RewardStopped
from grpo_sweeps.rewards import verdicts
from grpo_sweeps.types import Problem, Verdict

MATH_S = 5.0  # seconds for one verdict of math-verify: it takes milliseconds, and on some expressions for ever
KEPT = 8192  # verdicts that are remembered with their texts: the reward and the record ask for the same one
NOT_RIGHT = Verdict(strict=False, flexible=False, parsed=False)


class Judge:
    """Verdicts of one kind. What `math` does not decide within its limit is not right, and is counted in `stopped`."""

    def __init__(self, kind: str, limit_s: float = MATH_S) -> None:
        self.kind, self.stopped = kind, 0
        function = FunctionConfig(f"{verdicts.__name__}.{verdicts.verdict_on.__name__}", {"verdict": kind})
        self._process = RewardProcess(RewardPart(function), limit_s) if kind == "math" else None
        self._known: dict[tuple[str, str], Verdict] = {}

    def __call__(self, text: str, problem: Problem) -> Verdict:
        key = text, problem.answer
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
        if self._process is None:
            return verdicts.judge(self.kind)(text, problem.answer)
        try:
            found: Verdict = self._process(text, problem, 0)
        except RewardStopped:
            self.stopped += 1
            return NOT_RIGHT
        return found

    def metrics(self) -> dict[str, float]:
        """`verdict/stopped`: verdicts of the run so far that took longer than the limit; of `math` alone."""
        return {"verdict/stopped": float(self.stopped)} if self._process is not None else {}

    def close(self) -> None:
        if self._process is not None:
            self._process.close()
