"""C2 to C6, C9, shuffled advantages and the exact controls: verdicts from records whose scores are chosen."""

from __future__ import annotations

import dataclasses

import numpy as np
import pandas as pd
import pytest

from grpo_sweeps.maths.intervals import Interval
from grpo_sweeps.paper import STATEMENTS
from grpo_sweeps.report.claims import rules
from grpo_sweeps.report.claims.finding import UNKNOWN
from grpo_sweeps.report.claims.gradient import slope, slope_within, verdict_of_slopes
from grpo_sweeps.report.claims.rules import CONTRADICTED, HOLDS, UNDECIDED, UNDEFINED
from grpo_sweeps.report.claims.sparsity import fall_of, third_of_run
from grpo_sweeps.report.claims.verdicts import error_lines, judge_claims
from grpo_sweeps.report.read.query import load_sweep
from grpo_sweeps.report.tables.pooled import usable_groups

PREFIX = "grpo_sweeps.estimators.group."


def scored(signal=0.0, noise=1.0, D=64, scale="mean"):
    """A change of records: psi = signal u for right rollouts, less its mean, plus noise of norm about `noise`."""
    rng = np.random.default_rng(1)

    def change(record):
        r = np.array(record.rewards)
        A = r - r.mean()
        A = A / r.std(ddof=1) if scale == "std" and record.mixed else A
        psi = noise * rng.standard_normal((record.R, D)) / np.sqrt(D)
        psi[:, 0] += signal * (r - r.mean())
        gram = psi @ psi.T if record.mixed else None
        return dataclasses.replace(record, advantages=tuple(A), weights=tuple(A / (4 * record.R)), gram=gram)

    return change


def claims_of(write, tmp_path, change=None, Rs=(4, 8), steps=30, estimator="grpo", seeds=(0,), **options):
    for R in Rs:
        for seed in seeds:
            config = {"estimator._target_": PREFIX + estimator, **options.get("config", {})}
            write(tmp_path, "s", R, seed, steps=steps, change=change, config=config, evaluate=False)
    claims = judge_claims(load_sweep("s", tmp_path))
    return {c.id: c for c in claims}, claims


def at(claim, R):
    return {f.R: f for f in claim.findings}[R]


@pytest.mark.parametrize(
    ("signal", "noise", "scale", "expected"),
    [(1.0, 1e-9, "mean", 2.0), (0.0, 1.0, "mean", 1.0), (1.0, 1e-9, "std", 1.0), (0.0, 1.0, "std", 0.0)],
)
def test_the_slope_is_that_of_signal_and_of_noise(write, tmp_path, signal, noise, scale, expected):
    estimator = "grpo_std" if scale == "std" else "grpo"
    claims, _ = claims_of(write, tmp_path, scored(signal, noise, 4000, scale), (8,), estimator=estimator)
    found = at(claims["C5"], 8).interval
    assert found.mean == pytest.approx(expected, abs=0.05) and found.low - 0.02 <= expected <= found.high + 0.02
    judged = HOLDS if expected == 1.0 else rules.CORRECTED  # a slope of 2 is no norm in proportion
    assert claims["C5"].verdict == (judged if scale == "mean" else rules.NOT_ABOUT)
    assert not any("exclude" in words for words in (*claims["C5"].remarks, at(claims["C5"], 8).measured))


def prompts_with_slope(rng, slope, prompts=80, noise=0.0, tilt=0.0):
    """Four groups of each prompt, norm = c (k(R-k))^(slope / 2); `tilt`: c is larger where middling k is frequent."""
    share = rng.uniform(0.1, 0.5, prompts)
    prompt = np.repeat(np.arange(prompts), 4)
    k = rng.binomial(8, share[prompt]).clip(1, 7)
    norm = np.exp(tilt * share[prompt] + noise * rng.standard_normal(len(k))) * (k * (8.0 - k)) ** (slope / 2)
    return pd.DataFrame({"gradient_norm": norm, "k": k, "R": 8, "prompt_id": prompt, "seed": 0})


