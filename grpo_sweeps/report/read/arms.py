"""What varies in a sweep besides R and the seed: its arms.

A sweep may compare rewards, estimators, models, learning rates. Runs that agree in all that can change a result, R
and seed aside, form one arm; tables and figures are made for each arm and R. Settings of the trainer or the rollouts
that follow R (steps chosen so that every R uses the same number of rollouts, say) are not arms; `tied_to_R` names
them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from grpo_sweeps.config import changes_no_result
from grpo_sweeps.config.choices import ABSENT, function_name, objective_name

ALL = "all"
"""The arm's label in a sweep that varies R and seed alone."""

# Besides what changes no result: what every arm has several of, how long and how often, and how finely.
WITHIN_AN_ARM = {
    "R", "seed", "trainer.steps", "trainer.eval_every", "trainer.eval_problems", "trainer.eval_samples", "analysis.by",
    "reward_timeout", "reward_retries",
}  # fmt: skip
LONGEST = 60  # characters of an arm's name on a page
KEPT = 40  # of these before the cut, the rest after it: settings often differ at an end alone
MAY_FOLLOW_R = ("trainer.", "rollout.")
REPRESENTATIVES = {
    "model": "model.name", "task": "task.name", "reward": "reward._target_", "estimator": "estimator._target_",
    "objective": "objective",
}  # fmt: skip


@dataclass(frozen=True)
class Arms:
    """`labels[i]` is the arm of run i; `varies` the keys that tell arms apart; `tied_to_R` the keys that follow R;
    `absent` the arms without a run, where the arms are a grid of what varies; `whole` the whole name of each label that
    was cut."""

    labels: tuple[str, ...]
    varies: tuple[str, ...]
    tied_to_R: tuple[str, ...]
    absent: tuple[str, ...] = ()
    whole: Mapping[str, str] = field(default_factory=dict)


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested mapping -> {dotted key: value as text}. Lists are one value.

    >>> flatten({"a": {"b": 1}, "c": [1, 2]})
    {'a.b': '1', 'c': '[1, 2]'}
    """
    flat: dict[str, str] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = str(value)
    return flat


def makes_no_arm(key: str) -> bool:
    """True for a (flattened) key that tells no arms apart. A name changes no result, and says which arm it is."""
    return key in WITHIN_AN_ARM or (changes_no_result(key) and key not in REPRESENTATIVES.values())


def find_arms(configs: Sequence[Mapping[str, Any]]) -> Arms:
    """Arms of runs given by their resolved configurations, in the same order."""
    flat = _with_budget([flatten(c) for c in configs])
    flat = [f | _objective(c) for f, c in zip(flat, configs, strict=True)]
    keys = sorted({k for f in flat for k in f if not makes_no_arm(k)})
    columns = {key: [f.get(key, ABSENT) for f in flat] for key in keys}
    varying = [key for key in keys if len(set(columns[key])) > 1]
    Rs = [f.get("R", "") for f in flat]
    tied = [key for key in varying if key.startswith(MAY_FOLLOW_R) and _follows(columns[key], Rs)]
    varying = _without_implied([key for key in varying if key not in tied], columns)
    names = _short_names(varying)
    settings = {key: [f"{names[key]}={_one_line(key, value)}" for value in columns[key]] for key in varying}
    labels = [", ".join(settings[key][i] for key in varying) or ALL for i in range(len(flat))]
    absent = _absent(list(settings.values()), set(labels))
    short = readable([*labels, *absent])
    return Arms(
        tuple(short[label] for label in labels), tuple(varying), tuple(tied), tuple(short[label] for label in absent),
        {cut: label for label, cut in short.items() if cut != label},
    )  # fmt: skip


def _one_line(key: str, value: str) -> str:
    """A value as an arm's name shows it: a text with line ends or other hidden characters as Python writes it, which is
    how a list of such texts is written already."""
    text = function_name(key, value)
    return text if text.isprintable() else repr(text)


def readable(labels: Iterable[str]) -> dict[str, str]:
    """{label: label of `LONGEST` characters at most}, its middle left out; numbered where two would be one.

    >>> list(readable(["lr=1", "prompt=" + 60 * "a" + "b", "prompt=" + 60 * "a" + "c"]).values())[1]
    'prompt=aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa…aaaaaaaaaaaaaaaaaab'
    """
    found: dict[str, str] = {}
    for label in dict.fromkeys(labels):
        cut = label if len(label) <= LONGEST else f"{label[:KEPT]}…{label[KEPT + 1 - LONGEST :]}"
        taken, number = set(found.values()), 2
        while cut in taken:
            end = f"… ({number})"
            cut, number = label[: LONGEST - len(end)] + end, number + 1
        found[label] = cut
    return found


def _with_budget(flat: list[dict[str, str]]) -> list[dict[str, str]]:
    """budget=prompts is what configurations without the key mean; `budget_R` says something with budget=rollouts alone,
    and tells arms apart where these differ in it."""
    flat = [{"budget": "prompts"} | f for f in flat]
    bases = {f.get("budget_R") for f in flat if f["budget"] == "rollouts"}
    keep = "rollouts" if len(bases) > 1 else None
    return [{k: v for k, v in f.items() if k != "budget_R" or f["budget"] == keep} for f in flat]


def _objective(config: Mapping[str, Any]) -> dict[str, str]:
    """{"objective": its choice}, which tells arms apart before single settings do; empty where a run does not say."""
    name = objective_name(config)
    return {"objective": name} if name else {}


def _absent(settings: Sequence[Sequence[str]], labels: set[str]) -> tuple[str, ...]:
    """Combinations of the settings that no run has. None where at most half of all are there: arms that were chosen one
    by one are no grid with holes."""
    values = [list(dict.fromkeys(column)) for column in settings]
    if 2 * len(labels) <= math.prod(map(len, values)):
        return ()
    return tuple(label for label in map(", ".join, product(*values)) if label and label not in labels)


def _follows(values: Sequence[str], by: Sequence[str]) -> bool:
    """Is each value fixed by the one in `by`?"""
    return len(set(zip(by, values, strict=True))) == len(set(by))


def _without_implied(varying: list[str], columns: Mapping[str, Sequence[str]]) -> list[str]:
    """One key for each choice of model, task, reward or estimator where that key alone tells the runs apart."""
    for group, representative in REPRESENTATIVES.items():
        if representative not in varying:
            continue
        implied = {
            key
            for key in varying
            if key.startswith(f"{group}.") and key != representative and _follows(columns[key], columns[representative])
        }
        varying = [key for key in varying if key not in implied]
    return varying


def _short_names(keys: Sequence[str]) -> dict[str, str]:
    """`reward._target_` -> reward, `trainer.lr` -> lr; the whole key where that would name two."""
    short = {key: key.split(".")[0] if key in REPRESENTATIVES.values() else key.rsplit(".", 1)[-1] for key in keys}
    names = list(short.values())
    return {key: name if names.count(name) == 1 else key for key, name in short.items()}
