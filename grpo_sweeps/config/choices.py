"""What tells runs apart, in the words that a person types: `where=KEY=VALUE,...` chooses runs by their configuration,
`settings` names the choices of one, `common` those that several share."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import PurePosixPath
from typing import Any

from grpo_sweeps.config.schema import CHOICES, ObjectiveConfig, flatten, shown
from grpo_sweeps.text import did_you_mean, natural
from grpo_sweeps.types import ConfigError

GROUPS = {
    "model": "model.name", "task": "task.name", "reward": "reward._target_", "estimator": "estimator._target_",
    "lr": "trainer.lr",
}  # fmt: skip
"""Words for the choices of a run, and the key that says which it is."""

PLACES = ("sweep", "runs_dir", "tracking")  # keys that say where a run is, and nothing of what it does
ABSENT = "(not set)"  # the value of a key that a configuration lacks, where several are compared
MOST_LISTED = 12  # values or keys that a refusal names
OWN = "custom"  # the choice of a function by its dotted path
ESTIMATORS = "grpo_sweeps.estimators."


@dataclass(frozen=True)
class Condition:
    """One KEY=VALUE[,VALUE...] of `where`: a run fits that has one of the values."""

    key: str
    values: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.key}={','.join(self.values)}"


def conditions(text: str) -> tuple[Condition, ...]:
    """The conditions of `where=text`; of `R=4,8,model=tiny` the 8 is a second value of R.

    >>> [str(one) for one in conditions("R=4,8,model=tiny")]
    ['R=4,8', 'model=tiny']

    Raises:
        ConfigError: for a text of another form.
    """
    found: list[tuple[str, list[str]]] = []
    for part in text.split(","):
        key, equals, value = part.partition("=")
        if equals and key and value:
            found.append((key.strip(), [value.strip()]))
        elif not equals and part and found:
            found[-1][1].append(part.strip())
        else:
            raise ConfigError(
                f"where={text}: KEY=VALUE is needed, or several with commas, as in where=R=4,8,model=tiny"
            )
    return tuple(Condition(key, tuple(values)) for key, values in found)


def chosen(configs: Mapping[str, Mapping[str, Any]], text: str) -> list[str]:
    """The runs (identity -> resolved configuration) that fit every condition of `where=text`, in their order.

    A key is a dotted key, its last part where that is one key's alone, one of `GROUPS`, or objective. A value is
    compared as a number where both are one; of a dotted path its last part is enough.

    Raises:
        ConfigError: for a key that no run has, and where no run fits; the sentence names what there is.
    """
    flat = {run: flatten(config) | _named_objective(config) for run, config in configs.items()}
    left = list(configs)
    for one in conditions(text):
        key = _key(one.key, flat.values(), text)
        fits = [run for run in left if any(_same(flat[run].get(key), value) for value in one.values)]
        if not fits:
            there = {last_part(key, shown(flat[run][key])) for run in left if key in flat[run]}
            among = " among those that fit the rest" if len(left) < len(configs) else ""
            listed = _listed(sorted(there, key=natural), ",")
            sentence = f"where={text}: no run has {one}; there are{among} {one.key}={listed}"
            words = [value for value in one.values if not _is_number(value)]  # 16 is no slip for 1
            raise ConfigError(did_you_mean(sentence, words[0], there) if words else sentence)
        left = fits
    return left


def _key(word: str, flat: Iterable[Mapping[str, Any]], text: str) -> str:
    keys = {key: None for one in flat for key in one}
    found = [word] if word in keys else []
    found = found or [key for key in (GROUPS.get(word, ""),) if key in keys]
    found = found or [key for key in keys if key.rpartition(".")[2] == word]
    if len(found) == 1:
        return found[0]
    if found:
        raise ConfigError(f"where={text}: {word} is several keys; give one of {_listed(found, ', ')}")
    lasts = {key.rpartition(".")[2]: key for key in keys}
    near = difflib.get_close_matches(word, [*keys, *GROUPS, *lasts], n=1)
    hint = f"did you mean {lasts.get(near[0], near[0])}?" if near else "a key of config.yaml is needed"
    raise ConfigError(f"where={text}: no run has a key {word}; {hint}")


def _same(value: Any, text: str) -> bool:
    written = shown(value)
    if written == text:
        return True
    try:
        return not isinstance(value, bool) and float(written) == float(text)
    except ValueError:
        return isinstance(value, str) and written.endswith(f".{text}") and "/" not in written


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _listed(words: Sequence[str], comma: str) -> str:
    return comma.join(words[:MOST_LISTED]) + (f" and {len(words) - MOST_LISTED} more" * (len(words) > MOST_LISTED))


def function_name(key: str, value: str) -> str:
    """Of a function's dotted path the last two parts, since strict and flexible matching are functions of one module;
    an estimator of the package has a name of its own. Any other value as it is."""
    if value.startswith(ESTIMATORS):
        return value.rpartition(".")[2]
    return ".".join(value.split(".")[-2:]) if key.endswith("_target_") else value


def last_part(key: str, value: str) -> str:
    """A value as a name or a heading shows it: `function_name`, and of a path its last name.

    >>> last_part("estimator._target_", "grpo_sweeps.estimators.group.rloo"), last_part("model.path", "/data/models/q")
    ('rloo', 'q')
    """
    if "/" in value and not any(char.isspace() for char in value):
        return PurePosixPath(value).name or value
    return function_name(key, value)


def settings(config: Mapping[str, Any]) -> dict[str, str]:
    """The choices of a resolved configuration in words: model, task, reward, estimator, lr; those that it has."""
    flat = flatten(config)
    return {word: last_part(key, shown(flat[key])) for word, key in GROUPS.items() if flat.get(key) is not None}


def objective_of(config: Mapping[str, Any]) -> ObjectiveConfig:
    """The objective's settings of a run; those of one plain update where the configuration does not say."""
    found = config.get("objective")
    known = found if isinstance(found, Mapping) else {}
    return ObjectiveConfig(
        **{field.name: known[field.name] for field in fields(ObjectiveConfig) if field.name in known}
    )


def objective_name(config: Mapping[str, Any]) -> str:
    """The choice of conf/objective that a run's settings are of the kind of; "" where it does not say."""
    return objective_of(config).choice if "ratio" in (config.get("objective") or ()) else ""


def _named_objective(config: Mapping[str, Any]) -> dict[str, str]:
    name = objective_name(config)
    return {"objective": name} if name else {}


def choice_names(config: Mapping[str, Any], chosen: Mapping[str, str]) -> dict[str, str]:
    """The name of each choice of a run: model, task, reward, estimator, objective, trainer, rollout, analysis.

    config: its resolved configuration. chosen: the files that were chosen, by group, as its record keeps them. Where it
    does not (older records), and for a function of one's own (`reward=custom`), the configuration says it; it says
    nothing of trainer, rollout and analysis.
    """
    said = {word: value for word, value in settings(config).items() if word in CHOICES}
    said |= _named_objective(config)
    said |= {group: name for group, name in chosen.items() if name != OWN or group not in said}
    return {group: said[group] for group in CHOICES if group in said}


def common(configs: Iterable[Mapping[str, Any]]) -> str:
    """The choices that all configurations share, as one line; "" where there are none.

    >>> tiny = {"name": "tiny"}
    >>> common([{"model": tiny, "trainer": {"lr": 1e-3}}, {"model": tiny, "trainer": {"lr": 0}}])
    'model=tiny'
    """
    every = [settings(config) for config in configs]
    first = every[0] if every else {}
    return " ".join(f"{word}={value}" for word, value in first.items() if all(one.get(word) == value for one in every))