def test_the_slope_within_prompts_knows_nothing_of_which_prompts_have_which_k():
    """Pooled, prompts of long gradients and middling k make a slope of 1 more than 2; a factor for each does not."""
    groups = prompts_with_slope(np.random.default_rng(0), 1.0, tilt=6.0)
    assert slope(groups, 0.05).mean > 2.0 and slope_within(groups, 0.05).mean == pytest.approx(1.0, abs=1e-6)
    assert not slope_within(groups.drop_duplicates("prompt_id"), 0.05).known, "a prompt that comes once has none"
    assert not slope_within(groups[groups["prompt_id"] < 20], 0.05).known, "few prompts"


def test_the_interval_of_the_slope_within_prompts_covers():
    rng, inside = np.random.default_rng(1), 0
    for _ in range(200):
        found = slope_within(prompts_with_slope(rng, 1.5, noise=0.4, tilt=3.0), 0.05)
        inside += found.low <= 1.5 <= found.high
    assert 0.89 <= inside / 200 <= 0.99


@pytest.mark.parametrize(
    ("over_all", "within", "expected"),
    [
        ((1.0, 0.8, 1.2), None, HOLDS),
        ((1.5, 1.3, 1.7), None, rules.CORRECTED),
        ((1.5, 1.3, 1.7), (0.3, 0.1, 0.5), UNDECIDED),
        ((1.5, 1.3, 1.7), (1.2, 0.4, 2.0), rules.CORRECTED),
        ((0.2, 0.1, 0.4), (1.2, 0.9, 1.5), UNDECIDED),  # which prompts have which k made it
        ((0.2, 0.1, 0.4), (1.2, 0.2, 2.2), CONTRADICTED),
    ],
)
def test_c5_is_judged_by_the_slope_over_all_groups_where_none_within_prompts_denies_it(over_all, within, expected):
    found, own = Interval(*over_all, 100), UNKNOWN if within is None else Interval(*within, 100)
    assert verdict_of_slopes(found, own) == expected


def test_a_norm_that_knows_no_spread_contradicts_c5(write, tmp_path):
    def flat(record):
        gram = np.eye(record.R) / max(np.square(record.weights).sum(), 1e-12) if record.mixed else None
        return dataclasses.replace(record, gram=gram)

    claims, _ = claims_of(write, tmp_path, flat)
    assert claims["C5"].verdict == CONTRADICTED and at(claims["C5"], 8).interval.mean == pytest.approx(0, abs=1e-9)
    assert "k = 1: " in at(claims["C5"], 8).measured


def test_the_slope_interval_covers_and_needs_two_spreads(write, tmp_path):
    """Groups drawn anew many times: the share of intervals that hold the slope is the promised one, about."""
    write(tmp_path, "s", 8, 0, steps=60, change=scored(0.0, 1.0, 8), evaluate=False)
    groups = usable_groups(load_sweep("s", tmp_path), "all", 8)
    rng, inside, draws = np.random.default_rng(0), 0, 200
    for _ in range(draws):
        square = groups["k"] * (8 - groups["k"]) * rng.chisquare(4, len(groups)) / 4
        found = slope(groups.assign(gradient_norm=np.sqrt(square)), 0.05)
        inside += found.low <= 1.0 <= found.high
    assert 0.88 <= inside / draws <= 0.99
    assert not slope(groups[groups["k"].isin([3, 5])], 0.05).known
    assert not slope(groups[:2], 0.05).known


def test_the_slope_interval_covers_where_norms_are_skewed():
    """Few groups of k = 1 and k = 7, squared norms of which one is many times another: logarithms of their means are
    too low, and least squares on these held the slope in 79% of such samples."""
    rng, inside, draws = np.random.default_rng(0), 0, 300
    for _ in range(draws):
        k = rng.binomial(8, 0.5, 240)
        k = k[(k > 0) & (k < 8)]
        norm = np.sqrt(k * (8 - k) * np.exp(rng.normal(0.0, 1.5, len(k))))
        groups = pd.DataFrame({"gradient_norm": norm, "k": k, "R": 8, "prompt_id": np.arange(len(k)), "seed": 0})
        found = slope(groups, 0.05)
        inside += found.low <= 1.0 <= found.high
    assert 0.86 <= inside / draws <= 0.98


