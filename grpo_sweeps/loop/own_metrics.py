"""Metrics of a user's own, of one measured group: `analysis.own_metrics=[my_module.my_metric]`.

    my_metric(gram_RR, rewards_R, weights_R, lengths_R) -> a number, or {name: number}

Arrays are float64. The rows of `gram_RR` are those of the record: scores, or with another objective than the plain one
the gradients of a rollout's terms of the loss, which have the weight in them. The mean over the step's measured groups
is logged as `own/my_metric`, of a mapping as `own/my_metric/name`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from grpo_sweeps.loop.setup import Setup
from grpo_sweeps.types import ConfigError, GroupRecord


def own_metrics(setup: Setup, groups: Sequence[GroupRecord]) -> dict[str, float]:
    """The step's values; without a measured group none. A value that is NaN is left out of its mean.

    Raises:
        ConfigError: where a function gives something else than numbers.
    """
    values: dict[str, list[float]] = {}
    for name, function in setup.own_metrics:
        for group in groups:
            if group.gram is None:
                continue
            parts = (np.array(part, dtype=np.float64) for part in (group.rewards, group.weights, group.lengths))
            for key, value in _numbers(name, function(group.gram.copy(), *parts)).items():
                values.setdefault(key, []).extend([] if math.isnan(value) else [value])
    return {key: float(np.mean(found)) for key, found in values.items() if found}


def _numbers(name: str, given: Any) -> dict[str, float]:
    found = {f"own/{name}/{key}": value for key, value in given.items()} if isinstance(given, Mapping) else {}
    found = found or {f"own/{name}": given}
    for key, value in found.items():
        if not isinstance(value, int | float | np.number):
            raise ConfigError(
                f"analysis.own_metrics: {key} is {value!r:.200}; a number is needed, or a mapping of them"
            )
    return {key: float(value) for key, value in found.items()}
