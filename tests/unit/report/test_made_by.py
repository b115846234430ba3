"""The report on a sweep of several versions, of other code than today's, and with a copied run in it."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from grpo_sweeps.report.read.query import ReportError, load_sweep
from grpo_sweeps.report.remarks import check_commits, codes, missing
from grpo_sweeps.status import collect
from grpo_sweeps.tracking import digests, mlflow_copy, provenance
from grpo_sweeps.tracking.made_by import MadeBy, changes, from_json
from grpo_sweeps.tracking.provenance import Source

REWARD = "reward._target_=my_reward.reward"
ONE = MadeBy("a" * 16, "b" * 16, {REWARD: {"my_reward": "1"}}, {"train": "4 problems, 1"}, {"config.json": "1"})


@pytest.fixture
def pair(write: Any, tmp_path: Path) -> tuple[Path, Path]:
    """Two runs of one sweep that the same things made."""
    runs = [write(tmp_path, "s", 2, seed, steps=2) for seed in (0, 1)]
    for run in runs:
        provenance.write(run, Source(made_by=ONE))
    return runs[0], runs[1]


def test_a_copied_run_is_left_out_by_name_everywhere(pair: tuple[Path, Path], capsys: Any) -> None:
    """Fault 2: every group of it was counted twice."""
    before = load_sweep("s", pair[0].parents[1])
    shutil.copytree(pair[0], pair[0].with_name("copy of it"))
    sweep = load_sweep("s", pair[0].parents[1])
    assert len(sweep.groups) == len(before.groups) and list(sweep.runs["run"]) == list(before.runs["run"])
    (said,) = [sentence for sentence in missing(sweep) if "copy of it" in sentence]
    assert f"holds the record of run {pair[0].name}, which is in {pair[0].name} too" in said
    rows = {row.identity: row for row in collect(pair[0].parents[1], "s")}
    assert rows["copy of it"].state == "copy" and rows["copy of it"].damage in said
    runs, problems = mlflow_copy.read_statuses(pair[0].parent)
    assert [folder for folder, _ in runs] == sorted(pair) and problems == [rows["copy of it"].damage]


@pytest.mark.parametrize(
    ("changed", "named", "part"),
    [
        (replace(ONE, functions={REWARD: {"my_reward": "2"}}), REWARD, "my_reward"),
        (replace(ONE, data={**ONE.data, "train": "4 problems, 2"}), "task=", "train"),
        (replace(ONE, weights={**ONE.weights, "config.json": "2"}), "model.path=embedded", "config.json"),
    ],
)
def test_several_versions_of_one_name_are_refused_unless_allowed(
    pair: tuple[Path, Path], changed: MadeBy, named: str, part: str
) -> None:
    provenance.write(pair[1], Source(made_by=changed))
    sweep = load_sweep("s", pair[0].parents[1])
    with pytest.raises(ReportError) as caught:
        check_commits(sweep, None)
    assert f"{named}" in str(caught.value) and "2 versions of it made these runs" in str(caught.value)
    assert f"), which differ in {part};" in str(caught.value)
    assert pair[0].name in str(caught.value) and pair[1].name in str(caught.value)
    check_commits(sweep, "allow")
    assert any("2 versions of it" in sentence for sentence in missing(sweep))
    (said,) = provenance.mixed_in(sweep.path)
    assert named in said


def test_versions_of_different_tasks_and_models_are_not_compared(write: Any, tmp_path: Path) -> None:
    for path, number in (("one", "1"), ("other", "2")):
        run = write(tmp_path, "s", 2, 0, steps=2, config={"model.path": path, "task.path": path})
        parts = {"data": {"train": f"{number} problems, {number}"}, "weights": {"config.json": number}}
        provenance.write(run, Source(made_by=replace(ONE, **parts)))
    check_commits(load_sweep("s", tmp_path), None)
    assert provenance.mixed_in(tmp_path / "s") == []


def test_commits_of_the_same_code_are_one_and_other_code_of_one_commit_is_another(write: Any, tmp_path: Path) -> None:
    runs = [write(tmp_path, "s", 2, seed, steps=2, status={"commit": letter * 40}) for seed, letter in enumerate("ef")]
    for run in runs:
        provenance.write(run, Source(made_by=ONE))
    assert codes(load_sweep("s", tmp_path)) == {f"{'e' * 12} = {'f' * 12}": 2}
    for seed in (2, 3):
        run = write(tmp_path, "t", 2, seed, steps=2, status={"commit": None, "dirty": None})
        provenance.write(run, Source(made_by=replace(ONE, package=str(seed) * 16)))
    found = codes(load_sweep("t", tmp_path))
    assert found == {"no recorded commit, code 2222222": 1, "no recorded commit, code 3333333": 1}
    with pytest.raises(ReportError, match="different commits"):
        check_commits(load_sweep("t", tmp_path), None)


def test_other_code_than_todays_and_runs_that_do_not_say_it_are_named(pair: tuple[Path, Path]) -> None:
    said = missing(load_sweep("s", pair[0].parents[1]))
    today = digests.of_package().syntax[:7]
    assert any(
        "Other code of the package than today's made 2 of 2 runs" in sentence
        and "commit 0123456, code aaaaaaa; now commit" in sentence and today in sentence
        for sentence in said
    )  # fmt: skip
    provenance.write(pair[1], Source(made_by=ONE.going_on(MadeBy(), 1)))
    assert any(
        f"made 1 of 2 runs ({pair[1].name}), or began" in one for one in missing(load_sweep("s", pair[0].parents[1]))
    )
    (pair[1] / "source.json").unlink()
    assert any(f"made 1 of 2 runs ({pair[1].name})" in one for one in missing(load_sweep("s", pair[0].parents[1])))


def test_what_is_not_known_is_not_compared() -> None:
    assert changes(ONE, MadeBy()) == changes(MadeBy(), ONE) == []
    assert from_json(None) == from_json([]) == from_json({"package": 3, "data": []}) == MadeBy()
    now = replace(ONE, functions={REWARD: {name: "2" for name in "abcd"}}, weights={"config.json": "2", "x": "1"})
    assert changes(ONE, now) == [
        f"{REWARD}: my_reward, a, b and 2 more have changed", "model.path: config.json, x have changed",
    ]  # fmt: skip
    assert MadeBy().or_else(ONE).data == ONE.data and ONE.or_else(MadeBy()) == ONE


def test_functions_of_which_the_same_modules_have_changed_are_told_in_one_part() -> None:
    verdicts = [f"{key}.verdict=my.right" for key in ("task", "reward", "reward.functions.a")]
    other, both = "estimator._target_=my.mean", {"my": "1", "words": "1"}
    before = MadeBy("a", functions={key: both for key in (*verdicts, other)} | {REWARD: {"my_reward": "1"}})
    now = {key: {"my": "2", "words": "1"} for key in verdicts} | {other: {"my": "2", "words": "2"}}
    assert changes(before, replace(before, functions={**now, REWARD: {"my_reward": "2"}})) == [
        "task.verdict=my.right, reward.verdict=my.right and reward.functions.a.verdict=my.right: my has changed",
        f"{other}: my, words have changed", f"{REWARD}: my_reward has changed",
    ]  # fmt: skip
    swapped = {REWARD: {"words": "2", "my": "2"}, other: {"my": "2", "words": "2"}}
    before = MadeBy("a", functions={REWARD: both, other: dict(reversed(both.items()))})
    assert changes(before, replace(before, functions=swapped)) == [f"{REWARD} and {other}: my, words have changed"]
