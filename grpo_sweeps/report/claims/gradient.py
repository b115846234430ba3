"""C5 and C9 of arXiv 2606.29238: the norm of a group's gradient by k, with shuffled rewards as its exact null; the
inner products of a group's scores, the score-mean null, and the number of directions."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
from scipy import special

from grpo_sweeps.maths.intervals import Clusters, Interval, mean_over, t_quantile
from grpo_sweeps.paper import STATEMENTS
from grpo_sweeps.publish.formats import number, three_digits, three_digits_of, with_interval, with_interval_of
from grpo_sweeps.report.claims import rules
from grpo_sweeps.report.claims.finding import ERROR, UNKNOWN, Claim, Finding, not_about, nothing
from grpo_sweeps.report.claims.ranks import of_the_loss
from grpo_sweeps.report.claims.rules import UNDECIDED, UNDEFINED, all_of, judge
from grpo_sweeps.report.measure.permutation import least_p
from grpo_sweeps.report.tables.pooled import clusters, pooled
from grpo_sweeps.types import Array

NEWTON_STEPS = 100

SHUFFLED = (
    "Were rewards unrelated to scores, any of the texts that occur equally often could be the right ones (any of the "
    "rollouts, where equal texts differ in reward), with the same norm."
)


def slope(groups: pd.DataFrame, alpha: float) -> Interval:
    """Log-log slope of the root mean square gradient norm by k on sqrt(k(R-k))/R, with its interval.

    E g = exp(a + 2 slope x_k) of the squared norm g of a group, x_k = log sqrt(k(R-k))/R, over the k of at least
    `rules.MIN_PER_K` groups, is fitted to the groups themselves by sum (g - E g) (1, x_k) = 0: the Poisson
    pseudo-likelihood of Santos Silva & Tenreyro ("The log of gravity", 2006), right whatever the distribution of g. The
    logarithm of the mean of few skewed norms is too low on average, and least for the k with most groups: least squares
    on it tilts. The interval is the sandwich of what each group moves, clustered by prompt and seed. NaN where fewer
    than two values of x are left. n: the groups used.
    """
    found, moves = _slope(groups)
    if not len(moves):
        return UNKNOWN
    if not np.isfinite(found):
        return Interval(math.nan, math.nan, math.nan, len(moves))
    around = mean_over(moves, clusters(groups.loc[moves.index]), alpha)
    return Interval(found, found + around.low, found + around.high, len(moves), around.clusters)


def slope_moves(groups: pd.DataFrame) -> pd.Series:
    """By how much each used group moves the slope, times their number: its mean is 0, its interval the slope's. By the
    index of `groups`; NaN where there is no slope."""
    return _slope(groups)[1]


def _slope(groups: pd.DataFrame) -> tuple[float, pd.Series]:
    squares = groups["gradient_norm"].astype(float) ** 2
    counts, means = (squares.groupby(groups["k"].astype(float)).transform(f) for f in ("size", "mean"))
    used = groups[(counts >= rules.MIN_PER_K) & (means > 0)]
    if not len(used):
        return math.nan, pd.Series(dtype=float)
    k, square = (column[used.index].to_numpy(dtype=float) for column in (groups["k"], squares))
    R = float(used["R"].iloc[0])
    x = np.log(k * (R - k)) - 2 * math.log(R)  # 2 x_k
    x -= x.mean()
    if np.ptp(x) < 1e-9:
        return math.nan, pd.Series(math.nan, index=used.index)
    found, moves = log_linear(square / square.mean(), x)
    return found, pd.Series(moves, index=used.index)


def log_linear(values_N: Array, x_N: Array) -> tuple[float, Array]:
    """b of E value = exp(a + b x) by sum (value - exp(a + b x)) (1, x) = 0, Newton's steps cut to 1; and by how much
    each value moves b, times N. values: 0 or more, of mean about 1. x: of mean about 0, two values or more.

    >>> x = np.log([0.5, 1.0, 2.0])
    >>> round(log_linear(np.array([0.25, 1.0, 4.0]), x)[0], 9)
    2.0
    """
    design_NP, at_P = np.stack([np.ones(len(x_N)), x_N], axis=1), np.zeros(2)
    for _ in range(NEWTON_STEPS):
        mean_N = np.exp(design_NP @ at_P)
        inverse_PP = np.linalg.inv((design_NP * mean_N[:, None]).T @ design_NP)
        step_P = inverse_PP @ (design_NP.T @ (values_N - mean_N))
        at_P = at_P + np.clip(step_P, -1.0, 1.0)
        if np.abs(step_P).max() < 1e-12:
            break
    residual_N = values_N - np.exp(design_NP @ at_P)
    return float(at_P[1]), len(x_N) * (residual_N * (design_NP @ inverse_PP[1]))


def c5(arm: str, kind: str, groups: dict[int, pd.DataFrame], records: dict[int, pd.DataFrame], alpha: float) -> Claim:
    """`groups`: the measured mixed ones by R; `records`: all of them."""
    findings = tuple(_c5_at(R, g, kind, alpha) for R, g in groups.items())
    decided = [f.verdict for f in findings if f.R > 3]  # at R = 2 and 3 there is one value of k(R-k)
    about, (low, high) = rules.SLOPES.get(kind) == rules.IN_PROPORTION, rules.IN_PROPORTION
    of_these = [
        f"The rule: the interval of the slope over the groups of these runs within {low:g} to {high:g}, which noise "
        f"and signal alone make, give or take {rules.SLOPE_MARGIN:g}.",
        "Pooled over prompts and steps that slope says how the norm goes with k in these runs, and is not that of one "
        "prompt, from noise to signal: prompts of which one k is frequent may have longer gradients. Beside it stands "
        "the slope within prompts, where problems come again with another k; the policy moves between.",
        "Predicted for one prompt, advantages of the group mean up to one factor, weights that are one factor times "
        "the advantages, and right and wrong scores that vary alike.",
    ]
    remarks = [
        *(of_these if about else ()),
        "Norms are of the rows as weighted in the loss, every k of them in by_k.csv; the slope is of root mean squares "
        "by k, fitted to the squared norms of the groups (Poisson pseudo-likelihood) and not to logarithms of means, "
        "which few skewed groups make too small.",
    ]
    for R, part in records.items():
        remarks += _edges(arm, R, part, kind)
    found = Claim("C5", arm, STATEMENTS["C5"].brief, all_of(decided), findings, tuple(remarks))
    return found if about else not_about(found, f"The claim is about advantages r - mean up to a factor; {_own(kind)}.")


def _own(kind: str) -> str:
    """What is known of the slope of another estimator."""
    if kind not in rules.SLOPES:
        return "this arm's estimator has no predicted slope"
    low, high = rules.SLOPES[kind]
    return f"divided by the group's standard deviation noise makes the slope {low:g} and signal {high:g}"


def slope_within(groups: pd.DataFrame, alpha: float) -> Interval:
    """As `slope`, with a factor of its own for each prompt: of 30 or more prompts with groups of several k(R-k).

    The pseudo-likelihood's factor of a prompt is the sum of its squared norms over that of exp(2 slope x), which leaves
    one equation, sum (g - E g) x = 0, increasing in the slope. n: the groups of such prompts.
    """
    spread = (groups["k"] * (groups["R"] - groups["k"])).astype(float)
    used = groups[spread.groupby(groups["prompt_id"]).transform("nunique") > 1]
    square = used["gradient_norm"].astype(float) ** 2
    prompt, prompts = pd.factorize(used["prompt_id"])
    if len(prompts) < rules.MIN_GROUPS or not square.sum() > 0:
        return UNKNOWN
    value_N, x_N = square.to_numpy() / square.mean(), np.log(spread[used.index].to_numpy())
    total_P, at = np.bincount(prompt, value_N), 0.0
    for _ in range(NEWTON_STEPS):
        share_N = np.exp(at * x_N)
        share_N = share_N / np.bincount(prompt, share_N)[prompt]
        centre_N = x_N - np.bincount(prompt, share_N * x_N)[prompt]
        mean_N = total_P[prompt] * share_N
        curvature = float((mean_N * centre_N**2).sum())
        if not curvature > 0:
            return UNKNOWN
        step = float((value_N - mean_N) @ x_N) / curvature
        at += float(np.clip(step, -1.0, 1.0))
        if abs(step) < 1e-12:
            break
    moves_N = len(x_N) * (value_N - mean_N) * centre_N / curvature
    around = mean_over(moves_N, clusters(used), alpha)
    return Interval(at, at + around.low, at + around.high, len(used), around.clusters)


def _c5_at(R: int, groups: pd.DataFrame, kind: str, alpha: float) -> Finding:
    binary = groups[groups["k"].notna()] if len(groups) else groups
    if not len(binary):
        return nothing(R)
    shown = range(1, R) if R <= 8 else sorted({1, R // 4, R // 2, R - R // 4, R - 1})  # by_k.csv has every k
    by_k = [f"k = {k}: {three_digits_of(pooled(binary[binary['k'] == k], 'gradient_norm'))}" for k in shown]
    found = slope(binary, alpha)
    words = with_interval_of(found) if found.known or np.isfinite(found.mean) else "none"
    within = slope_within(binary, alpha) if R > 3 else UNKNOWN
    own = f"{with_interval_of(within)} ({within.n} groups)" if within.n else "not to be had"
    words += f", within prompts {own}" if R > 3 else ""
    measured = f"slope over all groups {words}; mean norm {', '.join(by_k)}"
    verdict = UNDECIDED
    null = "one value of k(R-k): no slope" if R < 4 else "no slope predicted"
    if R > 3 and kind in rules.SLOPES:
        low, high = rules.SLOPES[kind]
        verdict = verdict_of_slopes(found, within)
        null = f"in one prompt noise alone {low:g}, signal alone {high:g}"
    return Finding(R, len(binary), measured, null, verdict, found, "grows with sigma_r")


def verdict_of_slopes(over_all: Interval, within: Interval) -> str:
    """C5's verdict at an R: the slope over all groups decides; what the slope within prompts denies stays open."""
    low, high = np.add(rules.IN_PROPORTION, (-rules.SLOPE_MARGIN, rules.SLOPE_MARGIN))
    verdict, own = (judge(one, low, high, one.n) for one in (over_all, within))
    if {verdict, own} == {rules.HOLDS, rules.CONTRADICTED}:
        return UNDECIDED
    return rules.CORRECTED if verdict == rules.HOLDS and over_all.outside(1.0, 1.0) else verdict


