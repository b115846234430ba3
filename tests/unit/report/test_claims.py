"""claims: each verdict from data that supports it, data that contradicts it, and data that cannot tell."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter

import numpy as np
import pytest

from grpo_sweeps.maths.intervals import Interval
from grpo_sweeps.report.claims import ranks, rules
from grpo_sweeps.report.claims.finding import ESTIMATORS
from grpo_sweeps.report.claims.ranks import DEFINITIONS
from grpo_sweeps.report.claims.rules import COMPARED, CONTRADICTED, HOLDS, UNDECIDED, UNDEFINED
from grpo_sweeps.report.claims.verdicts import NEEDS, claims_frame, claims_markdown, judge_claims
from grpo_sweeps.report.read.query import load_sweep
from tests.unit.report.conftest import PAPERS

SPECTRA = ("C7", "C8", "C10")


def verdicts(runs, name=None):
    claims = judge_claims(load_sweep(name, runs))
    return {c.id: c for c in claims}


@pytest.fixture(scope="module")
def paper(paper_sweep):
    """The claims of `paper_sweep` by their ids."""
    return verdicts(paper_sweep)


@pytest.fixture(scope="module")
def full(full_sweep):
    """The claims of `full_sweep` by their ids."""
    return verdicts(full_sweep)


def sweep_of(write, tmp_path, kind, Rs=(2, 4, 8), **options):
    for R in Rs:
        write(tmp_path, kind, R, 0, kind, **options)
    return verdicts(tmp_path)


def test_data_with_the_papers_pairs_confirm_c8_and_break_c7(paper):
    assert paper["C8"].verdict == HOLDS and paper["C10"].verdict == COMPARED
    assert paper["C7"].verdict == CONTRADICTED  # full rank, if only just
    assert all(f.verdict == HOLDS and f.groups >= rules.MIN_GROUPS for f in paper["C8"].findings)


@pytest.mark.parametrize(("kind", "expected"), [("paper", HOLDS), ("full", CONTRADICTED)])
def test_table_1_is_judged_on_the_papers_model_task_and_reward_alone(write, tmp_path, kind, expected):
    own = sweep_of(write, tmp_path / "own", kind, config=PAPERS, model="nemotron_mini_4b")["C10"]
    assert own.verdict == expected and COMPARED not in {f.verdict for f in own.findings}
    other = sweep_of(write, tmp_path / "other", kind)["C10"]
    assert {other.verdict, *(f.verdict for f in other.findings)} == {COMPARED}
    assert [f.measured for f in other.findings] == [f.measured for f in own.findings]


def test_data_with_equal_singular_values_contradict_c7_and_c8(full):
    assert {full[name].verdict for name in SPECTRA} == {CONTRADICTED, COMPARED}
    c8 = {f.R: f for f in full["C8"].findings}
    assert c8[2].verdict == HOLDS and c8[4].verdict == CONTRADICTED and c8[8].verdict == CONTRADICTED
    assert re.search(r"effective rank 4\.00 \[", c8[4].measured) and "orthogonal scores" in c8[4].null


def test_data_of_rank_R_minus_1_confirm_c7(write, tmp_path):
    claims = sweep_of(write, tmp_path, "bounded", steps=80)  # 5% is excluded by 200 groups and more
    assert claims["C7"].verdict == HOLDS
    assert all(f.interval.mean == 0 for f in claims["C7"].findings)
    assert claims["C8"].verdict == CONTRADICTED and claims["C10"].verdict == COMPARED


def test_every_kind_whose_advantages_sum_to_zero_has_a_range_of_slopes():
    """C5 asserts a slope of each: a new kind of estimator is given one here, or named as one without."""
    assert {*rules.SLOPES, *rules.NO_SLOPE} == set(ESTIMATORS.values()) and not {*rules.SLOPES} & {*rules.NO_SLOPE}


def test_few_groups_decide_nothing(write, tmp_path):
    claims = sweep_of(write, tmp_path, "full", steps=2)
    assert {claims[name].verdict for name in ("C7", "C5", "Shuffled")} == {UNDECIDED}


def test_few_groups_far_from_two_contradict_it_and_few_near_it_decide_nothing(write, tmp_path):
    """By Hoeffding's interval for values in [1, R], which the finding names."""
    full, paper = (sweep_of(write, tmp_path / kind, kind, steps=2)["C8"] for kind in ("full", "paper"))
    assert full.verdict == CONTRADICTED and paper.verdict == UNDECIDED
    assert {f.verdict for f in full.findings if f.R == 2} == {UNDECIDED}, "R = 2 allows no rank far from 2"
    assert all("by Hoeffding's interval" in f.measured for f in (*full.findings, *paper.findings))