def test_two_rollouts_have_no_slope(write, tmp_path):
    claims, _ = claims_of(write, tmp_path, scored(), (2,))
    assert claims["C5"].verdict == UNDECIDED and "no slope" in at(claims["C5"], 2).null
    assert "same norm: nothing" in at(claims["Shuffled"], 2).measured
    assert "not to be had" in at(claims["C9"], 2).null


def test_shuffled_advantages_find_scores_along_the_reward_and_not_noise(write, tmp_path):
    (claims, _), (noise, _) = (
        claims_of(write, tmp_path / name, scored(signal)) for name, signal in (("signal", 2.0), ("noise", 0.0))
    )
    assert claims["Shuffled"].verdict == rules.LONGER and at(claims["Shuffled"], 8).interval.high < 0.3
    assert noise["Shuffled"].verdict == UNDECIDED
    for R in (4, 8):
        assert at(noise["Shuffled"], R).interval.low < 0.5 < at(noise["Shuffled"], R).interval.high
    assert any("R = 4: one group cannot reach a p-value below 0.25, so never" in r for r in claims["Shuffled"].remarks)


def test_advantages_that_depend_on_lengths_are_not_shuffled(write, tmp_path):
    """Other rewards would give another mean weighted by length: places alone do not say what chance makes."""
    claims, _ = claims_of(write, tmp_path, scored(2.0), (8,), estimator="opo")
    assert claims["Shuffled"].verdict == rules.NOT_ABOUT and at(claims["Shuffled"], 8).groups == 0
    assert any(remark.startswith("Not tested: this arm's advantages") for remark in claims["Shuffled"].remarks)


def test_sums_and_variances_are_exact_and_can_fail(write, tmp_path):
    claims, every = claims_of(write, tmp_path / "right", scored())
    assert {claims[name].verdict for name in ("C2", "C3", "Controls")} == {HOLDS} and not error_lines(every)
    assert claims["C4"].verdict == rules.SAYS_NOTHING

    def shifted(record):
        return dataclasses.replace(scored()(record), advantages=tuple(a + 0.01 for a in record.advantages))

    claims, every = claims_of(write, tmp_path / "wrong", shifted)
    assert {claims[name].verdict for name in ("C2", "C3")} == {CONTRADICTED}
    lines = "\n".join(error_lines(every))
    assert "C2: ERROR: " in lines and "C3: ERROR: " in lines and "all-equal groups" in lines and "lone right" in lines


@pytest.mark.parametrize(("estimator", "factor"), [("rloo", 4 / 3), ("reinforce", 1.0)])
def test_other_estimators_have_other_sums(write, tmp_path, estimator, factor):
    def change(record):
        r = np.array(record.rewards)
        A = factor * (r - r.mean()) if estimator == "rloo" else r
        return dataclasses.replace(record, advantages=tuple(A), weights=tuple(A / 16))

    claims, every = claims_of(write, tmp_path, change, (4,), estimator=estimator)
    expected = HOLDS if estimator == "rloo" else rules.NOT_ABOUT
    assert claims["C2"].verdict == expected and not error_lines(every)
    assert claims["C3"].verdict == claims["C4"].verdict == rules.NOT_ABOUT
    notes = " ".join(remark for name in ("C3", "C4", "C5") for remark in claims[name].remarks)
    assert ("An identity here" in notes) is (estimator == "rloo")
    assert "Chebyshev" not in notes and "exact chance is that of a mixed group" not in notes
    assert ("right and wrong scores that vary alike" in notes) is (estimator == "rloo")
    assert "mixed at most" not in at(claims["C4"], 4).null


@pytest.mark.parametrize(("wrong", "verdict"), [(0.5, rules.SAYS_NOTHING), (0.97, HOLDS)])
def test_c4_says_nothing_where_no_bound_is_below_what_is_possible(write, tmp_path, wrong, verdict):
    """At R = 2 no advantage of two lies beyond eps but in mixed groups, of which one half at most is possible."""
    rng = np.random.default_rng(0)

    def change(record):
        r = (rng.random(record.R) > wrong).astype(float)
        A = tuple(r - r.mean())
        return dataclasses.replace(record, rewards=tuple(r), advantages=A, weights=A, gram=None)

    claims, _ = claims_of(write, tmp_path, change, (2,), steps=60)
    found = at(claims["C4"], 2)
    assert claims["C4"].verdict == found.verdict == verdict
    bounds = [float(b) for b in found.paper.removeprefix("at most ").split(" (")[0].split(", ")]
    assert f"({sum(b >= 0.5 for b in bounds)} of 3 say nothing)" in found.paper


