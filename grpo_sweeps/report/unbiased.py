"""Measured groups -> unbiased estimates of what decides the best group size (`grpo_sweeps.maths.ustatistics`)."""

from __future__ import annotations

import numpy as np

from grpo_sweeps.maths import ustatistics
from grpo_sweeps.report.measure.spectral import Groups
from grpo_sweeps.spectra import Array

UNBIASED = ("u_signal", "u_spread", "u_oracle_variance")
LEAST_R = 4  # products of four distinct rollouts


def unbiased_columns(groups: Groups) -> dict[str, Array]:
    """{column of UNBIASED: (N,) values}, of the scores and rewards alone, whatever the weights.

    u_signal            for ||grad J||^2 of the group's prompt at the step's policy
    u_spread            for sigma^2 tr F
    u_oracle_variance   for V1 = tr Var((r - v) psi)

    NaN for R < 4, and where the Gram is of the rows of the loss. A group of equal rewards, which has no Gram as a rule,
    is 0 in all three: who averages over prompts counts it as that.
    """
    if not groups.scores or groups.R < LEAST_R:
        return dict.fromkeys(UNBIASED, np.full(len(groups.gram_NRR), np.nan))
    estimates = (ustatistics.signal, ustatistics.spread, ustatistics.oracle_variance)
    return {
        name: estimate(groups.rewards_NR, groups.gram_NRR) for name, estimate in zip(UNBIASED, estimates, strict=True)
    }
