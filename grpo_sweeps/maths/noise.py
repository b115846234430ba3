"""Signal and noise of a step's gradient: its signal-to-noise ratio, and the noise scale in groups.

g_b is the gradient of group b as it enters the step's sum: 0 for a group that has none, which counts. A step has G
groups.

    m            (||sum_b g_b||^2 - sum_b ||g_b||^2) / (G (G - 1))    unbiased for ||E g||^2: the mean of <g_b, g_c>
                                                                      over all pairs of different groups
    v            sum_b ||g_b||^2 / G - m                              unbiased for tr Cov g, never below 0
    noise_scale  v / m      groups per step at which noise and signal of its gradient are of one size
    snr          m G / v    of the step's gradient: G / noise_scale

m and v are the estimates of McCandlish et al. 2018 (arXiv 1812.06162, Appendix A.1) with one group as the small batch
and the step as the large one, v / m is their simple noise scale. They are unbiased where the step's groups are
independent draws, and the ratio is taken of means over a window of steps, since one step's m is mostly noise.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike

WINDOW = 20  # steps


def signal_and_noise(step_sq_norm: float, group_sq_norms_G: ArrayLike) -> tuple[float, float]:
    """m and v of the module's docstring, squared gradients of one group.

    Args:
        step_sq_norm: ||sum_b g_b||^2, of the whole step's gradient before clipping.
        group_sq_norms_G: ||g_b||^2 of all G groups, in the same units.

    Raises:
        ValueError: with fewer than two groups.

    >>> signal_and_noise(16.0, [4.0, 4.0])  # two equal gradients: no noise
    (4.0, 0.0)
    """
    squares_G = np.asarray(group_sq_norms_G, dtype=np.float64)
    G = len(squares_G)
    if G < 2:
        raise ValueError(f"groups={G}: two groups or more are needed")
    total = float(squares_G.sum())
    # with one gradient alone every product of two is 0, and the difference nothing but the rounding of two sums
    m = (step_sq_norm - total) / (G * (G - 1)) if np.count_nonzero(squares_G) > 1 else 0.0
    return m, total / G - m


@dataclass
class NoiseWindow:
    """What the last `WINDOW` steps of a run gave, where they were measured. `entries`, each (step, m, v), are plain
    numbers: a checkpoint keeps them, so that a resumed run has the window of an undisturbed one."""

    entries: list[tuple[int, float, float]] = field(default_factory=list)

    def add(self, step: int, m: float, v: float) -> None:
        """The next measured step."""
        self.entries = [e for e in self.entries if step - WINDOW < e[0] < step] + [(step, m, v)]

    def metrics(self, groups: int) -> dict[str, float]:
        """`gradient/snr` and `gradient/noise_scale` at `groups` per step; empty where the window's m or v is not
        above 0, and the ratios say nothing."""
        m = sum(e[1] for e in self.entries) / max(1, len(self.entries))
        v = sum(e[2] for e in self.entries) / max(1, len(self.entries))
        if not (m > 0 and v > 0):
            return {}
        return {"gradient/snr": m * groups / v, "gradient/noise_scale": v / m}
