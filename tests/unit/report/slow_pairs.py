"""The slow way to the columns of `report.advantages`, `report.pairs` and `report.permutation`: loops over rollouts."""

from __future__ import annotations

import itertools
import math

import numpy as np

from grpo_sweeps.paper import EPSILONS
from grpo_sweeps.report.measure.pairs import UNBIASED
from grpo_sweeps.spectra.records import own_precision, same_texts
from grpo_sweeps.types import GroupRecord
from tests.unit.slow_kernels import by_kernels

NAN = math.nan
DTYPE = "float32"  # of the runs that `conftest.write_run` makes


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else NAN


def _relative(values: tuple[float, ...]) -> float:
    largest = max(abs(v) for v in values)
    return abs(sum(values)) / largest if largest else NAN


def advantages(record: GroupRecord) -> dict[str, float]:
    A, r, R = record.advantages, record.rewards, record.R
    mean = sum(r) / R
    lone = set(r) <= {0.0, 1.0} and sum(r) == 1
    found = {
        "advantage_sum": _relative(A),
        "weight_sum": _relative(record.weights),
        "advantage_max": max(abs(a) for a in A),
        "advantage_square": _mean([a * a for a in A]),
        "advantage_product": _mean([A[i] * A[j] for i, j in itertools.permutations(range(R), 2)]),
        "reward_variance": sum((x - mean) ** 2 for x in r) / (R - 1),
        "lone_right": A[r.index(1.0)] if lone else NAN,
    }
    return found | {f"advantage_above_{eps}": _mean([float(abs(a) > eps) for a in A]) for eps in EPSILONS}


def pairs_and_shuffles(record: GroupRecord) -> dict[str, float]:
    K, R, r = np.asarray(record.gram), record.R, record.rewards
    if record.rows == "loss":
        names = ("norm", "all", "square", "right", "wrong", "between", "null", "error")
        empty = {f"pair_{n}": NAN for n in names} | {n: NAN for n in (*SHUFFLED, *UNBIASED)}
        return {"gradient_norm": math.sqrt(max(0.0, K.sum())), "energy": sum(np.diag(K))} | empty
    pairs = list(itertools.permutations(range(R), 2))
    binary = set(r) <= {0.0, 1.0}

    def product(test) -> float:
        return _mean([K[i, j] for i, j in pairs if binary and test(r[i] + r[j])])

    norm = _mean([K[i, i] for i in range(R)])
    lone = sum(r) in (1, R - 1)
    null = _mean([K[i, j] * (0.5 if r[i] != r[j] and lone else 1.0) for i, j in pairs])
    return {
        "gradient_norm": math.sqrt(max(0.0, np.array(record.weights) @ K @ np.array(record.weights))),
        "energy": sum(w * w * K[i, i] for i, w in enumerate(record.weights)),
        "pair_norm": norm, "pair_all": _mean([K[i, j] for i, j in pairs]),
        "pair_square": _mean([K[i, j] ** 2 for i, j in pairs]),
        "pair_right": product(lambda s: s == 2), "pair_wrong": product(lambda s: s == 0),
        "pair_between": product(lambda s: s == 1),
        "pair_null": null if binary and record.mixed and R > 2 else NAN,
        "pair_error": own_precision(record, DTYPE) * norm,
    } | _shuffles(record, K) | _unbiased(record, K)  # fmt: skip


def _unbiased(record: GroupRecord, K: np.ndarray) -> dict[str, float]:
    values = by_kernels(record.rewards, K) if record.R >= 4 else (NAN, NAN, NAN)
    return dict(zip(UNBIASED, values, strict=True))


SHUFFLED = ("shuffle_p", "shuffle_mid_p", "shuffle_variance", "shuffle_assignments")


def _shuffles(record: GroupRecord, K: np.ndarray) -> dict[str, float]:
    """For group-mean advantages of binary rewards: every set of k rollouts as the right ones that could be, ranks by
    comparison. K is averaged over equal texts."""
    R, r, same = record.R, record.rewards, same_texts(record).tolist()
    if not set(r) <= {0.0, 1.0} or not record.mixed:
        return dict.fromkeys(SHUFFLED, NAN)
    k = int(sum(r))
    K = np.array([[_mean([K[a, b] for a in _of(same, i) for b in _of(same, j)]) for j in range(R)] for i in range(R)])
    factor = np.array(record.weights) / np.array(record.advantages)

    def norm(chosen: list[int]) -> float:
        w = factor * (np.isin(range(R), chosen) - k / R)
        return float(w @ K @ w)

    every = [list(chosen) for chosen in itertools.combinations(range(R), k)]
    right = [i for i in range(R) if r[i]]
    norms = [norm(chosen) for chosen in every if _like(same, right) == _like(same, chosen)]
    tie = 1e-9 * max(norm(chosen) for chosen in every)
    own = norm(right)
    if len(norms) == 1:
        return dict.fromkeys(SHUFFLED, NAN) | {"shuffle_assignments": 1.0}

    def mid_p(value: float) -> float:
        return _mean([1.0 * (x > value + tie) + 0.5 * (abs(x - value) <= tie) for x in norms])

    return {
        "shuffle_p": _mean([float(x >= own - tie) for x in norms]),
        "shuffle_mid_p": mid_p(own),
        "shuffle_variance": _mean([(mid_p(x) - 0.5) ** 2 for x in norms]),
        "shuffle_assignments": float(len(norms)),
    }


def _of(same: list[int], i: int) -> list[int]:
    """The rollouts with the text of rollout i."""
    return [j for j in range(len(same)) if same[j] == same[i]]


def _like(same: list[int], right: list[int]) -> object:
    """What chance leaves alone: that equal texts differ, or how often each right text occurs."""
    texts = [frozenset(_of(same, i)) for i in right]
    if any(not text <= set(right) for text in texts):
        return "equal texts differ"
    return sorted(len(text) for text in set(texts))
