"""What a run should hold, by its configuration, what it was told to keep, and the steps that it has done.

Pure: nothing is read here. `holdings` reads what is there, `findings` compares.

| record | per step that was done |
|---|---|
| metrics.jsonl | one line of training, and one per evaluation |
| grams/ | `groups` records; in a measured step each with an advantage has its Gram |
| completions/ | R records at every `completions`-th step |
| evals/ | one record per problem at every `evals`-th step, and after the last |
| updates/ | one record per trainable parameter at every `updates`-th step |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from grpo_sweeps.config import groups_a_step
from grpo_sweeps.tracking.seal import Keeps, Seal


@dataclass(frozen=True)
class Expected:
    """Counts per step. None: not known, as in records of older versions.

    steps: done, so that the records are of steps 0 to steps - 1. evals: the steps before which an evaluation is, the
    one after the last step at `steps`; `may_eval`: one more that may be there. gram: whether a group with an advantage
    has a Gram at a step, where its rows are scores.
    """

    steps: int
    groups: int | None
    completions: dict[int, int] | None
    updates: dict[int, int] | None
    evals: dict[int, int | None] | None
    gram_every: int | None


def expected(config: Mapping[str, Any], seal: Seal | None, steps: int, finished: bool) -> Expected:
    """What a run that has done so many steps should hold.

    Args:
        config: its configuration in the written form, perhaps of an older version or not whole.
        seal: its seal; None where it has none, and then less is known.
        finished: whether it has ended, with the evaluation after the last step.
    """
    keeps = seal.keeps if seal is not None else ()
    R = config.get("R")
    completions = updates = None
    if keeps and isinstance(R, int):
        completions = {step: R for step in range(steps) if _due(step, _of(keeps, step).completions)}
    if keeps:
        updates = {
            step: _of(keeps, step).parameters for step in range(steps) if _due(step, _of(keeps, step).updates)
        }  # fmt: skip
    every = _get(config, "analysis", "every")
    return Expected(
        steps, _groups(config), completions, updates, _evals(config, keeps, steps, finished),
        every if isinstance(every, int) and _get(config, "analysis", "groups") is not None else None,
    )  # fmt: skip


def _evals(
    config: Mapping[str, Any], keeps: tuple[Keeps, ...], steps: int, finished: bool
) -> dict[int, int | None] | None:
    """Records of each evaluation by its step; None for a number that only the data of the task say."""
    if keeps:
        found: dict[int, int | None] = {
            step: _of(keeps, step).problems for step in range(steps) if _due(step, _of(keeps, step).evals)
        }
        last = keeps[-1]
        return found | ({steps: last.problems} if finished and last.evals else {})
    every = _get(config, "trainer", "eval_every")
    if not isinstance(every, int):
        return None
    found = {step: None for step in range(steps) if _due(step, every)}
    return found | ({steps: None} if finished and every else {})


def _of(keeps: tuple[Keeps, ...], step: int) -> Keeps:
    """What was kept at a step."""
    return next((one for one in reversed(keeps) if one.first <= step), keeps[0])


def _due(step: int, every: int) -> bool:
    return bool(every) and step % every == 0


def _groups(config: Mapping[str, Any]) -> int | None:
    R, prompts = config.get("R"), _get(config, "trainer", "prompts")
    base = config.get("budget_R", 1)
    if not all(isinstance(number, int) and number > 0 for number in (R, prompts, base)):
        return None
    assert isinstance(R, int) and isinstance(prompts, int)
    return groups_a_step(R, prompts, str(config.get("budget")), base)


def _get(config: Mapping[str, Any], part: str, key: str) -> Any:
    found = config.get(part)
    return found.get(key) if isinstance(found, Mapping) else None
