"""grpo_sweeps: sweeps over how GRPO learns, with the exact spectrum of the per-rollout gradients at every step.

Public names are loaded when first used, so that `import grpo_sweeps` needs neither torch nor pandas.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from grpo_sweeps.engine.gram import GradientGram, verify_against_autograd
    from grpo_sweeps.report.read.query import load_sweep

__version__ = "0.1.0"
__all__ = ["GradientGram", "__version__", "load_sweep", "verify_against_autograd"]

_HOMES = {
    "GradientGram": "grpo_sweeps.engine.gram",
    "load_sweep": "grpo_sweeps.report.read.query",
    "verify_against_autograd": "grpo_sweeps.engine.gram",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'grpo_sweeps' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
