"""C16, C18 to C21 from records whose spectra are chosen: where each holds, is false, and cannot be decided."""

from __future__ import annotations

import dataclasses

import numpy as np
import pandas as pd
import pytest
from scipy.linalg import hadamard

from grpo_sweeps.maths.intervals import Interval, mean_interval
from grpo_sweeps.report.claims import paired, rules, sizes
from grpo_sweeps.report.claims.rules import COMPARED, CONTRADICTED, HOLDS, UNDECIDED
from grpo_sweeps.report.claims.sizes import STACKED, c20
from grpo_sweeps.report.claims.verdicts import NEEDS, judge_claims
from grpo_sweeps.report.read.query import load_sweep
from grpo_sweeps.report.tables.pooled import usable_groups
from tests.unit.report.conftest import PAPERS

PREFIX = "grpo_sweeps.estimators.group."
VINE = {
    "objective": {"ratio": "token", "inner_updates": 2, "continuations": 8, "value_every": 8},
    "estimator._target_": "grpo_sweeps.estimators.reinforce.reinforce",
}
CLIP = {"objective": {"ratio": "token", "inner_updates": 2, "minibatches": 2}}
FIXED = {"trainer.lr": 0.0}


def with_values(values, norms=None):
    """Rows of the loss whose matrix has these singular values; `norms`: orthogonal rows of these norms instead."""

    def change(record):
        R = record.R
        if norms is not None:
            gram = np.diag(np.square(np.resize(norms, R)))
        else:
            H = hadamard(R) / np.sqrt(R)  # spreads the values over rows of equal norm
            gram = (H * np.square(np.resize(values, R))) @ H.T
        return dataclasses.replace(record, rows="loss", gram=gram if record.mixed else None, same_as=tuple(range(R)))

    return change


ONE_WAY = with_values([1.0, 0.1, 0.1, 0.1])  # effective rank 1.64, of rows of equal norm
EVERY_WAY = with_values([1.0, 1.0, 1.0, 1.0])  # 4
ALONE = with_values(None, [1.0, 0.1, 0.1, 0.1])  # 1.64, by its norms alone
NEAR = with_values([1.0, 0.11, 0.1, 0.1])


def arms(write, tmp_path, reference, other, config, steps=20, seeds=(0,), fixed=True, **options):
    common = FIXED if fixed else {}
    for seed in seeds:
        for extra, change in (({}, reference), (config, other)):
            write(tmp_path, "s", 4, seed, steps=steps, config=common | extra, change=change, evaluate=False, **options)
    sweep = load_sweep("s", tmp_path)
    return sweep, {c.id: c for c in judge_claims(sweep)}


@pytest.mark.parametrize(
    ("reference", "other", "expected"),
    [
        (ONE_WAY, EVERY_WAY, HOLDS),
        (EVERY_WAY, ONE_WAY, CONTRADICTED),
        (ALONE, EVERY_WAY, CONTRADICTED),  # the rank is higher, and no more than its norms make it
        (ONE_WAY, ONE_WAY, CONTRADICTED),
    ],
)
def test_credit_by_token_raises_the_rank_where_it_has_more_than_its_norms(write, tmp_path, reference, other, expected):
    sweep, claims = arms(write, tmp_path, reference, other, VINE)
    (pair,) = paired.token_pairs(sweep)
    assert "reinforce" in pair.other and "grpo" in pair.reference and claims["C16"].verdict == expected
    assert claims["C16"].arm == pair.name and claims["C16"].findings[0].groups >= rules.MIN_GROUPS
    assert claims["C19"].verdict == UNDECIDED and claims["C19"].arm == "every arm"


def test_only_groups_of_one_policy_are_compared(write, tmp_path):
    """Where the policy learns the first step alone is: too few groups here, however far the later steps differ."""
    sweep, claims = arms(write, tmp_path, ONE_WAY, EVERY_WAY, VINE, fixed=False)
    finding = claims["C16"].findings[0]
    assert (
        finding.verdict == UNDECIDED
        and finding.groups <= 4
        and "later steps, of other policies, 2.36" in (finding.measured)
    )
    ((R, runs),) = paired.token_pairs(sweep)[0].runs.items()
    both = paired.same_groups(sweep, runs)
    assert (
        R == 4
        and set(both.loc[both["first"], "step"]) == {0}
        and len(both) == len(usable_groups(sweep, paired.token_pairs(sweep)[0].other, 4))
    )