def test_one_R_with_few_groups_leaves_a_claim_open_unless_another_breaks_it(write, tmp_path):
    write(tmp_path, "s", 4, 0, "paper")
    write(tmp_path, "s", 8, 0, "paper", steps=2)
    assert verdicts(tmp_path)["C8"].verdict == UNDECIDED
    write(tmp_path, "t", 4, 0, "full")
    write(tmp_path, "t", 8, 0, "full", steps=2)
    assert verdicts(tmp_path, "t")["C8"].verdict == CONTRADICTED


@pytest.mark.parametrize("Rs", [(2,), (4,), (8,), (2, 8), (4, 8)])
def test_for_every_R_is_not_confirmed_without_each_R_of_the_table(write, tmp_path, Rs):
    claims = sweep_of(write, tmp_path, "paper", Rs=Rs, steps=40, config=PAPERS, model="llama_nemotron_nano_4b")
    assert {f.verdict for f in claims["C8"].findings} == {HOLDS}
    assert claims["C8"].verdict == UNDECIDED and claims["C10"].verdict == UNDECIDED
    assert any("needs R = 2, 4, 8 together" in remark for remark in claims["C8"].remarks)
    assert not any(f"same rule: {HOLDS}" in remark for remark in claims["C8"].remarks)


def repeated(record):
    """Two texts, orthogonal scores of equal norm: the effective rank is 2 at any R, and would be 4 k (R - k) / R."""
    if not record.mixed or record.R == 2:
        return record
    k = record.R // 2
    rewards = np.arange(record.R) < k
    advantages = rewards - 0.5
    same = np.where(rewards, 0, k)
    return dataclasses.replace(
        record, rewards=tuple(rewards.astype(float)), advantages=tuple(advantages), weights=tuple(advantages / 16),
        gram=(same[:, None] == same).astype(float), same_as=tuple(same.tolist()),
    )  # fmt: skip


def test_about_2_by_repeated_texts_alone_does_not_hold(write, tmp_path):
    c8 = sweep_of(write, tmp_path, "paper", change=repeated)["C8"]
    found = {f.R: f for f in c8.findings}
    assert {R: round(f.interval.mean, 2) for R, f in found.items() if R > 2} == {4: 2.0, 8: 2.0}
    assert c8.verdict == UNDECIDED and {found[4].verdict, found[8].verdict} == {UNDECIDED}
    assert "measured norms 8.00; these and equal texts once 2.00" in found[8].null
    assert any(remark.startswith("R = 8: about 2 without structure, by repeated texts") for remark in c8.remarks)


@pytest.mark.parametrize("kind", ["paper", "full"])
def test_about_2_is_not_judged_without_a_zero_sum(write, tmp_path, kind):
    config = {"estimator._target_": "grpo_sweeps.estimators.reinforce.reinforce"}
    c8 = sweep_of(write, tmp_path, kind, config=config)["C8"]
    assert {c8.verdict, *(f.verdict for f in c8.findings)} == {rules.NOT_ABOUT}
    assert c8.remarks[0].endswith("this arm's advantages do not sum to zero in a group.")


def test_a_coarse_floor_leaves_low_ranks_and_about_2_open(write, tmp_path):
    coarse = {"change": lambda g: dataclasses.replace(g, floor=0.05)}
    write(tmp_path, "bounded", 4, 0, "bounded", steps=60, **coarse)
    write(tmp_path, "paper", 8, 0, "paper", **coarse)
    assert verdicts(tmp_path, "bounded")["C7"].verdict == UNDECIDED
    c8 = {f.R: f for f in verdicts(tmp_path, "paper")["C8"].findings}
    assert c8[8].verdict == UNDECIDED and c8[8].interval.high > 2.5 and c8[8].interval.low < 2.0


