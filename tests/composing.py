"""The configuration that a command's words compose, as `python -m grpo_sweeps.run` composes it."""

from __future__ import annotations

from typing import Any

from hydra import compose, initialize_config_dir

from grpo_sweeps.config import RunConfig
from grpo_sweeps.paths import conf_dir
from hydra_plugins.grpo_launcher.registration import register, version_base


def composed(*overrides: str) -> Any:
    """Hydra's composed configuration, its `hydra` node included."""
    register()
    with initialize_config_dir(str(conf_dir()), **version_base()):
        return compose("config", overrides=list(overrides), return_hydra_config=True)


def run_config(*overrides: str) -> RunConfig:
    """The typed configuration of one run."""
    return RunConfig.from_composed(composed(*overrides))
