"""The optimiser's part of a step and, every `analysis.update_every` steps, what it does to the weights."""

from __future__ import annotations

from dataclasses import dataclass, field

from grpo_sweeps.engine.update_geometry import UpdateGeometry
from grpo_sweeps.loop.schedule import due
from grpo_sweeps.loop.setup import Setup
from grpo_sweeps.types import UpdateRecord


@dataclass(frozen=True)
class Update:
    """One update: the gradient's norm before clipping, and where it was measured its metrics and records."""

    grad_norm: float
    metrics: dict[str, float] = field(default_factory=dict)
    records: list[UpdateRecord] = field(default_factory=list)


def apply_update(setup: Setup, step: int, lr: float) -> Update:
    """Update once at learning rate `lr`. Measured or not, the weights after it are the same.

    Raises:
        FloatingPointError: when the gradient is not finite.
    """
    if not due(step, setup.config.analysis.update_every):
        return Update(setup.optimizer.step(lr))
    names = [name for name, p in setup.policy.model.named_parameters() if p.requires_grad]
    geometry = UpdateGeometry(names)
    grad_norm = setup.optimizer.step(lr, geometry)
    return Update(grad_norm, geometry.metrics(), geometry.records(step))
