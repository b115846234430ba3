"""The best group size R* from a sweep's records (arXiv 2603.01162): best_size.csv and its section.

    N MSE(R) = R V_between + E V1 + E V2 / (R - 1),    R* = 1 + sqrt(E V2 / V_between),
    V_between = E ||grad J(x)||^2 - ||E grad J(x)||^2,    x a prompt

E V1, E V2 and E ||grad J(x)||^2 are means over all groups of `measure.pairs`, those of equal rewards as zeros.
||E grad J||^2 comes from whole steps: with `aggregation=sum` the row weights are A / (G R), so the step's gradient is
the mean of its G groups' gradients g_x = sum_i A_i psi_i / R, `grad_norm` its norm before clipping, and
`gradient_norm` that of g_x / G. Products of different groups are what is left of the one less the others.

Known for arms of the group mean or of leave-one-out, in steps of two groups or more of which every mixed one was
measured. Intervals: 95%, steps drawn with replacement. The policy moves: all values are averages along the training.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pandas as pd
from scipy import special

from grpo_sweeps.estimators.declared import kinds
from grpo_sweeps.maths.intervals import t_quantile
from grpo_sweeps.maths.ustatistics import best_group_size, error_by_rollouts, near_best, signal_of_mean
from grpo_sweeps.paper import BEST_SIZE_ARXIV
from grpo_sweeps.publish.formats import three_digits
from grpo_sweeps.publish.page import Section
from grpo_sweeps.report.claims.finding import estimator_of
from grpo_sweeps.report.claims.rules import UNDECIDED
from grpo_sweeps.report.measure.pairs import LEAST_R, UNBIASED
from grpo_sweeps.report.read.query import Sweep
from grpo_sweeps.report.tables.pooled import records_of
from grpo_sweeps.types import Array

KINDS = kinds(lambda one: one.zero_sum_group and one.factor is not None)
DECIDED = "decided"
FLOOR = 1.0 + math.sqrt(2.0)
"""E V2 >= 2 V_between for every policy, so no R* is below: estimates and ends that noise puts there are moved to it."""
MIN_STEPS = 10  # that a bootstrap over them means something
DRAWS = 2000
MOST_DRAWN = 5000  # steps, or blocks of them
MEANS = ("signal", "spread", "V1", "signal_of_mean", "squares")
QUANTITIES = ("signal", "spread", "V1", "V2", "signal_of_mean", "V_between", "best_R", "snr", "error_here")
NAME = "best_size"
WORDS = (
    "At a fixed number N of rollouts, N times the mean squared error of the leave-one-out gradient is R V_between + "
    f"E V1 + E V2/(R - 1) (arXiv {BEST_SIZE_ARXIV}), which is least at R* = 1 + sqrt(E V2/V_between). The constants "
    "are unbiased estimates from each group's rewards and Gram, groups of equal rewards counted as the zeros they are, "
    "and from the norm of each step's whole gradient before clipping.",
    "The policy moves while it is measured: every value is an average along the training of its row. Intervals: 95%, "
    "steps drawn with replacement; they do not cover differences between training runs. A smaller error of the "
    "gradient is not yet faster learning.",
)
LEFT_OUT = (
    "Nothing is left out for want of a Gram: a group of equal rewards is 0 in all three estimates whatever its scores. "
    "R* is never below 1 + sqrt 2, because E V2 >= 2 V_between for every policy; noise below it is moved there."
)


@dataclass(frozen=True)
class BestSize:
    """One arm and R: counts, the estimates and their bootstrap draws by quantity, and why there are none where so.

    signal, spread, V1, V2   E ||grad J(x)||^2, E sigma^2 tr F, E V1 and their V2 = spread + signal
    signal_of_mean           ||E grad J(x)||^2
    V_between, best_R        of the module's docstring; best_R at least `FLOOR`
    snr                      ||E grad J||^2 over the MSE of one step of this R and so many groups, leave-one-out
    error_here               N MSE at this R from the norms of the groups' gradients: no formula, and any R
    """

    arm: str
    R: int
    kind: str
    steps: int = 0
    groups: int = 0
    groups_a_step: float = math.nan
    left_out: int = 0  # steps with a mixed group that was not measured
    values: dict[str, float] = field(default_factory=dict)
    draws: dict[str, Array] = field(default_factory=dict)
    reason: str = ""

    def interval(self, name: str) -> tuple[float, float]:
        """95%; NaN where there is none."""
        found = self.draws.get(name)
        if found is None or not len(found) or np.isnan(found).any():
            return math.nan, math.nan
        low, high = np.quantile(found, levels(self.steps), method="nearest")  # neighbours may be infinite
        return float(low), float(high)

    @property
    def known(self) -> bool:
        """There is an estimate of R*, however uncertain."""
        return "best_R" in self.values

    @property
    def verdict(self) -> str:
        return DECIDED if np.isfinite(self.interval("best_R")).all() else UNDECIDED


def best_sizes(sweep: Sweep) -> list[BestSize]:
    """One for each arm and R, in the order of Table 1."""
    return [best_size(sweep, arm, R) for arm, R in sweep.cells]


def best_size(sweep: Sweep, arm: str, R: int) -> BestSize:
    """What the records of an arm and R say of it."""
    kind = estimator_of(sweep, arm)
    aggregations = set(sweep.runs.loc[sweep.runs["arm"] == arm, "aggregation"])
    if kind not in KINDS or aggregations != {"sum"} or R < 2:
        return BestSize(arm, R, kind, reason="needed are estimator=grpo or rloo, aggregation=sum and R of 2 or more")
    if not all(plain_step(sweep.configs[str(run)]) for run in sweep.runs.loc[sweep.runs["arm"] == arm, "run"]):
        reason = "a step's gradient is not the mean of its groups' alone, or its groups were chosen by their rewards"
        return BestSize(arm, R, kind, reason=f"{reason}: objective=reinforce without resampling is needed")
    steps, left_out = step_sums(sweep, arm, R, kind)
    if not len(steps):
        reason = "no step has two groups or more, all its mixed ones measured with their scores, and grad_norm"
        return BestSize(arm, R, kind, left_out=left_out, reason=reason)
    T, B = len(steps), float(steps["groups"].mean())
    names = [name for name in MEANS if R >= LEAST_R or name in ("signal_of_mean", "squares")]
    sums_TK = steps[[*names, "groups"]].to_numpy(dtype=float)
    values = {name: float(x[0]) for name, x in _quantities(sums_TK.sum(axis=0, keepdims=True), names, R, B).items()}
    draws: dict[str, Array] = {}
    if T >= MIN_STEPS:
        blocks_BK = in_blocks(sums_TK)
        draws = _quantities(drawn(len(blocks_BK)) @ blocks_BK, names, R, B)
    found = BestSize(arm, R, kind, T, int(steps["groups"].sum()), B, left_out, values, draws)
    return replace(found, reason=_reason(found))


def plain_step(config: Mapping[str, Any]) -> bool:
    """Is `grad_norm` that of sum_i w_i log pi(o_i) alone, in one update, over prompts drawn whatever their rewards?

    A configuration without an `objective` says yes. A KL taken off the rewards is part of these.
    """
    objective = config.get("objective")
    if not isinstance(objective, Mapping):
        return True
    several = objective.get("inner_updates", 1) != 1 or objective.get("minibatches", 1) != 1
    in_loss = bool(objective.get("kl_beta", 0)) and objective.get("kl_place", "loss") == "loss"
    other = objective.get("ratio", "none") != "none" or any(map(objective.get, ("critic", "continuations", "resample")))
    return not (several or in_loss or other)


def step_sums(sweep: Sweep, arm: str, R: int, kind: str) -> tuple[pd.DataFrame, int]:
    """One row per usable step (of any run of the arm and R), sums over its groups; and the number of steps left out.

    signal, spread, V1   of the columns of `measure.pairs`
    squares              of ||g_x||^2, scaled to leave-one-out
    signal_of_mean       of the step's estimate, times its groups; so each mean is a sum over a sum of `groups`
    """
    groups = records_of(sweep, arm, R)
    columns = ["run", "step", "groups", *MEANS]
    metrics = sweep.metrics
    if not len(groups) or "grad_norm" not in metrics:
        return pd.DataFrame(columns=columns), 0
    mixed, square = groups["mixed"].astype(bool), groups["gradient_norm"].astype(float).fillna(0.0) ** 2
    frame = groups[["run", "step"]].assign(
        groups=1.0, squares=square, lacking=(mixed & (~groups["measured"].astype(bool) | (groups["rows"] != "scores")))
    )
    for name, column in zip(("signal", "spread", "V1"), UNBIASED, strict=True):
        frame[name] = groups[column].astype(float).where(mixed, 0.0)
    steps = frame.groupby(["run", "step"]).sum().reset_index()
    norms = metrics.loc[metrics["grad_norm"].notna(), ["run", "step", "grad_norm"]]
    steps = steps.merge(norms, on=["run", "step"], how="inner")
    usable = (steps["lacking"] == 0) & (steps["groups"] >= 2) & np.isfinite(steps["grad_norm"].astype(float))
    left_out, steps = int((~usable).sum()), steps[usable]
    G = steps["groups"]
    back = 1.0 if kind == "group mean" else (R - 1) / R  # from leave-one-out to the group mean
    squares = back**2 * G**2 * steps["squares"]  # ||g_x||^2, g_x = G times the gradient in the record
    whole = (back * steps["grad_norm"].astype(float)) ** 2
    of_mean = [signal_of_mean(float(w), [float(s)], int(g), R) * g for w, s, g in zip(whole, squares, G, strict=True)]
    found = steps.assign(squares=squares * (R / (R - 1)) ** 2, signal_of_mean=of_mean)
    return found[columns], left_out


def levels(T: int) -> tuple[float, float]:
    """Ends of a 95% bootstrap interval from T steps, as shares of the draws: expanded for small T by what Student's t
    and T/(T - 1) expand a mean's (Hesterberg 2015).

    >>> [round(level, 4) for level in levels(20)]
    [0.0159, 0.9841]
    """
    z = math.sqrt(T / (T - 1)) * t_quantile(0.975, T - 1.0)
    return float(special.ndtr(-z)), float(special.ndtr(z))


def in_blocks(sums_TK: Array) -> Array:
    """The sums of steps, of as many in a row as leave at most `MOST_DRAWN` rows: means over blocks have the variance of
    means over their steps, and draws of 100,000 steps would take gigabytes."""
    starts = np.arange(0, len(sums_TK), math.ceil(len(sums_TK) / MOST_DRAWN))
    return np.asarray(np.add.reduceat(sums_TK, starts, axis=0))


def drawn(T: int, seed: int = 0) -> Array:
    """(DRAWS, T): how often each step is drawn."""
    rng = np.random.default_rng(seed)
    return rng.multinomial(T, np.full(T, 1.0 / T), size=DRAWS).astype(np.float64)


def _quantities(sums_BK: Array, names: list[str], R: int, groups: float) -> dict[str, Array]:
    """{quantity: (B,)} from sums over groups, the last column their number."""
    found = dict(zip(names, (sums_BK[:, :-1] / sums_BK[:, -1:]).T, strict=True))
    found["error_here"] = R * (found.pop("squares") - found["signal_of_mean"])
    if R < LEAST_R:
        return found
    found["V2"] = found["signal"] + found["spread"]
    found["V_between"] = found["signal"] - found["signal_of_mean"]
    best = [best_group_size(v, b) for v, b in zip(found["V2"], found["V_between"], strict=True)]
    found["best_R"] = np.maximum(best, FLOOR)
    mse = error_by_rollouts(R, found["V1"], found["V2"], found["V_between"]) / (R * groups)
    found["snr"] = np.divide(found["signal_of_mean"], mse, out=np.full(len(mse), np.nan), where=mse > 0)
    return found


def _reason(found: BestSize) -> str:
    """Why there is no R*, or no end to its interval; empty where there is."""
    if found.R < LEAST_R:
        return f"products of four different rollouts are needed: R of {LEAST_R} or more"
    if not found.draws:
        return f"{found.steps} usable steps, fewer than {MIN_STEPS}: no interval"
    low, high = found.interval("best_R")
    if np.isfinite(high):
        return ""
    if np.isfinite(low):
        return f"V_between is not told from 0: R* is at least {low:.1f}, and no upper end can be given"
    return "V_between is not told from 0, or below: no end can be given"


def best_size_table(sizes: list[BestSize]) -> pd.DataFrame:
    """best_size.csv: one row per arm and R. `near_low` to `near_high`: the whole R within 5% of the least error."""
    rows = []
    for one in sizes:
        row: dict[str, object] = {
            "arm": one.arm, "R": one.R, "estimator": one.kind, "steps": one.steps, "steps_left_out": one.left_out,
            "groups": one.groups, "groups_a_step": one.groups_a_step,
        }  # fmt: skip
        for name in QUANTITIES:
            row[name] = one.values.get(name, math.nan)
            row[f"{name}_low"], row[f"{name}_high"] = one.interval(name)
        near = near_best(*(one.values[n] for n in ("V1", "V2", "V_between"))) if one.known else (math.nan, math.nan)
        row |= {"near_low": near[0], "near_high": near[1], "verdict": one.verdict, "reason": one.reason}
        rows.append(row)
    return pd.DataFrame(rows)


def best_size_section(sizes: list[BestSize]) -> Section:
    """The table of the page, one row per arm and R."""
    arms = len({one.arm for one in sizes}) > 1
    header = (
        "R", "steps", "||E grad J||²", "V_between", "E V1", "E V2", "R*", "within 5%", "signal to noise", "verdict",
    )  # fmt: skip
    rows = [(*((one.arm,) if arms else ()), *_row(one)) for one in sizes]
    skipped = sum(one.left_out for one in sizes)
    after = (
        LEFT_OUT,
        *((f"{skipped} steps with a mixed group that was not measured are left out.",) if skipped else ()),
    )
    return Section(
        NAME, "Best group size", WORDS, (*(("arm",) if arms else ()), *header), tuple(rows), after, ("best_size.csv",)
    )


def _row(one: BestSize) -> tuple[str, ...]:
    near = near_best(*(one.values[n] for n in ("V1", "V2", "V_between"))) if one.known else (math.nan, math.nan)
    names = ("signal_of_mean", "V_between", "V1", "V2")
    verdict = one.verdict if one.verdict == DECIDED else f"{one.verdict}: {one.reason}"
    return (
        str(one.R), str(one.steps), *(shown(one, name) for name in names), shown(one, "best_R"),
        "–" if math.isnan(near[0]) else f"{near[0]:.0f} to {_end(near[1])}", shown(one, "snr"), verdict,
    )  # fmt: skip


def shown(one: BestSize, name: str) -> str:
    """A value with its interval, infinite ends in words."""
    value = one.values.get(name, math.nan)
    low, high = one.interval(name)
    if math.isnan(value):
        return "–"
    if math.isfinite(value) and math.isfinite(low) and math.isfinite(high):
        return three_digits(value, low, high)
    ends = f" [{_end(low)}, {_end(high)}]" if not math.isnan(low) else ""
    return f"{_end(value)}{ends}"


def _end(value: float) -> str:
    return "no upper end" if math.isinf(value) else f"{value:.3g}"
