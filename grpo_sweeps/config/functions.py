"""Finds a task, a reward, an estimator or a sampler engine by its dotted path, built in or the user's own."""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from grpo_sweeps.config.schema import FunctionConfig
from grpo_sweeps.estimators.foreign import LENGTHS, on_arrays, takes_lengths
from grpo_sweeps.paths import working_directory_kept
from grpo_sweeps.text import did_you_mean
from grpo_sweeps.types import Array, ConfigError, EstimatorFunction, Problem, Verdict

SAMPLERS = {
    "eager": "grpo_sweeps.engine.samplers.eager.EagerSampler",
    "graph": "grpo_sweeps.engine.samplers.graph.GraphSampler",
}
"""The built-in engines of `rollout.engine`; `auto` is one of them, by the policy."""
SAMPLER_CHOICES = ("auto", *SAMPLERS)


def load_estimator(config: FunctionConfig) -> EstimatorFunction:
    """The estimator that `config` names, as a function of arrays; it is given the lengths if it has a parameter for
    them.

    Raises:
        ConfigError: as for `load_function`.
    """
    function = load_function(config, "estimator", positional=1, offered=(LENGTHS,))
    with_lengths = takes_lengths(function.func)
    called = on_arrays(function)

    def estimator(rewards_GR: Array, lengths_GR: Array) -> Any:
        given = {LENGTHS: lengths_GR} if with_lengths else {}
        return called(rewards_GR, **given)

    return estimator


def load_function(
    config: FunctionConfig, key: str, positional: int, offered: tuple[str, ...] = ()
) -> functools.partial[Any]:
    """The function that `config.target` names, with its keyword arguments bound.

    Args:
        config: dotted path and keyword arguments.
        key: the configuration key, for the error ("reward").
        positional: the number of positional arguments that the package calls it with.
        offered: keyword arguments that the package adds where the function has parameters of these names.

    Raises:
        ConfigError: when it cannot be imported, cannot be called, or does not accept an argument.
    """
    function = imported(config.target, f"{key}._target_={config.target}")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return functools.partial(function, **config.kwargs)
    added = {name: None for name in offered if name in signature.parameters}
    for name in config.kwargs:
        if name in added:
            raise ConfigError(f"{key}.{name}={config.kwargs[name]}: each step gives it; drop it with ~{key}.{name}")
        try:
            signature.bind_partial(**{name: config.kwargs[name]})
        except TypeError:
            others = [other for other in list(signature.parameters)[positional:] if other not in added]
            allowed = ", ".join(others) or "none"
            raise ConfigError(
                f"{key}.{name}={config.kwargs[name]}: {config.target} takes no argument of that name "
                f"(allowed: {allowed}); "
                f"drop it with ~{key}.{name}"
            ) from None
    try:
        signature.bind(*[None] * positional, **added, **config.kwargs)
    except TypeError as error:
        raise ConfigError(
            f"{key}._target_={config.target}: must be callable with {positional} positional arguments "
            f"and {key}'s other keys ({error})"
        ) from None
    return functools.partial(function, **config.kwargs)


def load_own_metrics(targets: Sequence[str]) -> tuple[tuple[str, Callable[..., Any]], ...]:
    """The functions that `analysis.own_metrics` names, by the last part of their dotted paths.

    Raises:
        ConfigError: when one cannot be imported or called, and where two of them have one name.
    """
    key, found = "analysis.own_metrics", list[tuple[str, Callable[..., Any]]]()
    for target in targets:
        function = imported(target, f"{key}={target}")
        try:
            inspect.signature(function).bind(*[None] * 4)
        except TypeError as error:
            wanted = "must be callable with 4 positional arguments, (gram_RR, rewards_R, weights_R, lengths_R)"
            raise ConfigError(f"{key}={target}: {wanted} ({error})") from None
        found.append((target.rpartition(".")[2], function))
    names = [name for name, _ in found]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ConfigError(f"{key}={list(targets)}: {twice[0]} names two of them; each needs a name of its own")
    return tuple(found)


def load_verdict(target: str, key: str = "task.verdict") -> Callable[[str, Problem], Verdict]:
    """The verdict that a dotted path names, `my_verdict(completion, problem)`, with what it answers checked: a bool,
    for both readings, or a `types.Verdict`.

    Raises:
        ConfigError: when it cannot be imported or called with two arguments; from the verdict, for another answer.
    """
    said = f"{key}={target}"
    function = imported(target, said)
    try:
        inspect.signature(function).bind(None, None)
    except TypeError as error:
        raise ConfigError(
            f"{said}: must be callable with 2 positional arguments, (completion, problem) ({error})"
        ) from None
    except ValueError:
        pass  # built in: nothing is known of its arguments

    def verdict(completion: str, problem: Problem) -> Verdict:
        found = function(completion, problem)
        if isinstance(found, Verdict):
            return found
        if not isinstance(found, bool | np.bool_):
            raise ConfigError(f"{said}: gave {found!r:.200} on problem {problem.id}; true or false is needed")
        return Verdict(strict=bool(found), flexible=bool(found), parsed=True)

    return verdict


def own_verdict_on(completion: str, problem: Problem, seed: int = 0, verdict: str = "") -> Verdict:
    """The verdict of a dotted path by a reward's signature: what runs in a process that can be ended."""
    return _loaded_verdict(verdict)(completion, problem)


_loaded_verdict = functools.cache(load_verdict)


def sampler_class(engine: str) -> Any:
    """The class that `rollout.engine` names, a built-in choice or a dotted path; see `engine.samplers.SamplerEngine`.

    Raises:
        ConfigError: when it cannot be imported, or has no `sample`.
    """
    said = f"rollout.engine={engine}"
    found = imported(
        SAMPLERS.get(engine, engine), said, "the dotted path of a class, such as my_module.MySampler, is needed"
    )
    if not callable(getattr(found, "sample", None)):
        raise ConfigError(f"{said}: has no method sample; see grpo_sweeps.engine.samplers.SamplerEngine")
    return found


def imported(target: str, said: str, allowed: str = "a dotted path module.function is needed") -> Callable[..., Any]:
    """What a dotted path names; `said` is how an error begins.

    Raises:
        ConfigError: when it cannot be imported or called.
    """
    module_name, _, name = target.rpartition(".")
    if not module_name:
        raise ConfigError(f"{said}: {allowed}")
    try:
        with working_directory_kept():
            function = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        there = vars(sys.modules[module_name]).items() if module_name in sys.modules else ()
        functions = [other for other, value in there if callable(value) and not other.startswith("_")]
        sentence = f"{said}: cannot be imported ({error}); {allowed}"
        raise ConfigError(did_you_mean(sentence, name, functions)) from error
    if not callable(function):
        raise ConfigError(f"{said}: is a {type(function).__name__}; a function is needed")
    return function  # type: ignore[no-any-return]
