"""The update of a step: applied, and what it was; every `analysis.update_every` steps what it does to the weights, and
signal and noise of the gradient behind it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from grpo_sweeps.engine.update_geometry import UpdateGeometry
from grpo_sweeps.loop.setup import Setup, due
from grpo_sweeps.maths.noise import signal_and_noise
from grpo_sweeps.types import GroupRecord, UpdateRecord


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


def gradient_noise(setup: Setup, step: int, groups: Sequence[GroupRecord], grad_norm: float) -> dict[str, float]:
    """`gradient/snr` and `gradient/noise_scale` with this step in the run's window.

    Empty, and the window as it was, for a step that `analysis.every` leaves out (it has no Grams), one of several
    updates (no norm is of the sum of all groups' gradients), or one of a single group. grad_norm: before clipping.
    """
    config = setup.config
    if setup.gram is None or not due(step, config.analysis.every) or config.objective.updates > 1 or len(groups) < 2:
        return {}
    setup.noise.add(step, *signal_and_noise(grad_norm**2, [_sq_norm(group) for group in groups]))
    return setup.noise.metrics(len(groups))


def _sq_norm(group: GroupRecord) -> float:
    """||g_b||^2. In a measured step a group without a Gram is one without a gradient."""
    if group.gram is None:
        return 0.0
    w = np.ones(group.R) if group.rows == "loss" else np.array(group.weights)
    return float(w @ group.gram @ w)
