"""What `reward` says: one function, or several with a weight each; and how each of them is called.

    rollout  my_reward(completion, problem, seed) -> number
    group    my_reward(completions, problem, seeds) -> numbers     the rollouts of one problem
    batch    my_reward(completions, problems, seeds) -> numbers    all rollouts at once
    trl      my_reward(prompts, completions, **columns) -> numbers as TRL calls it: by name, the data's columns as lists

The names of its parameters tell which of them a function is; `per` tells it where they have other names. A class with
`__call__` is made once, from the reward's other keys. None instead of a number: the function does not apply.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from grpo_sweeps.config.functions import imported, load_function
from grpo_sweeps.config.schema import FunctionConfig, shown
from grpo_sweeps.rewards.weighted_sum import weighted_sum
from grpo_sweeps.types import ConfigError

PER = ("rollout", "group", "batch", "trl")
SEVERAL = f"{weighted_sum.__module__}.{weighted_sum.__name__}"
TAKEN = ("strict", "flexible", "task", "failed")  # reward/NAME says something else
TRL_GIVES = ("prompts", "completions")


@dataclass(frozen=True)
class RewardPart:
    """One function of a reward. name: of its metric, `reward/NAME`; empty where it is the only one. per: one of `PER`;
    None where its parameters tell."""

    function: FunctionConfig
    name: str = ""
    weight: float = 1.0
    per: str | None = None

    @property
    def key(self) -> str:
        """The key of the configuration that holds it."""
        return f"reward.functions.{self.name}" if self.name else "reward"


def reward_parts(reward: FunctionConfig) -> tuple[RewardPart, ...]:
    """The functions of a reward, one or several. Raises ConfigError for keys that cannot be understood."""
    if reward.target != SEVERAL:
        return (_part(reward.target, reward.kwargs, ""),)
    functions, others = reward.kwargs.get("functions"), [key for key in reward.kwargs if key != "functions"]
    if others:
        raise ConfigError(f"reward.{others[0]}={shown(reward.kwargs[others[0]])}: no such key; functions is allowed")
    if not isinstance(functions, Mapping) or not functions:
        raise ConfigError(
            f"reward.functions={functions}: one function or more is needed, by the name of its metric: "
            "+reward.functions.NAME._target_=my_module.my_reward"
        )
    return tuple(_named(str(name), keys) for name, keys in functions.items())


def _named(name: str, keys: Any) -> RewardPart:
    if name in TAKEN:
        raise ConfigError(f"reward.functions.{name}: reward/{name} is another metric; choose another name")
    target = keys.get("_target_") if isinstance(keys, Mapping) else None
    if not isinstance(target, str):
        raise ConfigError(f"reward.functions.{name}._target_={target}: the dotted path of a function is needed")
    return _part(target, {key: value for key, value in keys.items() if key != "_target_"}, name)


def _part(target: str, keys: Mapping[str, Any], name: str) -> RewardPart:
    kwargs = dict(keys)
    per, weight = kwargs.pop("per", None), kwargs.pop("weight", 1.0) if name else 1.0
    part = RewardPart(FunctionConfig(target, kwargs), name, weight, per)
    if per is not None and per not in PER:
        raise ConfigError(f"{part.key}.per={per}: choose one of {', '.join(PER)}")
    if isinstance(weight, bool) or not isinstance(weight, int | float):
        raise ConfigError(f"{part.key}.weight={weight}: a number is needed")
    return part


class RewardCall:
    """A function of a reward as it is called: per rollout with a completion, its problem and its seed; per group with
    lists of completions and seeds; per batch with lists of all three; per `trl` with a mapping of its arguments first,
    of which it is given those that it takes.
    """

    def __init__(self, function: Callable[..., Any], per: str) -> None:
        self.function, self.per = function, per
        self._takes = _taken_by(function) if per == "trl" else _everything

    def __call__(self, completions: Any, problems: Any, seeds: Any) -> Any:
        if self.per != "trl":
            return self.function(completions, problems, seeds)
        return self.function(**{name: value for name, value in completions.items() if self._takes(name)})


def bound_reward(part: RewardPart) -> tuple[functools.partial[Any], str]:
    """The function, or the class that makes it, with its keyword arguments; and how it is called.

    Raises:
        ConfigError: when it cannot be imported, cannot be called, or does not accept an argument.
    """
    said = f"{part.key}._target_={part.function.target}"
    found = imported(part.function.target, said)
    if inspect.isclass(found):
        if not any("__call__" in vars(base) for base in found.__mro__):
            raise ConfigError(f"{said}: its objects cannot be called; a class with __call__ is needed")
        return load_function(part.function, part.key, positional=0), part.per or per_of(found.__call__)
    per = part.per or per_of(found)
    if per == "trl":
        return functools.partial(found, **_known(found, part)), per
    return load_function(part.function, part.key, positional=3), per


def load_reward(part: RewardPart) -> RewardCall:
    """The function, ready to be called. Raises as `bound_reward`."""
    bound, per = bound_reward(part)
    return RewardCall(bound() if inspect.isclass(bound.func) else bound, per)


def per_of(function: Callable[..., Any]) -> str:
    """How a function is called, by the names of its parameters."""
    try:
        names = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return "rollout"
    if "problems" in names:
        return "batch"
    if "problem" in names:
        return "group" if "completions" in names else "rollout"
    return "trl" if any(name in names for name in TRL_GIVES) else "rollout"


def _known(function: Callable[..., Any], part: RewardPart) -> dict[str, Any]:
    """The keywords of a function by TRL's signature, which takes any others as the data's columns."""
    parameters = inspect.signature(function).parameters
    for name in part.function.kwargs:
        if name not in parameters:
            allowed = ", ".join(key for key in parameters if key not in TRL_GIVES) or "none"
            raise ConfigError(
                f"{part.key}.{name}={part.function.kwargs[name]}: {part.function.target} takes no such argument "
                f"(allowed: {allowed}); drop it with ~{part.key}.{name}"
            )
    return part.function.kwargs


def _taken_by(function: Callable[..., Any]) -> Callable[[str], bool]:
    """Whether a function takes an argument of that name, which the configuration does not give it already."""
    given = getattr(function, "keywords", {})
    parameters = inspect.signature(function).parameters
    open_to_all = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values())
    return lambda name: name not in given and (open_to_all or name in parameters)


def _everything(name: str) -> bool:
    return True