def test_negative_controls_hold_to_rounding_and_are_reported(full_sweep, full):
    sweep = load_sweep("full", full_sweep)
    controls = sweep.groups[["control_sign_flip", "control_leave_one_out", "control_std"]].max()
    assert (controls < 1e-9).all() and sweep.groups["control_std"].notna().sum() > 100
    remarks = " ".join(full["C8"].remarks)
    assert "Exact negative controls passed" in remarks and "another model" in remarks


def test_failed_controls_withhold_the_verdict(full_sweep, monkeypatch):
    monkeypatch.setattr(rules, "CONTROL_TOLERANCE", -1.0)
    c8 = verdicts(full_sweep)["C8"]
    assert c8.verdict == UNDECIDED and any("FAILED" in r for r in c8.remarks)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"model": "nemotron_mini_4b", "config": PAPERS}, ""),
        ({"model": "llama_nemotron_nano_4b", "config": PAPERS | {"model.name": "mine"}}, ""),
        ({"config": {"model.name": "my_nemotron_toy"}}, "an architecture that is not recorded"),
        ({"model": "smollm2_135m", "config": PAPERS | {"model.name": "nemotron_mini_4b"}}, "a llama of 30 layers"),
        ({"model": "nemotron_mini_4b", "random": True, "config": PAPERS}, "random weights"),
        ({"model": "nemotron_mini_4b", "config": PAPERS | {"model.random": True}}, "random weights"),
        ({"model": "nemotron_mini_4b", "config": PAPERS | {"model.lora.r": 8}}, "adapters alone"),
        ({"model": "nemotron_mini_4b", "config": {"model.name": "nemotron_mini_4b"}}, "task arithmetic"),
        ({"model": "nemotron_mini_4b", "config": PAPERS | {"reward._target_": "my.coin"}}, "reward my.coin"),
        ({"model": "nemotron_mini_4b", "config": PAPERS | {"trainer.lr": 0.0}}, "not trained"),
    ],
)  # fmt: skip
def test_the_papers_model_is_told_by_what_was_trained_and_never_by_a_name(write, tmp_path, options, said):
    for R in (2, 4, 8):
        write(tmp_path, "s", R, 0, "paper", **options)
    claims = verdicts(tmp_path)
    sentence = "A claim about Nemotron-4B is not decided by another model, task or reward."
    for claim in ("C5", "C8", "C10"):
        assert any(sentence in r and said in r for r in claims[claim].remarks) is bool(said)
    assert claims["C10"].verdict == (COMPARED if said else HOLDS)


def test_one_run_of_another_kind_makes_the_arm_another(write, tmp_path):
    for R in (2, 4, 8):
        write(tmp_path, "s", R, 0, "paper", config=PAPERS, model="nemotron_mini_4b")
    write(tmp_path, "s", 4, 1, "paper", config=PAPERS, model="nemotron_mini_4b", random=True)
    assert verdicts(tmp_path)["C10"].verdict == COMPARED


def test_c10_prints_the_feasible_ranges_and_counts_impossible_groups(full_sweep, full):
    text = " ".join(full["C10"].remarks)
    for expected in ("1.92-1.98", "1.80-3.19", "1.98-6.65", "1.60-", "1.40-", "1.80-6.65", "99%"):
        assert expected in text
    assert "Every measured group lies within" in text
    sweep = load_sweep("full", full_sweep)
    sweep.groups["effective_rank"] = 8.5
    c10 = {c.id: c for c in judge_claims(sweep)}["C10"]
    assert c10.verdict == UNDECIDED and any("do not fit together" in r for r in c10.remarks)


def test_more_cells_widen_the_intervals(full_sweep):
    sweep = load_sweep("full", full_sweep)
    alone = load_sweep("full", full_sweep)
    alone.runs = alone.runs[alone.runs["R"] == 4]
    many = {f.R: f for f in {c.id: c for c in judge_claims(sweep)}["C10"].findings}[4].interval
    one = {f.R: f for f in {c.id: c for c in judge_claims(alone)}["C10"].findings}[4].interval
    assert many.high - many.low > one.high - one.low and many.mean == one.mean