def test_a_rise_that_is_not_told_from_the_margin_is_undecided():
    wide, above, small = Interval(0.3, -0.1, 0.7, 99), Interval(0.3, 0.28, 0.32, 99), Interval(0.0, -0.1, 0.1, 99)
    assert paired.raised(above, above) == HOLDS and paired.raised(wide, wide) == UNDECIDED
    assert paired.raised(above, small) == paired.raised(small, above) == CONTRADICTED
    assert paired.raised(dataclasses.replace(above, n=5), above) == UNDECIDED


def test_arms_with_one_advantage_stand_beside_and_runs_of_other_settings_are_not_paired(write, tmp_path):
    for extra in ({}, VINE, {"estimator._target_": PREFIX + "rloo"}, VINE | {"rollout.temperature": 2.0}):
        write(tmp_path, "s", 4, 0, config=FIXED | extra, change=ONE_WAY, evaluate=False)
    sweep = load_sweep("s", tmp_path)
    assert len(paired.token_pairs(sweep)) == 1 and paired.extra_cells(sweep) == 1
    claim = next(c for c in judge_claims(sweep) if c.id == "C16")
    assert any("rloo" in remark and "R = 4 0.00 [0.00, 0.00]" in remark for remark in claim.remarks)


ORACLE = {
    "objective": {"continuations": 32}, "estimator._target_": "grpo_sweeps.estimators.reinforce.reinforce"
}  # fmt: skip


@pytest.mark.parametrize(("oracle", "expected"), [(ONE_WAY, HOLDS), (EVERY_WAY, CONTRADICTED)])
def test_credit_by_token_is_compared_with_the_oracles_baseline_too(write, tmp_path, oracle, expected):
    """A rise that the oracle's baseline has as well is the baseline's, and no credit's."""
    for extra, change in (({}, ONE_WAY), (ORACLE, oracle), (VINE, EVERY_WAY)):
        write(tmp_path, "s", 4, 0, config=FIXED | extra, change=change, evaluate=False)
    sweep = load_sweep("s", tmp_path)
    mean, value = paired.token_pairs(sweep)
    assert "estimator=grpo" in mean.reference and "continuations=32" in value.reference
    claims = {c.arm: c for c in judge_claims(sweep) if c.id == "C16"}
    assert claims[mean.name].verdict == HOLDS and claims[value.name].verdict == expected
    (finding,) = claims[value.name].findings
    assert f"change {2.36 if expected == HOLDS else 0:.2f} [" in finding.measured and finding.interval.known
    assert any("what differs is the credit" in remark for remark in claims[value.name].remarks)
    assert paired.extra_cells(sweep) == 1


def clipping(write, tmp_path, other, clipped=0.1, config=CLIP, steps=2):
    """Many groups in a step: those of its second half are differentiated after an update."""
    for extra, change in (({}, ONE_WAY), (config, other)):
        run = write(tmp_path, "s", 4, 0, steps=0, config={"trainer.prompts": 100} | extra, evaluate=False)
        from grpo_sweeps.tracking.local import LocalRecord
        from tests.unit.report.conftest import group

        rng = np.random.default_rng(0)
        with LocalRecord(run) as record:
            for step in range(steps):
                record.log_groups([change(group(step, i, 4, "full", rng)) for i in range(100)])
                record.log_metrics(step, {"clip_ratio/region_mean": clipped, "grad_norm": 1.0})
    sweep = load_sweep("s", tmp_path)
    return {c.id: c for c in judge_claims(sweep)}["C19"]


@pytest.mark.parametrize(
    ("other", "clipped", "expected"),
    [(NEAR, 0.1, rules.WITHIN), (EVERY_WAY, 0.1, CONTRADICTED), (NEAR, 0.0, UNDECIDED)],
)
def test_clipping_leaves_the_structure_where_the_same_groups_keep_their_rank(write, tmp_path, other, clipped, expected):
    claim = clipping(write, tmp_path, other, clipped)
    assert claim.verdict == expected and "first update" in claim.findings[0].measured
    assert ("nothing was clipped" in claim.findings[0].measured) == (clipped == 0)