@pytest.mark.parametrize(
    ("steps", "alike", "why"),
    [
        (7, False, "28 recorded groups, fewer than 30"),
        (2, True, "8 recorded groups, fewer than 30"),
        (10, True, "none of 40 groups is mixed"),
        (8, False, ""),
    ],
)
def test_few_groups_and_none_that_is_mixed_decide_nothing_of_c2_to_c4(write, tmp_path, steps, alike, why):
    """Bounds of 0 that no advantage breaks, and identities in a handful of groups, hold nothing."""

    def change(record):
        r = (0.0,) * record.R if alike else record.rewards
        A = tuple(np.array(r) - np.mean(r))
        return dataclasses.replace(record, rewards=r, advantages=A, weights=A, gram=None)

    claims, every = claims_of(write, tmp_path, change, (4, 8), steps=steps)
    for claim in (claims["C2"], claims["C3"], claims["C4"]):
        verdicts = {claim.verdict, *(f.verdict for f in claim.findings)}
        expected = UNDECIDED if why else rules.SAYS_NOTHING if claim.id == "C4" else HOLDS
        assert verdicts == {expected}, claim.id
        reasons = [remark for remark in claim.remarks if remark.startswith("R = 4, 8: cannot be decided")]
        assert len(reasons) == bool(why) and all(why in reason for reason in reasons)
    assert not error_lines(every)


def test_a_broken_identity_needs_no_number_of_groups(write, tmp_path):
    claims, _ = claims_of(write, tmp_path, None, (4,), steps=2, estimator="rloo")
    assert claims["C3"].verdict == CONTRADICTED


def test_leave_one_out_that_is_a_group_mean_is_an_error(write, tmp_path):
    claims, every = claims_of(write, tmp_path, None, (4,), estimator="rloo")
    assert claims["C3"].verdict == CONTRADICTED
    assert [line.startswith("C3: ERROR: all, R = 4: Var A 0.75") for line in error_lines(every)] == [True]


def test_weights_by_length_do_not_sum_to_zero(write, tmp_path):
    def by_length(record):
        lengths = tuple(range(3, 3 + record.R))
        return dataclasses.replace(
            record, lengths=lengths, weights=tuple(a / n for a, n in zip(record.advantages, lengths, strict=True))
        )

    claims, every = claims_of(write, tmp_path, by_length, (4,))
    assert claims["C2"].verdict == HOLDS and not error_lines(every)
    sweep = load_sweep("s", tmp_path)
    assert sweep.groups["weight_sum"].max() > 0.1 and sweep.groups["advantage_sum"].max() < 1e-12


@pytest.mark.parametrize("column", ["control_sign_flip", "control_leave_one_out", "control_std", "centred"])
def test_each_control_can_fail(full_sweep, column):
    sweep = load_sweep("full", full_sweep)
    name = "centred_numerical_rank" if column == "centred" else column
    row = usable_groups(sweep, "all", 4).index[0]
    sweep.groups.loc[row, name] = 4.0 if column == "centred" else 1e-3
    claims = judge_claims(sweep)
    controls = {c.id: c for c in claims}["Controls"]
    assert controls.verdict == CONTRADICTED
    assert [f.verdict for f in controls.findings] == [HOLDS, CONTRADICTED, HOLDS]
    assert any(line.startswith("Controls: ERROR: all, R = 4") for line in error_lines(claims))


def equal_where(when):
    """A change of records: groups of equal rewards, without a Gram, in the steps of which `when` is true."""

    def change(record):
        if not when(record.step):
            return record
        ones = (1.0,) * record.R
        return dataclasses.replace(record, rewards=ones, advantages=(0.0,) * record.R, gram=None)

    return change