def _edges(arm: str, R: int, records: pd.DataFrame, kind: str) -> list[str]:
    """k = 0 and R, where the gradient is exactly zero, and k = 1, where it is not small."""
    lines = []
    equal = records[~records["mixed"].astype(bool)] if len(records) else records
    if len(equal):
        moving = int((equal["advantage_max"] > 0).sum())
        words = f"R = {R}: {len(equal)} all-equal groups, of which {moving} have an advantage that is not zero."
        lines.append(f"{ERROR}{arm}, {words}" if moving and kind else words)
    lone = records["lone_right"].dropna().astype(float) if len(records) else pd.Series(dtype=float)
    if len(lone):
        words = f"R = {R}: a lone right rollout has the advantage {three_digits(lone.mean())} ({len(lone)} groups)"
        if kind == "group mean":
            off = float((lone - (1 - 1 / R)).abs().max())
            words += f"; 1 - 1/R = {three_digits(1 - 1 / R)}, largest difference {off:.0e}"
            words = f"{ERROR}{arm}, {words}" if off > rules.SUM_TOLERANCE else words
        lines.append(f"{words}.")
    return lines


def shuffled(arm: str, groups: dict[int, pd.DataFrame], alpha: float, lengths: bool = False) -> Claim:
    """Exact permutation p-values of w' K w, combined over the groups of each R by the mean mid-p.

    lengths: the advantages depend on lengths too, so that other rewards would not only change their places.
    """
    findings = tuple(nothing(R) if lengths else _shuffled_at(R, g, alpha) for R, g in groups.items())
    verdicts = [f.verdict for f in findings]
    remarks = [
        "Exact in each group: w' K w under every assignment of its rewards that chance could have made as well, a "
        "rollout keeping its score and its factor (1/length, say). Rewards change places among texts that occur "
        "equally often in the group; among rollouts where equal texts have different rewards. Groups are combined by z "
        "= sum of (1/2 - mid-p) over the root of the summed exact variances; where prompts recur the error is that "
        "over prompts if it is larger, since a text that comes again brings its reward along.",
        "A mean mid-p below 1/2: the gradient is longer than chance makes it, because right and wrong rollouts differ "
        "in their scores' direction or length. Above 1/2, with a one-sided p near 1 of being as long: shorter than "
        "chance makes it, so that right and wrong rollouts are more alike than any two. Neither: no sign of either, "
        "which is no proof of none. A rejection is of chance, and contradicts nothing that the paper says.",
        *(
            f"R = {R}: one group cannot reach a p-value below {three_digits(least_p(R))}"
            + (", so never .05." if least_p(R) > 0.05 else ".")
            for R in groups
            if R > 1
        ),
    ]
    if of_the_loss(groups):
        remarks.append("Not tested: rows of the loss have no advantage per rollout that could change its place.")
    if lengths:
        remarks.append("Not tested: this arm's advantages depend on lengths and would have to be computed anew.")
    measured = [g for g in groups.values() if len(g) and not lengths]
    alone = sum(int((g["shuffle_assignments"] == 1).sum()) for g in measured)
    untested = sum(int((g["shuffle_mid_p"].isna()).sum()) for g in measured) - alone
    if alone:
        remarks.append(f"{alone} measured groups are left out: no two texts of theirs could change their rewards.")
    if untested:
        remarks.append(
            f"{untested} measured groups have no permutation value: rewards that are not 0 and 1, no Gram of the "
            "scores, weights that do not follow the advantages, or too many assignments."
        )
    rejected = sorted({verdict for verdict in verdicts if verdict != UNDECIDED})
    # chance alone can only fail to be excluded
    verdict = " and ".join([*rejected[:1], *(one.rpartition(": ")[2] for one in rejected[1:])]) or UNDECIDED
    found = Claim("Shuffled", arm, SHUFFLED, verdict, findings, tuple(remarks), "The null")
    return not_about(found) if lengths or of_the_loss(groups) else found


