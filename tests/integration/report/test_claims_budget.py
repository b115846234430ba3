"""C11 from arms at equal prompts and at equal rollouts; the groups a step in the frames and in the run itself."""

from __future__ import annotations

import dataclasses

import pytest

from grpo_sweeps.report.claims import rules
from grpo_sweeps.report.claims.budget import budget_pairs, extra_cells, gain_difference
from grpo_sweeps.report.claims.rules import CONTRADICTED, HOLDS, UNDECIDED
from grpo_sweeps.report.claims.verdicts import claims_markdown, judge_claims
from grpo_sweeps.report.read.query import load_sweep
from grpo_sweeps.report.tables.pooled import accuracy_by_step
from grpo_sweeps.tracking.local import LocalRecord

pytestmark = pytest.mark.integration
RLOO = "grpo_sweeps.estimators.group.rloo"


@pytest.fixture
def sweep_of(write, tmp_path):
    """A sweep of both budgets; gains: of R = 2, 4, 8 at equal rollouts. C11 needs no Gram."""

    def unmeasured(group):
        return dataclasses.replace(group, gram=None)

    def make(gains, seeds=5, estimator=RLOO, budgets=("prompts", "rollouts"), steps=4):
        for budget in budgets:
            for R, gain in zip((2, 4, 8), gains, strict=True):
                for seed in range(seeds):
                    write(
                        tmp_path, "s", R, seed, steps=steps if R < 8 else 4, gain=gain, change=unmeasured,
                        config={"budget": budget, "budget_R": 4, "estimator._target_": estimator},
                    )  # fmt: skip
        return load_sweep("s", tmp_path)

    return make


def c11_of(sweep):
    (claim,) = [c for c in judge_claims(sweep) if c.id == "C11"]
    return claim


@pytest.mark.parametrize(
    ("gains", "verdict"), [((0.0, 0.3, 0.6), HOLDS), ((0.6, 0.3, 0.0), CONTRADICTED), ((0.3, 0.3, 0.6), UNDECIDED)]
)
def test_the_verdict_is_that_at_equal_rollouts(sweep_of, gains, verdict):
    claim = c11_of(sweep_of(gains))
    assert claim.verdict == verdict and [f.R for f in claim.findings] == [4, 8]
    assert claim.arm == "budget=prompts and budget=rollouts"
    assert "equal rollouts" in claim.findings[0].measured and "equal prompts" in claim.findings[0].measured
    assert claim.findings[0].groups == 5 * 60


def test_resampling_makes_rollouts_unequal(sweep_of, tmp_path):
    """Twelve rollouts that each step throws away: drawn by then, in no group's record, and C11 is not judged."""
    sweep_of((0.0, 0.3, 0.6))
    for folder in sorted((tmp_path / "s").iterdir()):
        with LocalRecord(folder) as record:
            for step in range(4):
                record.log_metrics(step, {"resample/discarded_rollouts": 12.0})
    sweep = load_sweep("s", tmp_path)
    claim = c11_of(sweep)
    assert claim.verdict == UNDECIDED and "drew further rollouts" in " ".join(claim.remarks)
    del sweep.metrics["rollouts"]  # of a record without a count of its own
    prompts, rollouts = (
        accuracy_by_step(sweep, f"budget={b}", 8)["rollouts"].tolist() for b in ("prompts", "rollouts")
    )
    assert prompts == [0, 2 * (4 * 8 + 12), 4 * (4 * 8 + 12)] and rollouts == [0, 2 * (16 + 12), 4 * (16 + 12)]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"seeds": 1}, "one seed says nothing"),
        ({"estimator": "grpo_sweeps.estimators.group.grpo"}, "the factor (R-1)/R"),
        ({"estimator": "grpo_sweeps.estimators.reinforce.reinforce"}, "a group's baseline"),
    ],
)
def test_what_decides_nothing_says_so(sweep_of, changes, words):
    claim = c11_of(sweep_of((0.0, 0.3, 0.6), **changes))
    about = UNDECIDED if "reinforce" not in changes.get("estimator", "") else rules.NOT_ABOUT
    assert claim.verdict == about and words in " ".join(claim.remarks)


def test_one_budget_leaves_the_claim_undecided_and_names_the_sweep(sweep_of):
    sweep = sweep_of((0.0, 0.3, 0.6), budgets=("rollouts",))
    claim = c11_of(sweep)
    assert claim.verdict == UNDECIDED and not claim.findings and "+sweeps=group_size" in claim.remarks[0]
    assert budget_pairs(sweep) == [] and extra_cells([]) == 0 and set(sweep.runs["arm"]) == {"all"}


def test_c11_counts_pairs_and_its_rule_is_among_the_rules(sweep_of):
    claim = c11_of(sweep_of((0.0, 0.3, 0.6)))
    assert claim.header[1] == "problems x seeds" and any(rule.startswith("C11: ") for rule in rules.IN_WORDS)
    text = claims_markdown([claim])
    assert "| R | problems x seeds | the paper |" in text and f"| 8 | {claim.findings[-1].groups} |" in text


def test_runs_of_other_lengths_are_not_compared(sweep_of):
    sweep = sweep_of((0.0, 0.3, 0.6), steps=2)
    assert gain_difference(sweep, "budget=rollouts", 4, 2, 0.05).known
    assert gain_difference(sweep, "budget=rollouts", 8, 2, 0.05).n == 0
    assert "not comparable" in c11_of(sweep).findings[1].measured


def test_groups_and_rollouts_of_a_step_follow_the_budget(sweep_of):
    sweep = sweep_of((0.1, 0.1, 0.1))
    by = sweep.runs.groupby(["arm", "R"])["prompts"].first()
    assert by["budget=prompts"].tolist() == [4, 4, 4] and by["budget=rollouts"].tolist() == [8, 4, 2]
    for R in (2, 4, 8):
        assert accuracy_by_step(sweep, "budget=rollouts", R)["rollouts"].tolist() == [0, 2 * 16, 4 * 16]
    assert sweep.arms.varies == ("budget",)
    (pair,) = budget_pairs(sweep)
    assert pair.Rs == (2, 4, 8) and extra_cells([pair]) == 1


def test_old_runs_without_the_key_are_of_the_same_arm(write, tmp_path):
    write(tmp_path, "s", 4, 0, steps=4)
    write(tmp_path, "s", 4, 1, steps=4, config={"budget": "prompts", "budget_R": 4})
    write(tmp_path, "s", 4, 2, steps=4, config={"budget": "rollouts", "budget_R": 4})
    write(tmp_path, "s", 4, 3, steps=4, config={"budget": "rollouts", "budget_R": 8})
    sweep = load_sweep("s", tmp_path)
    assert sorted(set(sweep.runs["arm"])) == [
        "budget=prompts, budget_R=(not set)", "budget=rollouts, budget_R=4", "budget=rollouts, budget_R=8",
    ]  # fmt: skip
    assert sweep.runs.set_index("seed")["prompts"].tolist() == [4, 4, 4, 8]


def test_the_margin_is_a_rule():
    assert rules.GAIN_MARGIN == 0.01
