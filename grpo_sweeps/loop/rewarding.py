"""The run's reward of completions: its functions called as each of them wants to be, with a limit, again where that is
asked for, and what they give checked and added up.

Rewards may be a user's own: what they return is checked where it arrives.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from grpo_sweeps.config import RunConfig
from grpo_sweeps.config.rewards import RewardCall, RewardPart, load_reward, reward_parts
from grpo_sweeps.engine.rollouts import row_seed
from grpo_sweeps.loop.judging import Judge
from grpo_sweeps.loop.reward_process import RewardProcess, RewardStopped
from grpo_sweeps.rewards.verdicts import CORRECT
from grpo_sweeps.rewards.weighted_sum import weighted_sum
from grpo_sweeps.types import ConfigError, Problem

log = logging.getLogger(__name__)

LARGEST_REWARD = 1e100  # squares of larger ones overflow, and a group's spread with them
Key = Sequence[int | str]
Asked = Callable[[Problem], Any]


@dataclass(frozen=True)
class Rewards:
    """N rewards; by the name of a function what it gave to each, None where it does not apply; and which rewards lack
    something because a call failed or nothing applied (`reward_on_failure=zero`)."""

    values: list[float]
    parts: dict[str, list[float | None]]
    failed: list[bool]

    def rows(self, rows: slice) -> Rewards:
        parts = {name: values[rows] for name, values in self.parts.items()}
        return Rewards(self.values[rows], parts, self.failed[rows])


@dataclass(frozen=True)
class Batch:
    """N completions to be rewarded, with their problems and what their random numbers belong to; `size` after one
    another are a group. asked: the prompt of a problem as TRL hands it to a reward: a text, or messages of a chat."""

    texts: Sequence[str]
    problems: Sequence[Problem]
    keys: Sequence[Key]
    size: int
    asked: Asked


def reward_metrics(rewards: Sequence[Rewards], may_fail: bool) -> dict[str, float]:
    """`reward/NAME`, the mean of what each of several functions gave where it applies; with may_fail `reward/failed`,
    the share of rewards that lack something."""
    metrics: dict[str, float] = {}
    for name in rewards[0].parts if rewards else ():
        found = [value for one in rewards for value in one.parts[name] if value is not None]
        metrics |= {f"reward/{name}": float(np.mean(found))} if found else {}
    return metrics | (
        {"reward/failed": float(np.mean([lost for one in rewards for lost in one.failed]))} if may_fail else {}
    )


class Rewarder:
    """The reward of a run. `call` raises what the functions raise, with a note of which one and on what, unless
    reward_on_failure=zero."""

    def __init__(self, config: RunConfig, judge: Judge) -> None:
        self.config, self.judge = config, judge
        self.parts = reward_parts(config.reward)
        self._judges: list[Judge] = []
        self._told: set[str] = set()
        self._calls = [self._call_of(part) for part in self.parts]

    def _call_of(self, part: RewardPart) -> tuple[str, Callable[[Any, Any, Any], Any]]:
        """(how it is called, the function, in a process of its own where there is a limit)."""
        loaded: RewardCall = load_reward(part)
        if part.function.target == CORRECT:
            judge = self._judge_of(str(part.function.kwargs.get("verdict", "numbers")))
            return loaded.per, lambda text, problem, seed: float(judge(text, problem).strict)
        if self.config.reward_timeout is not None:
            return loaded.per, RewardProcess(part, self.config.reward_timeout)
        return loaded.per, loaded

    def _judge_of(self, kind: str) -> Judge:
        if kind == self.judge.kind:
            return self.judge
        self._judges.append(Judge(kind, self.config.reward_timeout))
        return self._judges[-1]

    def __call__(self, batch: Batch) -> Rewards:
        """The reward of each completion.

        Raises:
            ConfigError: where a function gives no finite number, or none applies to a completion.
            RewardStopped: where a call had to be ended.
        """
        columns, failed = list[list[float | None]](), set[int]()
        for part, (per, call) in zip(self.parts, self._calls, strict=True):
            values, lost = self._of_part(part, per, call, batch)
            columns.append(values)
            failed |= lost
        weights = [part.weight for part in self.parts]
        totals = list[float]()
        for row, of_row in enumerate(zip(*columns, strict=True)):
            total = weighted_sum(of_row, weights)
            if total is None:
                total = self._of_none(batch, row)
                failed.add(row)
            totals.append(total)
        parts = {part.name: values for part, values in zip(self.parts, columns, strict=True) if part.name}
        return Rewards(totals, parts, [row in failed for row in range(len(totals))])

    def _of_none(self, batch: Batch, row: int) -> float:
        """The reward of a completion to which no function applies."""
        if self.config.reward_on_failure == "zero":
            return 0.0
        names = ", ".join(part.name for part in self.parts)
        raise ConfigError(
            f"reward.functions: none of {names} applies to {which(batch.problems[row], batch.keys[row])}; one that "
            "gives a number is needed, or reward_on_failure=zero"
        )

    def _of_part(
        self, part: RewardPart, per: str, call: Callable[[Any, Any, Any], Any], batch: Batch
    ) -> tuple[list[float | None], set[int]]:
        """What one function gives to each completion, and the rows for which it failed."""
        values, failed = list[float | None](), set[int]()
        for rows in _calls(per, len(batch.texts), batch.size):
            given, lost = self._tried(part, functools.partial(call, *_arguments(per, batch, rows)), batch, rows)
            failed |= set(range(rows.start, rows.stop)) if lost else set()
            if lost:
                given = [0.0] * (rows.stop - rows.start)
            elif per == "rollout":
                given = [given]
            values += self._checked(part, given, rows.stop - rows.start)
        return values, failed

    def _tried(self, part: RewardPart, call: Callable[[], Any], batch: Batch, rows: slice) -> tuple[Any, bool]:
        """(what a call gives, False), after `reward_retries` more calls at most; (None, True) where all of them failed
        and a failure counts as 0."""
        tries = 1 + self.config.reward_retries
        for left in reversed(range(tries)):
            try:
                return call(), False
            except ConfigError:  # what the function says of its keys: the same each time
                raise
            except Exception as error:
                if left:
                    continue
                if self.config.reward_on_failure == "zero":
                    self._say(part, error, which(batch.problems[rows.start], batch.keys[rows.start]))
                    return None, True
                often = f" in {tries} calls" if tries > 1 else ""
                where = which(batch.problems[rows.start], batch.keys[rows.start])
                if not isinstance(error, RewardStopped):
                    error.add_note(f"reward {part.function.target} failed{often} on {where}")
                    raise
                raise RewardStopped(f"reward {part.function.target} {error}{often} on {where}") from None
        raise AssertionError("a call returns or raises")

    def _say(self, part: RewardPart, error: Exception, where: str) -> None:
        """Say the first failure of each function; `reward/failed` counts them all."""
        if part.key not in self._told:
            self._told.add(part.key)
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            log.warning("reward %s failed on %s (%s) and counts as 0", part.function.target, where, reason)

    def _checked(self, part: RewardPart, given: Any, count: int) -> list[float | None]:
        """`count` numbers, or None where the function does not apply and is one of several."""
        target = part.function.target
        given = given.tolist() if callable(getattr(given, "tolist", None)) else given  # an array or a tensor
        if isinstance(given, str | bytes) or not isinstance(given, Iterable):
            raise ConfigError(f"reward {target} gave {given!r:.200}: a list of {count} numbers is needed")
        values = list(given)
        if len(values) != count:
            raise ConfigError(
                f"reward {target} gave {len(values)} values for {count} completions: one for each is needed"
            )
        return [None if value is None and part.name else _number(value, target) for value in values]

    def close(self) -> None:
        """End the processes of the reward."""
        for judge in self._judges:
            judge.close()
        for _, call in self._calls:
            if isinstance(call, RewardProcess):
                call.close()


def _number(value: Any, target: str) -> float:
    if not isinstance(value, int | float | np.number) or not abs(float(value)) <= LARGEST_REWARD:
        allowed = f"a finite number is needed, of {LARGEST_REWARD:g} at most"
        raise ConfigError(f"reward {target} gave {value!r:.200}: {allowed}")
    return float(value)


def _calls(per: str, count: int, size: int) -> list[slice]:
    """The rows of each call."""
    if not count:
        return []
    step = {"rollout": 1, "group": size}.get(per, count)
    return [slice(start, min(start + step, count)) for start in range(0, count, step)]


def _arguments(per: str, batch: Batch, rows: slice) -> tuple[Any, Any, Any]:
    texts, problems = list(batch.texts[rows]), list(batch.problems[rows])
    seeds = [row_seed("reward", *key) for key in batch.keys[rows]]
    if per == "rollout":
        return texts[0], problems[0], seeds[0]
    if per == "group":
        return texts, problems[0], seeds
    if per == "batch":
        return texts, problems, seeds
    return _as_trl(texts, problems, batch.asked), None, seeds


def _as_trl(texts: list[str], problems: list[Problem], asked: Asked) -> dict[str, Any]:
    """The keywords that TRL gives to a reward: prompts and completions, as messages where the model has a chat
    template, and each column of the data as a list, None where a problem lacks it."""
    prompts = [asked(problem) for problem in problems]
    chat = any(not isinstance(prompt, str) for prompt in prompts)
    completions = [[{"role": "assistant", "content": text}] if chat else text for text in texts]
    own = [{"id": p.id, "question": p.question, "answer": p.answer, "solution": p.solution} for p in problems]
    rows = [{**one, **problem.columns} for one, problem in zip(own, problems, strict=True)]
    names = dict.fromkeys(name for row in rows for name in row)
    columns = {str(name): [row.get(name) for row in rows] for name in names}
    return {**columns, "prompts": prompts, "completions": completions}


def which(problem: Problem, key: Key) -> str:
    """The completion that a key of random numbers belongs to, in words."""
    if key[1] == "train":  # (seed, "train", step, problem, rollout)
        return f"rollout {key[4]} of problem {problem.id} in step {key[2]}"
    return f"a completion of problem {problem.id} ({', '.join(str(part) for part in key)})"
