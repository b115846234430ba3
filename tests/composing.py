"""The configuration that a command's words compose, as `python -m grpo_sweeps.run` composes it."""

from __future__ import annotations

from grpo_sweeps.config import RunConfig
from hydra_plugins.grpo_launcher.registration import composed

__all__ = ["composed", "run_config"]


def run_config(*overrides: str) -> RunConfig:
    """The typed configuration of one run."""
    return RunConfig.from_composed(composed(*overrides))
