"""Functions by dotted path: how a task, a reward or an estimator of the user's own is found."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any

from grpo_sweeps.config import FunctionConfig
from grpo_sweeps.types import ConfigError


def load_function(config: FunctionConfig, key: str, positional: int) -> Callable[..., Any]:
    """The function that `config.target` names, with its keyword arguments bound.

    Args:
        config: dotted path and keyword arguments.
        key: the configuration key, for the error ("reward").
        positional: how many positional arguments the package will call it with.

    Raises:
        ConfigError: when it cannot be imported, cannot be called, or does not accept an argument.
    """
    function = _import(config.target, key)
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return functools.partial(function, **config.kwargs)
    for name in config.kwargs:
        try:
            signature.bind_partial(**{name: config.kwargs[name]})
        except TypeError:
            allowed = ", ".join(list(signature.parameters)[positional:]) or "none"
            raise ConfigError(
                f"{key}.{name}={config.kwargs[name]}: {config.target} takes no argument of that name "
                f"(allowed: {allowed}); "
                f"drop it with ~{key}.{name}"
            ) from None
    try:
        signature.bind(*[None] * positional, **config.kwargs)
    except TypeError as error:
        raise ConfigError(
            f"{key}._target_={config.target}: must be callable with {positional} positional arguments "
            f"and {key}'s other keys ({error})"
        ) from None
    return functools.partial(function, **config.kwargs)


def _import(target: str, key: str) -> Callable[..., Any]:
    module_name, _, name = target.rpartition(".")
    if not module_name:
        raise ConfigError(f"{key}._target_={target}: a dotted path module.function is needed")
    try:
        function = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"{key}._target_={target}: cannot be imported ({error}); a dotted path module.function is needed"
        ) from error
    if not callable(function):
        raise ConfigError(f"{key}._target_={target}: is a {type(function).__name__}; a function is needed")
    return function  # type: ignore[no-any-return]
