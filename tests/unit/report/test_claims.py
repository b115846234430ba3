"""claims: each verdict from data that supports it, data that contradicts it, and data that cannot tell."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter

import numpy as np
import pytest

from grpo_sweeps.report.claims import rules
from grpo_sweeps.report.claims.finding import ESTIMATORS
from grpo_sweeps.report.claims.rules import CONTRADICTED, HOLDS, UNDECIDED, UNDEFINED
from grpo_sweeps.report.claims.verdicts import NEEDS, claims_frame, claims_markdown, judge_claims
from grpo_sweeps.report.read.query import load_sweep

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


def test_data_with_the_papers_pairs_confirm_c8_and_c10_and_break_c7(paper):
    assert paper["C8"].verdict == HOLDS and paper["C10"].verdict == HOLDS
    assert paper["C7"].verdict == CONTRADICTED  # full rank, if only just
    assert all(f.verdict == HOLDS and f.groups >= rules.MIN_GROUPS for f in paper["C8"].findings)


def test_data_with_equal_singular_values_contradict_all_three(full):
    assert {full[name].verdict for name in SPECTRA} == {CONTRADICTED}
    c8 = {f.R: f for f in full["C8"].findings}
    assert c8[2].verdict == HOLDS and c8[4].verdict == CONTRADICTED and c8[8].verdict == CONTRADICTED
    assert re.search(r"effective rank 4\.00 \[", c8[4].measured) and "orthogonal scores" in c8[4].null


def test_data_of_rank_R_minus_1_confirm_c7(write, tmp_path):
    claims = sweep_of(write, tmp_path, "bounded", steps=60)  # 5% is excluded by 150 groups and more
    assert claims["C7"].verdict == HOLDS
    assert all(f.interval.mean == 0 for f in claims["C7"].findings)
    assert claims["C8"].verdict == CONTRADICTED and claims["C10"].verdict == CONTRADICTED


def test_every_kind_whose_advantages_sum_to_zero_has_a_range_of_slopes():
    """C5 asserts a slope of each: a new kind of estimator is given one here or the claim has no verdict."""
    assert set(rules.SLOPES) == set(ESTIMATORS.values())


def test_few_groups_decide_nothing(write, tmp_path):
    claims = sweep_of(write, tmp_path, "full", steps=2)
    assert {claims[name].verdict for name in (*SPECTRA, "C5", "Shuffled") if name != "C8"} == {UNDECIDED}


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


def test_R_2_alone_cannot_confirm_c8_nor_c10(write, tmp_path):
    claims = sweep_of(write, tmp_path, "paper", Rs=(2,), steps=40)
    assert [f.verdict for f in claims["C8"].findings] == [HOLDS]
    assert claims["C8"].verdict == UNDECIDED and claims["C10"].verdict == UNDECIDED


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


def test_another_model_is_said_to_decide_nothing_about_nemotron(write, tmp_path):
    write(tmp_path, "n", 4, 0, "paper", config={"model.name": "nemotron_mini_4b"})
    write(tmp_path, "t", 4, 0, "paper")
    sentence = "A claim about Nemotron-4B is not decided by another model."
    for name, said in (("n", False), ("t", True)):
        for claim in ("C8", "C10"):
            assert any(sentence in r for r in verdicts(tmp_path, name)[claim].remarks) is said


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
    """Those that widen with the error rate are what can be wrong by chance."""
    sweep, found = load_sweep("full", full_sweep), []
    for alpha in (0.05, 0.005):
        monkeypatch.setattr(rules, "simultaneous_alpha", lambda cells, alpha=alpha: alpha)
        found.append({(c.id, f.R): f.interval for c in judge_claims(sweep) for f in c.findings})
    wide = Counter(R for (name, R), one in found[0].items() if one.known and found[1][name, R] != one)
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
    assert set(frame["verdict"]) <= {HOLDS, CONTRADICTED, UNDECIDED, UNDEFINED, rules.ASKED}
    text, every = claims_markdown(claims), " (every arm)"
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
    assert "{" not in rules.IN_WORDS and f"{rules.WITNESSES} groups" in rules.IN_WORDS