@pytest.mark.parametrize("seeds", [(0,), (0, 1, 2, 3)])
@pytest.mark.parametrize(
    ("when", "expected"),
    [(lambda step: step >= 40, HOLDS), (lambda step: step < 20, CONTRADICTED), (lambda step: False, UNDECIDED)],
)
def test_c6_is_that_fewer_advantages_lie_beyond_eps(write, tmp_path, when, expected, seeds):
    """With one seed by the draw of prompts alone; 4.1(iv)'s share of eps-effective rollouts, at both eps."""
    claims, _ = claims_of(write, tmp_path, equal_where(when), (4,), steps=60, seeds=seeds)
    found = at(claims["C6"], 4)
    assert claims["C6"].verdict == found.verdict == expected
    first, last = (float(found.measured.split("|A| > 0.05: ")[1].split(" ")[i]) for i in (0, 5))
    groups = load_sweep("s", tmp_path).groups
    mixed = groups["mixed"].astype(float)
    assert first == pytest.approx(mixed[groups["step"] < 20].mean(), abs=5e-4)
    assert last == pytest.approx(mixed[groups["step"] >= 40].mean(), abs=5e-4)
    assert found.interval.mean == pytest.approx(last - first, abs=1e-3)
    assert any("The sparse gradient of 5.1 is undefined in the paper" in remark for remark in claims["C6"].remarks)


@pytest.mark.parametrize(("steps", "told"), [((0, 30, 59), False), ((0, 3, 30, 56, 59), False), (range(60), True)])
def test_c6_tells_no_change_from_a_third_of_which_few_steps_were_measured(write, tmp_path, steps, told):
    """One step is no third of a training, however many groups it has."""
    claims_of(write, tmp_path, equal_where(lambda step: step >= 40), (4,), steps=60)
    sweep, kept = load_sweep("s", tmp_path), np.array(list(steps))
    nearest = np.abs(sweep.groups["step"].to_numpy()[:, None] - kept).argmin(axis=1)
    sweep.groups["step"] = kept[nearest]
    claims = {claim.id: claim for claim in judge_claims(sweep)}
    found = at(claims["C6"], 4)
    assert (found.verdict, found.interval.known) == ((HOLDS, True) if told else (UNDECIDED, False))
    counts = [int(np.sum(kept < 20)), int(np.sum(kept >= 40))]
    assert f"{counts[0]} and {counts[1]} measured steps in the first and the last third" in found.measured
    assert ("fewer than 3: no change is told" in found.measured) is not told


def test_q3_tells_no_change_from_few_measured_steps(write, tmp_path):
    claims_of(write, tmp_path, scored(), (4,), steps=60)
    sweep = load_sweep("s", tmp_path)
    every = at({claim.id: claim for claim in judge_claims(sweep)}["Q3"], 4).measured
    assert "20 and 20 measured steps in the two thirds" in every
    sweep.groups["step"] = sweep.groups["step"] // 30 * 30  # 0 and 30: one step in the first third, one in the last
    assert at({claim.id: claim for claim in judge_claims(sweep)}["Q3"], 4).measured == "nothing measured"


def test_c6_is_not_judged_by_another_estimators_sizes_nor_where_groups_were_discarded(write, tmp_path):
    late = equal_where(lambda step: step >= 40)
    claims, _ = claims_of(write, tmp_path / "std", late, (4,), steps=60, estimator="grpo_std")
    assert claims["C6"].verdict == rules.NOT_ABOUT and any("eps is a size" in r for r in claims["C6"].remarks)
    claims_of(write, tmp_path / "dapo", late, (4,), steps=60)
    sweep = load_sweep("s", tmp_path / "dapo")
    sweep.metrics["resample/discarded_rollouts"] = 4.0
    (c6,) = [claim for claim in judge_claims(sweep) if claim.id == "C6"]
    assert c6.verdict == UNDECIDED and any("resampling discarded groups" in remark for remark in c6.remarks)


def test_the_interval_of_the_fall_of_rho_covers(write, tmp_path):
    """Groups drawn anew many times, of prompts that come again."""
    write(tmp_path, "s", 4, 0, steps=30, evaluate=False)
    records = load_sweep("s", tmp_path).groups
    rng, inside, draws = np.random.default_rng(0), 0, 300
    for _ in range(draws):
        prompts = rng.integers(40, size=len(records))
        share = (rng.random(40) < 0.5)[prompts] * 0.5 + 0.5 * (rng.random(len(records)) < 0.4 - 0.01 * records["step"])
        drawn = records.assign(**{"prompt_id": prompts, "advantage_above_0.05": share})
        found = fall_of(drawn, third_of_run(drawn), 0.05, 0.05)[2]
        inside += found.low <= -0.1 <= found.high  # the last third begins 20 steps after the first
    assert 0.90 <= inside / draws <= 0.985


