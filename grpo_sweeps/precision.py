"""How exactly a run checks its own Grams, by the name of the model's dtype; needs no torch, so that a report can read
it."""

from __future__ import annotations

EPS = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}

# In machine epsilons. Seen: 1 (float64), 0.05 (float32), 0.004 (half types; the ghost form rounds the weighted
# gradients once more).
CHECK_FACTOR = {"float64": 1e4, "float32": 40.0, "float16": 2.0, "bfloat16": 0.5}


def tolerance(dtype: str) -> float:
    """Allowed miss of w'Kw against the squared norm of the gradient that was applied, relative to |w|'|K||w|.

    Both are made from the same rows, so only the roundings of their sums (and of the gradient to its dtype) separate
    them.

    >>> tolerance("bfloat16")
    0.00390625
    """
    return CHECK_FACTOR[dtype] * EPS[dtype]


def coarsest() -> float:
    """The largest `tolerance`: what is known where a run does not say its dtype.

    >>> coarsest() == tolerance("bfloat16")
    True
    """
    return max(map(tolerance, EPS))