def test_clipping_is_compared_with_as_many_minibatches_where_there_are(write, tmp_path):
    several = {"objective": {"minibatches": 2}}
    for config in ({}, several, CLIP, {"objective": {"kl_beta": 0.1}}):
        write(tmp_path, "s", 4, 0, config=config, evaluate=False)
    sweep = load_sweep("s", tmp_path)
    arms_of = {
        str(arm): paired.objective_of(sweep.configs[str(run)]).minibatches
        for run, arm in zip(sweep.runs["run"], sweep.runs["arm"], strict=True)
    }
    pairs = paired.clipping_pairs(sweep)
    assert len(pairs) == 2 and all(arms_of[pair.reference] == arms_of[pair.other] for pair in pairs)
    assert not paired.token_pairs(sweep)


def test_the_first_update_decides_nothing_about_clipping(write, tmp_path):
    claim = clipping(write, tmp_path, EVERY_WAY, config={"objective": {"ratio": "token", "inner_updates": 2}})
    assert claim.verdict == UNDECIDED and claim.findings[0].groups == 0


def test_the_middle_of_k_is_shown_and_never_judged(write, tmp_path):
    write(tmp_path, "s", 8, 0, change=lambda g: dataclasses.replace(g, gram=np.eye(8) if g.mixed else None))
    sweep = load_sweep("s", tmp_path)
    claim = next(c for c in judge_claims(sweep) if c.id == "C18")
    assert {claim.verdict, claim.findings[0].verdict} == {"not a question for runs; theory: does not hold"}
    g = sweep.groups
    between = g["k"].between(2, 6)
    square = g["gradient_norm"].fillna(0.0) ** 2
    share = square[between].sum() / square.sum()
    assert f"are {between.mean():.1%} of all and carry {share:.1%}" in claim.findings[0].measured


@pytest.mark.parametrize(
    ("change", "groups", "expected"),
    [
        (EVERY_WAY, 4, CONTRADICTED),  # the least value is 4
        (with_values([1.0, 1.0, 0.0, 0.0]), 1, HOLDS),  # one group per step: the stack is the group
        (with_values([1.0, 1.0, 0.0, 0.0]), 4, UNDECIDED),  # 2 to 8
    ],
)
def test_the_groups_own_spectra_bound_the_stack(write, tmp_path, change, groups, expected):
    def alone(record):
        record = change(record)
        return record if record.group < groups else dataclasses.replace(record, gram=None)

    write(tmp_path, "s", 4, 0, steps=60, change=alone, evaluate=False)
    claims = {c.id: c for c in judge_claims(load_sweep("s", tmp_path))}
    assert claims["C20"].verdict == expected


@pytest.mark.parametrize(("value", "expected"), [(2.1, HOLDS), (3.0, CONTRADICTED)])
def test_a_measured_stack_decides_where_the_bounds_do_not(write, tmp_path, value, expected):
    write(tmp_path, "s", 4, 0, steps=60, change=with_values([1.0, 1.0, 0.0, 0.0]), evaluate=False)
    sweep = load_sweep("s", tmp_path)
    rng = np.random.default_rng(0)
    sweep.metrics[sizes.STACKED] = value + 0.01 * rng.standard_normal(len(sweep.metrics))
    assert {c.id: c for c in judge_claims(sweep)}["C20"].verdict == expected
    sweep.metrics.loc[20:, sizes.STACKED] = np.nan
    assert {c.id: c for c in judge_claims(sweep)}["C20"].verdict == UNDECIDED


def top1(record, R_of):
    """One long row and the rest short, so that the top-1 fraction is that of R."""
    share = R_of[record.R]
    rest = (1 - share) / (record.R - 1)
    gram = np.diag([share, *[rest] * (record.R - 1)])
    return dataclasses.replace(record, rows="loss", gram=gram if record.mixed else None)


