"""A reward that does not depend on the completion: what a spectrum still shows under it is not learning."""

from __future__ import annotations

import random
from typing import Annotated

from grpo_sweeps.types import ConfigError, Problem, Within


def bernoulli(completion: str, problem: Problem, seed: int, p: Annotated[float, Within(0, 1)] = 0.5) -> float:
    """1.0 with probability p, else 0.0, from `seed` alone. Raises ConfigError when p is not in 0..1."""
    if not 0.0 <= p <= 1.0:
        raise ConfigError(f"reward.p={p!r} is not allowed: it must be a probability from 0 to 1.")
    return float(random.Random(int(seed)).random() < p)
