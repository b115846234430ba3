"""Random numbers that belong to one row: the same for a run's seed, R, step and group whatever rows stand beside it.

One counter-based generator (Philox) serves all rows; each row begins at a counter of its own, 2^64 numbers from any
other row's. To make a generator for each row would take longer than to draw from it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from grpo_sweeps.spectra import Array

NULL_SEED = 2606_29238  # of the Gaussian null, beside the run's own
_WORD = 2**64 - 1


class RowNormals:
    """Standard normal matrices for groups of R rollouts of a run with this seed."""

    def __init__(self, seed: int, R: int) -> None:
        self._bits = np.random.Philox(key=np.array([NULL_SEED, seed & _WORD], dtype=np.uint64))
        self._generator = np.random.Generator(self._bits)
        self._start = self._bits.state
        self.R = R

    def draw(self, step_N: NDArray[np.int64], group_N: NDArray[np.int64], draws: int) -> Array:
        """(N, draws, R, R), row i those of step_N[i] and group_N[i]."""
        out = np.empty((len(step_N), draws, self.R, self.R))
        for row, step, group in zip(out, step_N.tolist(), group_N.tolist(), strict=True):
            self._start["state"]["counter"][:] = (0, self.R, group & _WORD, step & _WORD)
            self._bits.state = self._start
            self._generator.standard_normal(out=row)
        return out
