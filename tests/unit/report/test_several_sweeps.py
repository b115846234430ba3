"""Several sweeps read as one, runs chosen by `where`, arms in the order of their numbers, a sweep as it is shown."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from grpo_sweeps.publish.formats import csv
from grpo_sweeps.report.__main__ import main as report
from grpo_sweeps.report.claims.verdicts import judge_claims
from grpo_sweeps.report.figures.kept import drawn
from grpo_sweeps.report.read.query import ReportError, Sweep, load_sweep
from grpo_sweeps.report.remarks import missing
from grpo_sweeps.report.tables.pooled import first_and_last, table1
from grpo_sweeps.report.tables.sweeps import differences, side_by_side, sweeps_sections

RLOO = {"estimator._target_": "grpo_sweeps.estimators.group.rloo"}
OTHER_TASK = {**RLOO, "task._target_": "mine.task"}


@pytest.fixture
def runs(write, tmp_path: Path) -> Path:
    """Sweeps a and b, which differ in the estimator, and c on other problems; b has a's first run as well."""
    for seed in (0, 1, 2):
        for R in (2, 4):
            write(tmp_path, "a", R, seed, steps=4)
            write(tmp_path, "b", R, seed, steps=4, config=RLOO, gain=0.6)
    write(tmp_path, "b", 2, 0, steps=4)
    write(tmp_path, "c", 2, 0, steps=4, config=OTHER_TASK)
    return tmp_path


def test_arms_of_several_sweeps_stand_side_by_side(runs: Path) -> None:
    sweep = load_sweep("a,b", runs)
    assert sweep.name == "a+b" and sweep.words == "sweep=a,b"
    assert sweep.cells == [(f"estimator={name}", R) for name in ("grpo", "rloo") for R in (2, 4)]
    assert dict(sweep.runs["sweep"].value_counts()) == {"a": 6, "b": 6}
    assert [note for note in sweep.notes if "is in a and in b: that of a is taken." in note]
    assert load_sweep(["a", "b"], runs).runs.equals(sweep.runs) and len(table1(sweep)) == 4
    assert {claim.arm for claim in judge_claims(sweep)} >= {"estimator=grpo", "estimator=rloo"}
    assert not [line for line in missing(sweep) if "No run" in line or "not whole" in line]
    assert sweep.gram(sweep.groups.index[sweep.groups["measured"]][-1]).shape == (4, 4)
    with pytest.raises(ReportError, match="sweep=nope: no such sweep"):
        load_sweep("a,nope", runs)


def test_what_differs_is_named(runs: Path) -> None:
    table = differences(load_sweep("a,b", runs))
    assert list(table.columns) == ["key", "a", "b"]
    assert table.to_numpy().tolist() == [
        ["estimator._target_", "grpo_sweeps.estimators.group.grpo", "grpo_sweeps.estimators.group.rloo"]
    ]


def test_pairs_are_of_the_same_problems(runs: Path) -> None:
    sweep = load_sweep("a,b", runs)
    table = side_by_side(sweep).set_index(["R", "quantity"])
    assert set(table["arm"]) == {"estimator=rloo"} and set(table["reference"]) == {"estimator=grpo"}
    one = table.loc[(2, "accuracy")]
    ends = [
        first_and_last(sweep, f"estimator={name}", 2).set_index(["seed", "problem_id"]) for name in ("grpo", "rloo")
    ]
    difference = ends[1]["sampled_last"] - ends[0]["sampled_last"]
    assert one["pairs"] == 180 == len(difference) and one["difference"] == pytest.approx(difference.mean())
    assert one["difference_low"] < one["difference"] < one["difference_high"] and one["difference_low"] > 0
    groups = sweep.groups[(sweep.groups["R"] == 4)].set_index(["seed", "step", "group", "prompt_id"])
    by_arm = [groups.loc[groups["arm"] == f"estimator={name}", "reward_mean"] for name in ("grpo", "rloo")]
    assert table.loc[(4, "reward"), "difference"] == pytest.approx((by_arm[1] - by_arm[0]).mean())
    assert table.loc[(4, "effective_rank"), "pairs"] > 0
    (_, section) = sweeps_sections(sweep, differences(sweep), side_by_side(sweep))
    assert len(section.rows) == 6 and not section.after


