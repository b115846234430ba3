"""Signal and noise (`grpo_sweeps.maths.noise`) of a step's gradient, from its norm and the Grams of its groups."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from grpo_sweeps.loop.schedule import due
from grpo_sweeps.loop.setup import Setup
from grpo_sweeps.maths.noise import signal_and_noise
from grpo_sweeps.types import GroupRecord


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
