"""Several rewards as one: the weighted sum of those that apply."""

from __future__ import annotations

from collections.abc import Sequence


def weighted_sum(values: Sequence[float | None], weights: Sequence[float]) -> float | None:
    """The sum of weight times value over the functions that apply to a rollout; None where none does.

    The weights are not rescaled where one is missing: a rollout's reward does not depend on what does not apply to it.

    >>> weighted_sum([1.0, None, 0.5], [1.0, 2.0, 3.0]), weighted_sum([None], [1.0])
    (2.5, None)
    """
    found = [weight * value for value, weight in zip(values, weights, strict=True) if value is not None]
    return sum(found) if found else None