def test_c6_pairs_the_thirds_of_each_run_for_what_it_shows(write, tmp_path):
    claims, _ = claims_of(write, tmp_path, equal_where(lambda step: step >= 20), (4,), seeds=(0, 1, 2))
    assert "all-equal groups" in at(claims["C6"], 4).measured and "1.000 in the last" in at(claims["C6"], 4).measured


def policy(write, tmp_path, shift):
    """Rollouts drawn from a policy of four outcomes with E psi = `shift`; all-equal groups have no Gram."""
    rng = np.random.default_rng(3)
    p_N, r_N = np.array([0.2, 0.2, 0.35, 0.25]), np.array([1.0, 1.0, 0.0, 0.0])
    psi_ND = rng.standard_normal((4, 3))
    psi_ND += shift - p_N @ psi_ND

    def change(record):
        index = rng.choice(4, record.R, p=p_N)
        r = r_N[index]
        A = r - r.mean()
        gram = psi_ND[index] @ psi_ND[index].T if np.ptp(r) else None
        return dataclasses.replace(record, rewards=tuple(r), advantages=tuple(A), weights=tuple(A / 16), gram=gram)

    return claims_of(write, tmp_path, change, steps=60)


def test_the_score_mean_null_tells_a_sampler_from_another(write, tmp_path):
    claims, every = policy(write, tmp_path / "same", 0.0)
    assert claims["C9"].verdict == UNDEFINED and not error_lines(every)
    claims, every = policy(write, tmp_path / "other", 1.0)
    assert any(line.startswith("C9: ERROR: all, R = 8: the score-mean null is") for line in error_lines(every))


def test_directions_of_gaussian_scores(write, tmp_path):
    claims_of(write, tmp_path, scored(0.0, 1.0, 16), steps=60)
    claims = judge_claims(load_sweep("s", tmp_path))
    measured = at({c.id: c for c in claims}["C9"], 8).measured
    assert 13 < float(measured.split("directions ")[1].split(" ")[0]) < 19  # F = I/16: 16 directions


def test_rows_of_the_loss_and_rewards_between_decide_less(write, tmp_path):
    def loss(record):
        return dataclasses.replace(record, rows="loss")

    claims, every = claims_of(write, tmp_path / "loss", loss, (4,))
    assert claims["C9"].verdict == UNDECIDED, "its scores are the model's, and were not kept"
    assert claims["Shuffled"].verdict == claims["Controls"].verdict == rules.NOT_ABOUT
    null = at(claims["C8"], 4).null
    assert null.startswith("orthogonal rows of the loss, of their own norms, ") and "orthogonal scores" not in null
    assert any("no weight per rollout" in remark for remark in claims["C8"].remarks)
    assert at(claims["C10"], 4).null.startswith("orthogonal rows of the loss, of their own norms: top-1 ")
    assert at(claims["C5"], 4).groups > 0 and at(claims["C7"], 4).groups > 0 and not error_lines(every)

    def graded(record):
        return dataclasses.replace(record, rewards=tuple(0.5 * r for r in record.rewards))

    claims, _ = claims_of(write, tmp_path / "graded", graded, (4,))
    assert claims["C5"].verdict == claims["Shuffled"].verdict == UNDECIDED


def test_what_no_record_decides_says_what_is_needed(full_sweep):
    claims = judge_claims(load_sweep("full", full_sweep))
    ids = [c.id for c in claims]
    assert ids == [*(i for i in STATEMENTS if i.startswith("C")), "Controls", "Q3", "Shuffled"]
    for claim in claims:
        if claim.id in ("C12", "C14", "C23", "C24"):
            assert claim.verdict == rules.by_theory(claim.id) and claim.remarks[0].startswith("It is not a question")
        if claim.id in ("C1", "C11", "C13", "C15"):
            assert claim.verdict == UNDECIDED and claim.remarks[0].startswith(f"It {rules.UNDECIDED}: ")