@pytest.mark.parametrize(
    ("fractions", "expected"),
    [
        ({2: 0.65, 4: 0.75, 8: 0.55}, HOLDS),
        ({2: 0.8, 4: 0.7, 8: 0.6}, CONTRADICTED),
        ({2: 0.6, 4: 0.7, 8: 0.8}, CONTRADICTED),
    ],
)
def test_the_order_of_figure_2(write, tmp_path, fractions, expected):
    for name, options in (("own", {"config": PAPERS, "model": "nemotron_mini_4b"}), ("other", {})):
        for R in fractions:
            write(tmp_path / name, "s", R, 0, change=lambda g: top1(g, fractions), evaluate=False, **options)
        claim = {c.id: c for c in judge_claims(load_sweep("s", tmp_path / name))}["C21"]
        assert claim.verdict == (expected if name == "own" else COMPARED)
        assert [f.R for f in claim.findings] == [2, 8]
        found = {f.R: f.interval.mean for f in claim.findings}
        assert found == pytest.approx({R: fractions[4] - fractions[R] for R in (2, 8)})


def test_the_order_needs_all_three_sizes(write, tmp_path):
    for R in (2, 4):
        write(tmp_path, "s", R, 0, change=lambda g: top1(g, {2: 0.6, 4: 0.8}), config=PAPERS, model="nemotron_mini_4b")
    claim = {c.id: c for c in judge_claims(load_sweep("s", tmp_path))}["C21"]
    assert claim.findings[0].verdict == HOLDS and claim.verdict == UNDECIDED


def test_the_interval_of_a_difference_covers():
    """Two sets of groups that share their prompts, drawn anew many times."""
    rng, inside, draws = np.random.default_rng(0), 0, 300
    for _ in range(draws):
        shared = rng.standard_normal(40)
        frames = []
        for size in (60, 80):
            prompt = rng.integers(40, size=size)
            values = shared[prompt] + rng.standard_normal(size)
            frames.append(pd.DataFrame({"x": values, "prompt_id": prompt.astype(str), "seed": 0, "R": 4}))
        found = sizes.difference(*frames, "x", 0.05)
        inside += found.low <= 0.0 <= found.high
    assert 0.9 <= inside / draws <= 0.99
    assert not sizes.difference(frames[0], frames[1][:0], "x", 0.05).known


def test_claims_without_arms_to_compare_say_what_is_needed(full_sweep):
    claims = {c.id: c for c in judge_claims(load_sweep("full", full_sweep))}
    for name in ("C16", "C17", "C19", "C22", "C23", "C24"):
        expected = rules.by_theory(name) if name in rules.BY_THEORY else UNDECIDED
        assert claims[name].verdict == expected and NEEDS[name] in claims[name].remarks[0]


def test_steps_that_share_prompts_are_not_independent_for_c20():
    """16 prompts of a population without end, four a step in 40 steps; a step's value is a sum over its prompts. Steps
    taken for independent held the mean in 42% of such sweeps."""
    rng, inside, sweeps, G, T = np.random.default_rng(0), 0, 200, 4, 40
    for _ in range(sweeps):
        of_prompt, prompts = rng.standard_normal(16), rng.integers(16, size=(T, G))
        groups = pd.DataFrame({"run": "a", "seed": 0, "R": 4, "step": np.repeat(np.arange(T), G), "energy": 1.0})
        groups = groups.assign(prompt_id=prompts.ravel(), effective_rank_floor_low=1.0, effective_rank_floor_high=1.0)
        metrics = pd.DataFrame({"R": 4, "seed": 0, STACKED: 2.0 + of_prompt[prompts].sum(axis=1)})
        interval = c20("all", {4: groups}, {4: groups}, metrics, 0.05).findings[0].interval
        inside += interval.low <= 2.0 <= interval.high
    assert 0.9 <= inside / sweeps <= 1.0
    once = groups.assign(prompt_id=np.arange(T * G))
    narrow = c20("all", {4: once}, {4: once}, metrics, 0.05).findings[0].interval
    plain = mean_interval(metrics[STACKED])
    assert (narrow.low, narrow.high) == pytest.approx((plain.low, plain.high))