def test_every_interval_of_a_cell_is_counted_that_the_error_rate_is_divided_by(full_sweep, monkeypatch):
    """Those that widen with the error rate are what can be wrong by chance; C8's other definitions of rank, whose
    verdicts stand in sentences, are among them."""
    sweep, found = load_sweep("full", full_sweep), []
    sweep.groups["numerical_rank"] -= np.arange(len(sweep.groups)) % 2  # else all are R
    monkeypatch.setattr(ranks, "with_interval_of", lambda i, *_: f"{i.mean!r} [{i.low!r}, {i.high!r}]")
    monkeypatch.setattr(Interval, "within", lambda self, _: self)  # an end that is cut no longer widens
    for alpha in (0.05, 0.005):
        monkeypatch.setattr(rules, "simultaneous_alpha", lambda cells, alpha=alpha: alpha)
        claims = judge_claims(sweep)
        found.append({(c.id, f.R): f.interval for c in claims for f in c.findings if f.interval.known})
        (c8,) = (c for c in claims if c.id == "C8")
        for name in DEFINITIONS.values():
            (said,) = (remark for remark in c8.remarks if remark.startswith(f"By {name}"))
            found[-1] |= {(name, int(R)): ends for R, ends in re.findall(r"R = (\d+): \S+ (\[.*?\])", said)}
    wide = Counter(R for key, one in found[0].items() for R in key[1:] if found[1].get(key) != one)
    assert max(wide.values()) == rules.TESTS_PER_CELL, wide


def test_no_groups_at_all(write, tmp_path):
    write(tmp_path, "s", 4, 0, change=lambda g: dataclasses.replace(g, gram=None))
    claims = verdicts(tmp_path)
    assert {claims[name].verdict for name in (*SPECTRA, "C5", "C9", "Controls", "Shuffled")} == {UNDECIDED}
    assert claims["C2"].verdict == HOLDS  # needs no Gram
    assert claims["C8"].findings[0].measured == "nothing measured"


def test_the_null_of_c10_against_the_weights(paper_sweep, paper):
    sweep = load_sweep("paper", paper_sweep)
    groups = sweep.groups[(sweep.groups["R"] == 8) & sweep.groups["mixed"]]
    top1 = [max(np.square(sweep.record(i).weights)) / sum(np.square(sweep.record(i).weights)) for i in groups.index]
    null = {f.R: f for f in paper["C10"].findings}[8].null
    assert f"top-1 {np.mean(top1):.2f} " in null


def test_frame_and_markdown_carry_every_finding(full):
    claims = [*full.values()]
    frame = claims_frame(claims)
    assert len(frame) == len(claims) + sum(len(claim.findings) for claim in claims)
    assert list(frame.loc[frame["R"].isna(), "claim"]) == [claim.id for claim in claims]
    known = {HOLDS, CONTRADICTED, UNDECIDED, UNDEFINED, COMPARED, rules.ASKED, rules.CORRECTED, rules.SAYS_NOTHING}
    known |= {rules.LONGER, rules.SHORTER, *map(rules.by_theory, rules.BY_THEORY)}
    assert set(frame["verdict"]) <= known
    text, every = claims_markdown(claims, ["No run for R = 16."]), " (every arm)"
    assert text.count("Effective rank: (sum s)^2 / sum s^2") == 1, "defined once"
    assert text.index("(sum s)^2") < text.index("No run for R = 16.") < text.index("## C1 ")
    for claim in claims:
        assert claim.paper in text and f"## {claim.id}{every if claim.id in NEEDS else ''}: {claim.verdict}" in text
        assert all(f.measured.replace("|", "\\|").replace("<", "&lt;") in text for f in claim.findings)


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ([HOLDS, HOLDS], HOLDS),
        ([HOLDS, UNDECIDED], UNDECIDED),
        ([UNDECIDED, CONTRADICTED], CONTRADICTED),
        ([], UNDECIDED),
    ],
)
def test_a_claim_about_every_R(found, expected):
    assert rules.all_of(found) == expected


def test_the_rules_in_words_have_their_numbers():
    words = "\n".join(rules.IN_WORDS)
    assert "{" not in words and f"{rules.WITNESSES} groups" in words
