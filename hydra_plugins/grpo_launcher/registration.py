"""Registers with Hydra the typed schema of the composed config, our defaults for its launchers, and the resolvers of
config.yaml. Hydra 1.3 and 1.4 (with OmegaConf 2.3 and 2.4) are each called in a way that raises no warning.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable
from functools import cache
from inspect import signature
from typing import Any

from grpo_sweeps.config.schema import (
    AnalysisConfig,
    LaunchConfig,
    ModelConfig,
    ObjectiveConfig,
    RolloutConfig,
    TrackingConfig,
    TrainerConfig,
)

SCHEMA = "run_schema"  # the first entry of config.yaml's defaults list
REQUIRED = "???"  # OmegaConf's mark of a value that must be given


def version_base() -> dict[str, str]:
    """The keyword argument that makes Hydra 1.3 behave as 1.3 and not as 1.1; none for 1.4, which deprecates it."""
    import hydra

    return {"version_base": "1.3"} if hydra.__version__.startswith("1.3.") else {}


def register() -> None:
    """Store schema, launchers and resolvers, and set Hydra's version base. Safe to call again.

    Hydra's scan of the plugins stores hydra-submitit-launcher's own defaults under the names of ours, so ours are
    stored after the scan.
    """
    from hydra import version
    from hydra.core.plugins import Plugins

    from grpo_sweeps.paths import data_root, sweeps_help

    for base in version_base().values():
        version.setbase(base)
    Plugins.instance()
    from hydra_plugins.grpo_launcher.config import store_config, store_launchers

    store_config(SCHEMA, composed_schema())
    store_launchers()
    _register_resolver("root", lambda: str(data_root()))
    _register_resolver("sweeps_help", sweeps_help)


def composed(*words: str) -> Any:
    """The configuration that a command's words compose, Hydra's own `hydra` node included."""
    from hydra import compose, initialize_config_dir

    from grpo_sweeps.paths import conf_dir

    register()
    with initialize_config_dir(str(conf_dir()), **version_base()):
        return compose("config", overrides=list(words), return_hydra_config=True)


def _register_resolver(name: str, resolver: Callable[[], str]) -> None:
    """Make `${name:}` resolve to what `resolver` returns."""
    from omegaconf import OmegaConf

    # In OmegaConf 2.3 `register_resolver` is an older function that takes no `replace`; 2.4 deprecates the new one.
    renamed = "replace" in signature(OmegaConf.register_resolver).parameters
    store: Any = OmegaConf.register_resolver if renamed else OmegaConf.register_new_resolver
    store(name, resolver, replace=True)


@cache
def composed_schema() -> type:
    """The dataclass that a composed config must match: typed groups, except task, reward and estimator, which are
    open."""
    groups = {
        "model": ModelConfig, "objective": ObjectiveConfig, "rollout": RolloutConfig, "analysis": AnalysisConfig,
        "trainer": TrainerConfig, "tracking": TrackingConfig,
    }  # fmt: skip
    values: list[Any] = [
        (name, kind, dataclasses.field(default=REQUIRED)) for name, kind in (("R", int), ("seed", int))
    ]
    values += [("sweep", str | None, dataclasses.field(default=None))]
    values += [(name, str, dataclasses.field(default=REQUIRED)) for name in ("aggregation", "runs_dir", "budget")]
    values += [("budget_R", int, dataclasses.field(default=REQUIRED))]
    values += [("reward_timeout", float | None, dataclasses.field(default=None))]
    values += [("reward_retries", int, dataclasses.field(default=REQUIRED))]
    values += [("reward_on_failure", str, dataclasses.field(default=REQUIRED))]
    for name, cls in groups.items():
        twin = _writable(cls)
        values.append((name, twin, dataclasses.field(default_factory=twin)))
    for name in ("task", "reward", "estimator"):
        values.append((name, dict[str, Any], dataclasses.field(default_factory=dict)))
    hints = typing.get_type_hints(LaunchConfig)
    for item in dataclasses.fields(LaunchConfig):
        values.append((item.name, hints[item.name], dataclasses.field(default=item.default)))
    return dataclasses.make_dataclass("Config", values)


def _writable(cls: type) -> type:
    """The same dataclass, not frozen: OmegaConf makes the node of a frozen one read-only, which no override can change.
    Tuples become lists: OmegaConf 2.4 would check their length before `checks` can say what is needed.
    """
    hints = typing.get_type_hints(cls)
    items: list[Any] = []
    for item in dataclasses.fields(cls):
        hint = hints[item.name]
        if typing.get_origin(hint) is tuple:
            hint = list[typing.get_args(hint)[0]]  # type: ignore[misc]
        if dataclasses.is_dataclass(hint):
            twin = _writable(typing.cast(type, hint))
            items.append((item.name, twin, dataclasses.field(default_factory=twin)))
        elif item.default is not dataclasses.MISSING:
            items.append((item.name, hint, dataclasses.field(default=item.default)))
        elif item.default_factory is not dataclasses.MISSING:
            items.append((item.name, hint, dataclasses.field(default_factory=item.default_factory)))
        else:
            items.append((item.name, hint, dataclasses.field(default=REQUIRED)))
    return dataclasses.make_dataclass(cls.__name__, items)