def test_other_problems_make_no_pairs(runs: Path) -> None:
    table = side_by_side(load_sweep("a,c", runs))
    assert (table["pairs"] == 0).all() and table["difference"].isna().all()
    assert table.loc[table["quantity"] == "accuracy", "mean"].notna().all()


def test_where_chooses_runs(runs: Path) -> None:
    def identities(where: str) -> set[tuple[int, int]]:
        found = load_sweep("a", runs, where=where)
        assert set(found.configs) == set(found.runs["run"]) == set(found.statuses) == set(found.groups["run"])
        return set(zip(found.runs["R"], found.runs["seed"], strict=True))

    assert identities("R=4,seed=0,2") == {(4, 0), (4, 2)}
    assert identities("lr=0.001,R=2,4.0,seed=1") == {(2, 1), (4, 1)}
    assert identities("model=tiny,estimator=grpo,reward=strict,trainer.lr=1e-3,seed=0") == {(2, 0), (4, 0)}
    with pytest.warns(UserWarning, match="No run of sweep a fits"):
        sweep = load_sweep("a,b", runs, where="estimator=rloo,R=2")
    assert set(sweep.runs["sweep"]) == {"b"} and sweep.words == "sweep=a,b where=estimator=rloo,R=2"
    assert sweep.folder_name == "a+b_where_estimator=rloo,R=2" and not [m for m in missing(sweep) if "No run for" in m]


def test_a_named_sweep_of_which_no_run_fits_is_named(runs: Path) -> None:
    with pytest.warns(UserWarning, match="No run of sweep b fits where=estimator=grpo,R=4.") as said:
        sweep = load_sweep("a,b", runs, where="estimator=grpo,R=4")
    assert len(said) == 1 and set(sweep.runs["sweep"]) == {"a"}
    assert "No run of sweep b fits where=estimator=grpo,R=4." in missing(sweep)


