"""Pairwise covering arrays: few cases in which every two values of different factors meet."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Case = dict[str, Any]
Pair = tuple[tuple[str, Any], tuple[str, Any]]


def pairs_of(case: Mapping[str, Any]) -> set[Pair]:
    return set(itertools.combinations(case.items(), 2))


def every_case(factors: Mapping[str, Sequence[Any]], allowed: Callable[[Case], bool]) -> list[Case]:
    products = itertools.product(*factors.values())
    return [case for values in products if allowed(case := dict(zip(factors, values, strict=True)))]


def covering_array(
    factors: Mapping[str, Sequence[Any]],
    allowed: Callable[[Case], bool] = lambda case: True,
    cost: Callable[[Case], float] = lambda case: 0.0,
) -> list[Case]:
    """Cases that hold every pair of values that some allowed case holds: the greedy choice, the cheaper of equals.

    The same arguments give the same cases in the same order.
    """
    candidates = sorted(every_case(factors, allowed), key=cost)  # stable: of equal cost the first stays first
    pairs = [pairs_of(case) for case in candidates]
    left = set().union(*pairs)
    chosen = []
    while left:
        gains = [len(found & left) for found in pairs]
        best = gains.index(max(gains))
        chosen.append(candidates[best])
        left -= pairs[best]
    return chosen