def _shuffled_at(R: int, groups: pd.DataFrame, alpha: float) -> Finding:
    tested = groups[groups["shuffle_mid_p"].notna()] if len(groups) else groups
    if not len(tested):
        return nothing(R)
    mid_p, variance = float(tested["shuffle_mid_p"].mean()), float(tested["shuffle_variance"].sum())
    below = float((tested["shuffle_p"] < 0.05).mean())
    if not variance > 0:
        words = "every assignment gives the same norm: nothing to test"
        return Finding(R, len(tested), words, "mean mid-p 0.5", UNDECIDED, UNKNOWN)
    n = len(tested)
    error, freedom = _error_of_mid_p(tested)
    half = t_quantile(1.0 - alpha / 2.0, freedom) * error
    interval = Interval(mid_p, max(0.0, mid_p - half), min(1.0, mid_p + half), n, (n,))
    z = (0.5 - mid_p) / error

    def tail(at: float) -> float:
        return float(special.ndtr(at)) if math.isinf(freedom) else float(special.stdtr(freedom, at))

    measured = (
        f"mean mid-p {with_interval(mid_p, interval.low, interval.high, 3)}; z = {number(z)}, combined one-sided p: as "
        f"long by chance {three_digits(tail(-z))}, as short by chance {three_digits(tail(z))}; p below .05 in "
        f"{below:.1%} of the groups"
    )
    out = n >= rules.MIN_GROUPS and interval.outside(0.5, 0.5)
    verdict = (rules.LONGER if mid_p < 0.5 else rules.SHORTER) if out else UNDECIDED
    return Finding(R, n, measured, "mean mid-p 0.5", verdict, interval)


