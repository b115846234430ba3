"""What Hydra is told: the typed schema of the composed config, our defaults for its launchers, the resolvers of
config.yaml."""

from __future__ import annotations

import dataclasses
import typing
from functools import cache
from typing import Any

from grpo_sweeps.config.schema import (
    AnalysisConfig,
    ModelConfig,
    ObjectiveConfig,
    RolloutConfig,
    TrackingConfig,
    TrainerConfig,
)

SCHEMA = "run_schema"  # the first entry of config.yaml's defaults list
REQUIRED = "???"  # OmegaConf's mark of a value that must be given


def register() -> None:
    """Store schema, launchers and resolvers. Safe to call again.

    Hydra's scan of the plugins stores hydra-submitit-launcher's own defaults under the names that ours go by, so the
    scan has to be over before ours are stored.
    """
    from hydra.core.config_store import ConfigStore
    from hydra.core.plugins import Plugins
    from omegaconf import OmegaConf

    from grpo_sweeps.sweep.paths import data_root, sweeps_help

    Plugins.instance()
    from hydra_plugins.grpo_launcher.config import store_launchers

    ConfigStore.instance().store(name=SCHEMA, node=composed_schema(), provider="grpo_sweeps")
    store_launchers()
    OmegaConf.register_new_resolver("root", lambda: str(data_root()), replace=True)
    OmegaConf.register_new_resolver("sweeps_help", sweeps_help, replace=True)


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
    for name, cls in groups.items():
        twin = _writable(cls)
        values.append((name, twin, dataclasses.field(default_factory=twin)))
    for name in ("task", "reward", "estimator"):
        values.append((name, dict[str, Any], dataclasses.field(default_factory=dict)))
    values.append(("redo", str | None, dataclasses.field(default=None)))
    for name, default in (("dry_run", False), ("wait", True), ("require_clean", False)):
        values.append((name, bool, dataclasses.field(default=default)))
    return dataclasses.make_dataclass("Config", values)


def _writable(cls: type) -> type:
    """The same dataclass, not frozen: OmegaConf makes a node of a frozen one read-only, and overrides could not reach
    it."""
    hints = typing.get_type_hints(cls)
    items: list[Any] = []
    for item in dataclasses.fields(cls):
        hint = hints[item.name]
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