def test_the_report_says_which_sweep_a_condition_emptied(
    runs: Path, undrawn, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [f"runs_dir={runs}", f"out={tmp_path / 'out'}"]
    assert report(["sweep=a,b", "where=estimator=grpo,R=4", *words]) == 0
    assert capsys.readouterr().err.splitlines().count("No run of sweep b fits where=estimator=grpo,R=4.") == 1
    assert report(["sweep=a,b", "where=estimator=rlo", *words]) == 2
    said = capsys.readouterr().err
    assert said == (
        "error: where=estimator=rlo: no run has estimator=rlo; there are estimator=grpo,rloo; did you mean rloo?\n"
    )


def test_the_words_of_an_arm_choose_its_runs(write, tmp_path: Path) -> None:
    for ratio in ("none", "token"):
        for lr in (1e-3, 1e-5):
            config = {"objective.ratio": ratio, "objective.inner_updates": 2, "trainer.lr": lr}
            write(tmp_path, "s", 2, 0, steps=1, config=config)
    for arm in load_sweep("s", tmp_path).arm_names:
        assert "objective=" in arm and "lr=" in arm
        found = load_sweep("s", tmp_path, where=arm)
        assert len(found.runs) == 1, arm
    with pytest.raises(ReportError, match=r"no run has objective=ppo; there are objective=ppo_clip,reinforce"):
        load_sweep("s", tmp_path, where="objective=ppo")


@pytest.mark.parametrize(
    ("where", "sentence"),
    [
        ("estimator=GRPO", "there are estimator=grpo; did you mean grpo?"),
        ("R=3", "where=R=3: no run has R=3; there are R=2,4"),
        ("R=2,seed=7", "no run has seed=7; there are among those that fit the rest seed=0,1,2"),
        ("lrr=1", "where=lrr=1: no run has a key lrr; did you mean trainer.lr?"),
        ("name=tiny", "name is several keys; give one of model.name, task.name"),
        ("zzz=1", "no run has a key zzz; a key of config.yaml is needed"),
        ("R", "where=R: KEY=VALUE is needed, or several with commas"),
        ("R=", "KEY=VALUE is needed"),
    ],
)
def test_a_bad_condition_is_one_sentence(runs: Path, where: str, sentence: str) -> None:
    with pytest.raises(ReportError) as error:
        load_sweep("a", runs, where=where)
    assert sentence in str(error.value) and "\n" not in str(error.value)


@pytest.fixture
def rates(write, tmp_path: Path) -> Sweep:
    for lr in (1e-4, 1e-5, 0.01, 2e-5):
        write(tmp_path, "rates", 2, 0, steps=2, config={"trainer.lr": lr}, status={"started": 1.7e9, "ended": None})
    return load_sweep("rates", tmp_path)


def test_arms_are_ordered_by_their_numbers(rates: Sweep) -> None:
    labels = ["lr=1e-05", "lr=2e-05", "lr=0.0001", "lr=0.01"]
    assert rates.arm_names == list(rates.runs["arm"]) == list(dict.fromkeys(rates.groups["arm"])) == labels
    assert list(table1(rates)["arm"]) == labels
    assert [claim.arm for claim in judge_claims(rates) if claim.id == "C8"] == labels


def test_columns_for_model_estimator_and_rate_and_times(rates: Sweep) -> None:
    assert list(rates.runs["lr"]) == [1e-5, 2e-5, 1e-4, 1e-2]
    assert rates.groups.groupby("lr").size().tolist() == [8] * 4
    assert set(rates.groups["model"]) == {"tiny"} and set(rates.groups["estimator"]) == set(rates.runs["estimator"])
    assert (rates.runs["started"] == pd.Timestamp(1.7e9, unit="s", tz="UTC")).all() and rates.runs["ended"].isna().all()


def test_a_sweep_is_shown_in_a_few_lines(rates: Sweep) -> None:
    text = repr(rates)
    assert text == str(rates) and len(text.splitlines()) == 4 and len(text) < 600
    for part in ("Sweep rates: 4 runs (4 finished); R = 2; 1 seed\n", "model=tiny", "lr=1e-05; lr=2e-05", "groups 32"):
        assert part in text
    assert "lr=" not in text.splitlines()[1], "what varies is not in the heading"
    page = rates._repr_html_()
    assert page.count("<tr") == 5 and "lr=1e-05" in page
    assert "2023-11-14 22:13<" in page and "<td>1e-05</td>" in page and "<th>lr</th>" in page
    assert "<th>model</th>" not in page and "overflow-x" in page, "the heading says what all runs share"
    rates.runs.loc[0, "name"] = "<script>"
    assert "<script>" not in rates._repr_html_()


def test_one_run_is_no_plural(write, tmp_path: Path) -> None:
    write(tmp_path, "one", 2, 0, steps=2)
    sweep = load_sweep("one", tmp_path)
    assert repr(sweep).splitlines()[0] == "Sweep one: 1 run (1 finished); R = 2; 1 seed" and "arm" not in repr(sweep)
    assert "<th>arm</th>" not in sweep._repr_html_()


def test_pictures_are_of_the_runs_that_were_chosen(runs: Path, undrawn, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    monkeypatch.setattr("grpo_sweeps.report.figures.kept.rendered", lambda plots: made.append("drawn") or {"x": b"1"})
    for where, times in (("R=2", 1), ("R=2", 1), ("R=4", 2)):
        drawn(load_sweep("a", runs, where=where), [])
        assert len(made) == times


def test_numbers_stay_numbers_in_the_table(runs: Path) -> None:
    text = csv(side_by_side(load_sweep("a,b", runs)))
    assert np.isfinite(float(text.splitlines()[1].split(",")[5]))