def _error_of_mid_p(tested: pd.DataFrame) -> tuple[float, float]:
    """Standard error of the mean mid-p and its degrees of freedom: the exact one, or where prompts recur that over
    prompts if it is larger. A reward of the text is drawn once for all groups of a prompt in which the text occurs."""
    n, mid_p = len(tested), tested["shuffle_mid_p"].to_numpy(dtype=float)
    exact = math.sqrt(float(tested["shuffle_variance"].sum())) / n
    if tested["prompt_id"].nunique() == n:
        return exact, math.inf
    variance, freedom, _ = Clusters(tested["prompt_id"]).variance(mid_p - mid_p.mean())
    return (exact, math.inf) if variance < exact**2 else (math.sqrt(variance), freedom)


def directions(groups: pd.DataFrame) -> Interval:
    """(tr F)^2 / tr F^2 from means over groups of K_ii and of K_ij^2, its interval by the delta method, clustered."""
    own, square = groups["pair_norm"].astype(float), groups["pair_square"].astype(float)
    if not len(groups) or not square.mean() > 0:
        return UNKNOWN
    found = float(own.mean() ** 2 / square.mean())
    around = mean_over(found * (2.0 * (own / own.mean() - 1.0) - (square / square.mean() - 1.0)), clusters(groups))
    return Interval(found, found + around.low, found + around.high, around.n, around.clusters).within((1.0, math.inf))


