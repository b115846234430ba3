"""The identity of a run: a short hash of what can change its result, and the name that a person reads.

The same configuration has the same identity wherever it is launched from; a changed default changes it, because the
resolved configuration is hashed and not the difference from the defaults.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from grpo_sweeps.config import ObjectiveConfig, RunConfig, changes_no_result, flatten, to_mapping
from grpo_sweeps.config.choices import last_part

LENGTH = 12  # hexadecimal digits: 48 bits, so two of a million runs in one sweep collide with probability 0.002

# Later keys, at the value that means the same as their absence: older runs keep their identity.
ADDED: dict[str, Any] = {
    "budget": "prompts", "objective.continuations": 0, "task.chat_prompt": None, "task.verdict": "numbers",
    "task.system": None, "task.few_shot": [], "task.assistant_prefix": None, "model.chat_template_kwargs": {},
    "reward_on_failure": "stop", "rollout.cut": "keep", "rollout.cut_penalty": 0.0,
    "rollout.cut_buffer": 0, "trainer.tokens": None,
}  # fmt: skip

# Settings of what may be switched off: they count only while it is on.
SETTINGS_OF: dict[str, Callable[[ObjectiveConfig], bool]] = {
    "objective.clip_low": lambda objective: objective.ratio != "none",
    "objective.clip_high": lambda objective: objective.ratio != "none",
    "objective.kl_estimator": lambda objective: objective.kl_beta > 0,
    "objective.kl_place": lambda objective: objective.kl_beta > 0,
    "objective.resample_rounds": lambda objective: objective.resample,
    "objective.critic_lr": lambda objective: objective.critic,
    "objective.critic_updates": lambda objective: objective.critic,
    "objective.gae_gamma": lambda objective: objective.critic,
    "objective.gae_lambda": lambda objective: objective.critic,
    "objective.value_every": lambda objective: objective.continuations > 0,
}


def identity(config: RunConfig) -> str:
    """The identity of a configuration, 12 hexadecimal digits.

    `trainer.steps` counts only where the schedule depends on it: a run with a constant rate can be taken further;
    `budget_R` only with budget=rollouts; of `task.prompt` and `task.chat_prompt` only the one that is used.
    """
    flat = flatten(to_mapping(config))
    off = {
        k for k, v in flat.items() if is_irrelevant(k, config) or _is_off(k, config) or (k in ADDED and v == ADDED[k])
    }
    relevant = {k: v for k, v in flat.items() if k not in off}
    text = json.dumps(_canonical(relevant), sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:LENGTH]


def is_irrelevant(key: str, config: RunConfig) -> bool:
    """True for a (flattened) key that identity leaves out."""
    if key == "trainer.steps":
        return config.trainer.schedule == "constant"
    if key in SETTINGS_OF and not SETTINGS_OF[key](config.objective):
        return True
    if key in ("reward_timeout", "reward_retries"):  # a failure that ends the run leaves no result to differ
        return config.reward_on_failure == "stop"
    if key == "budget_R":
        return config.budget != "rollouts"
    if key in ("task.prompt", "task.chat_prompt"):  # the one that the model does not see
        return key != f"task.{config.prompt_key}"
    return changes_no_result(key)


def _is_off(key: str, config: RunConfig) -> bool:
    """True for a key of an objective that is one plain update, so that a run from before there were such keys keeps its
    identity. Judged by what the values do: another default would count."""
    objective = config.objective
    plain = objective.on_policy and not objective.kl_beta and not objective.resample
    return plain and key.startswith("objective.")


def _canonical(value: Any) -> Any:
    """The value with equal numbers (1 and 1.0) written the same way."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, Mapping):
        return {str(key): _canonical(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_canonical(item) for item in value]
    return value


UNNAMED = ("sweep", "sweeps", "runs_dir", "tracking", "redo", "dry_run", "wait", "require_clean", "hydra")


MOST_NAME = 80  # characters of a name that says what was typed; R and the seed are always in it


def display_names(configs: Sequence[RunConfig], overrides: Sequence[Sequence[str]]) -> list[str]:
    """One name per run, made of what varies: "R=8 seed=0", "R=8 seed=0 lr=1e-05".

    R and the seed always come first, then the keys of the run's command line that differ within the sweep and do not
    follow from R (for a single run, as many of all as a line holds). Of a path or a function the last name is shown
    where that tells the runs apart. `overrides` are Hydra's, one list per run.
    """
    parsed = [_override_values(items) for items in overrides]
    keys = list(dict.fromkeys(key for values in parsed for key in values))
    several = len(parsed) > 1
    varying = [key for key in keys if not several or _varies(key, configs, parsed)]
    varying = [key for key in varying if any(_is_named(key, config) for config in configs)]
    labels, columns = _labels(varying), {key: _short([values.get(key) for values in parsed], key) for key in varying}
    names = []
    for at, config in enumerate(configs):
        first = [f"R={config.R}", f"seed={config.seed}"]
        parts = [f"{labels[key]}={columns[key][at]}" for key in varying if columns[key][at] is not None]
        names.append(" ".join([*first, *parts]) if several else _cut(first, parts))
    return names


def _varies(key: str, configs: Sequence[RunConfig], parsed: Sequence[Mapping[str, str]]) -> bool:
    """Does a key differ within the sweep, other than by following R?"""
    values, Rs = [one.get(key) for one in parsed], [config.R for config in configs]
    follows = len(set(zip(values, Rs, strict=True))) == len(set(Rs))
    return len(set(values)) > 1 and not follows


def _short(values: Sequence[str | None], key: str) -> list[str | None]:
    """The values as a name shows them: shortened where they are still as many different ones."""
    bare = [None if value is None else value.strip("'\"") for value in values]
    short = [None if value is None else last_part(key, value) for value in bare]
    return short if len(set(short)) == len(set(bare)) else bare


def _cut(first: Sequence[str], parts: Sequence[str]) -> str:
    """A name of at most `MOST_NAME` characters, of so many parts as fit, and how many do not."""
    kept = list(parts)
    while kept and len(" ".join([*first, *kept])) > MOST_NAME:
        kept.pop()
    left = len(parts) - len(kept)
    return " ".join([*first, *kept, *([f"and {left} more"] if left else [])])


def _is_named(key: str, config: RunConfig) -> bool:
    group = key.split(".")[0].split("/")[0]
    return key not in ("R", "seed") and group not in UNNAMED and not is_irrelevant(key, config)


def _override_values(items: Iterable[str]) -> dict[str, str]:
    values = {}
    for item in items:
        key, _, value = item.partition("=")
        values[key.lstrip("+~")] = value
    return values


def _labels(keys: Sequence[str]) -> dict[str, str]:
    """The last part of each dotted key where that tells the keys apart, else the whole key."""
    short = [key.rsplit(".", 1)[-1] for key in keys]
    return {
        key: last if short.count(last) == 1 and last != "_target_" else key
        for key, last in zip(keys, short, strict=True)
    }
