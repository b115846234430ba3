"""R* from many sweeps of an exact policy: what single sweeps scatter around."""

from __future__ import annotations

import numpy as np
import pytest

from grpo_sweeps.report.design.best_size import best_size
from grpo_sweeps.report.read.query import load_sweep
from tests.unit.report.exact_runs import enumerations, truth, write_exact

pytestmark = pytest.mark.integration


def test_the_estimates_are_unbiased_over_many_sweeps(tmp_path):
    """The mean over 40 short sweeps, with its own standard error: V_between is a difference of large terms."""
    exact, found = enumerations(), []
    for seed in range(40):
        write_exact(tmp_path / str(seed), "s", exact, 4, 12, 4, seed=seed)
        found.append(best_size(load_sweep("s", tmp_path / str(seed)), "all", 4).values)
    for name in ("signal", "spread", "V1", "signal_of_mean", "V_between", "error_here"):
        values = np.array([f[name] for f in found])
        assert abs(values.mean() - truth(exact, 4)[name]) < 4 * values.std(ddof=1) / len(values) ** 0.5, name