def score_mean(groups: pd.DataFrame, alpha: float) -> Interval:
    """Mean of `pair_null`, widened by what the precision of the Grams allows: zero where sampler and trainer agree."""
    mean = pooled(groups, "pair_null", alpha)
    error = float(groups.loc[groups["pair_null"].notna(), "pair_error"].astype(float).mean())
    return Interval(mean.mean, mean.low - error, mean.high + error, mean.n, mean.clusters)


def c9(arm: str, groups: dict[int, pd.DataFrame], alpha: float) -> Claim:
    findings, errors = [], []
    for R, part in groups.items():
        finding, failed = _c9_at(R, part, alpha)
        findings.append(finding)
        errors += [f"{ERROR}{arm}, {failed}"] if failed else []
    remarks = (
        *errors,
        "The paper does not say what a cluster is or how few is few. What tells is E<psi_i, psi_j>^2 = tr F^2, so "
        "(tr F)^2 / tr F^2 directions; a mean product of zero does not exclude clusters (psi = +u or -u).",
        "Products and directions are over mixed groups, whose mean product is not zero; the score-mean null gives the "
        "mixed pairs of k = 1 and k = R - 1 half their weight, which makes up for the all-equal groups that have no "
        "Gram. It is zero when rollouts are independent draws of the policy that is differentiated, so it checks that "
        "sampler and trainer agree; R = 2 has no such combination.",
        "Expected of one prompt, with S = ||grad J||^2: S/p^2 for two right rollouts, S/q^2 for two wrong ones, "
        "-S/(pq) for one of each. Pooled over prompts the ratio of squares is one of averages.",
    )
    verdict = UNDEFINED if any(f.verdict == UNDEFINED for f in findings) else UNDECIDED
    return Claim("C9", arm, STATEMENTS["C9"].brief, verdict, tuple(findings), remarks)


def _c9_at(R: int, groups: pd.DataFrame, alpha: float) -> tuple[Finding, str]:
    """The finding, and what an interval that excludes zero says of the sampler."""
    part = groups[groups["pair_norm"].notna()] if len(groups) else groups
    if not len(part):
        return nothing(R), ""
    products = ", ".join(
        f"{words} {three_digits_of(pooled(part, f'pair_{name}'))}"
        if part[f"pair_{name}"].notna().any()
        else f"{words} –"
        for name, words in (("all", "all pairs"), ("right", "two right"), ("wrong", "two wrong"), ("between", "mixed"))
    )
    null = score_mean(part, alpha)
    measured = (
        f"mean product: {products}; mean squared norm {three_digits_of(pooled(part, 'pair_norm'))}; directions "
        f"{three_digits_of(directions(part))}"
    )
    off = null.outside(0.0, 0.0) and null.n >= rules.MIN_GROUPS
    words = (
        "score-mean null: not to be had"
        if math.isnan(null.mean)
        else f"score-mean null 0: found {three_digits_of(null)}"
    )
    failed = (
        f"R = {R}: the score-mean null is {three_digits_of(null)}, not zero: the rollouts are not draws of the policy "
        "that is differentiated (temperature, top-p, precision of the sampler, stale weights), or groups were chosen."
    )
    return Finding(R, len(part), measured, words, UNDEFINED, null, "few"), failed if off else ""
