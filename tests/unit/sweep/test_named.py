"""Runs that the words of a command name: one that is not there is told from several that fit, by every command."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpo_sweeps.diff import main as diff
from grpo_sweeps.export.__main__ import main as export
from grpo_sweeps.paths import sweep_folder
from grpo_sweeps.sweep.named import MOST_NAMED, find_run, named_runs
from grpo_sweeps.sync import main as sync
from grpo_sweeps.tracking.status import RunStatus, write_status
from grpo_sweeps.types import ConfigError
from grpo_sweeps.verify import main as verify


def run_of(root: Path, sweep: str, identity: str, name: str) -> Path:
    folder = root / sweep / identity
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("R: 2\nseed: 0\n")
    write_status(folder, RunStatus("finished", identity, name, sweep))
    return folder


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    for sweep, identity, name in (
        ("a", "bed975755d55", "R=2 seed=0"),
        ("a", "bedbab2846de", "R=4 seed=0"),
        ("a", "0f057c8385bd", "R=8 seed=0"),
        ("b", "0f057c8385bd", "R=8 seed=0"),
    ):
        run_of(tmp_path, sweep, identity, name)
    return tmp_path


def said(runs: Path, sweep: str, run: str) -> str:
    with pytest.raises(ConfigError) as error:
        find_run("export", runs, sweep, run)
    return str(error.value).replace(str(runs), "RUNS")


def test_a_run_is_found_by_the_first_digits_of_its_identity(runs: Path) -> None:
    for run in ("bedb", "bedbab2846de", str(runs / "a" / "bedbab2846de")):
        folder, status = find_run("export", runs, "", run)
        assert folder == runs / "a" / "bedbab2846de" and status.name == "R=4 seed=0"
    assert find_run("export", runs, "b", "")[0].name == "0f057c8385bd", "the only one needs no words"


def test_a_whole_identity_is_meant_where_another_begins_with_it(runs: Path) -> None:
    run_of(runs, "a", "bed", "short")
    assert find_run("export", runs, "", "bed")[0].name == "bed"


def test_several_that_fit_are_listed_by_sweep_and_name(runs: Path) -> None:
    assert said(runs, "a", "bed") == (
        "export: run=bed: 2 runs begin with it, and more of the identity is needed; choose one of "
        "bed975755d55 (R=2 seed=0), bedbab2846de (R=4 seed=0)"
    )
    assert said(runs, "", "0f") == (
        "export: run=0f: several sweeps have it; add sweep=NAME to choose of "
        "0f057c8385bd (a: R=8 seed=0), 0f057c8385bd (b: R=8 seed=0)"
    )


def test_one_that_is_not_there_is_answered_with_those_that_are(runs: Path) -> None:
    there = "there are 0f057c8385bd (R=8 seed=0), bed975755d55 (R=2 seed=0), bedbab2846de (R=4 seed=0)"
    assert said(runs, "a", "zz") == f"export: run=zz: no such run in sweep=a; {there}"
    assert said(runs, "a", "bed975755e55").endswith("(R=4 seed=0); did you mean bed975755d55?")
    assert said(runs, "a", "bed97e75").endswith("did you mean bed975755d55?"), "of digits that are not all"
    assert said(runs, "a", "R=4 seed=0").endswith("did you mean bedbab2846de?"), "a name is no identity"
    assert "(a: R=2 seed=0)" in said(runs, "", "zz") and "no such run in runs_dir=RUNS" in said(runs, "", "zz")
    assert said(runs, "a", "").startswith("export: sweep=a has 3 runs, run= is needed; choose one of 0f057c8385bd")


def test_a_long_list_is_cut(tmp_path: Path) -> None:
    for number in range(MOST_NAMED + 3):
        run_of(tmp_path, "many", f"aa{number:010x}", f"R=2 seed={number}")
    for run in ("zz", "aa"):
        sentence = said(tmp_path, "many", run)
        assert sentence.endswith(" and 3 more") and sentence.count("seed=") == MOST_NAMED


def test_a_run_that_two_sweeps_have_is_one_run(runs: Path) -> None:
    every = sorted(runs.glob("*/*"))
    assert [path.parent.name for path in named_runs("verify", every, "0f", "x")] == ["a", "b"]


@pytest.mark.parametrize(
    ("main", "name", "words"),
    [(verify, "verify", []), (sync, "sync", []), (export, "export", ["out=x"]), (diff, "diff", [])],
)
def test_every_command_says_which_of_both(
    main, name: str, words: list[str], runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for run, sentence in (("zz", "no such run in sweep=a; there are"), ("bed", "2 runs begin with it")):
        given = f"{run},{run}" if main is diff else run
        assert main([f"run={given}", "sweep=a", f"runs_dir={runs}", *words]) == 2
        text = capsys.readouterr().err
        assert text.startswith(f"error: {name}: run={run}: {sentence}") and text.count("\n") == 1


def test_verify_takes_the_first_digits(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (runs / "a" / "bed975755d55" / "status.json").write_text("{")
    assert verify([f"runs_dir={runs}", "run=bedb", "copies=false"]) == 0
    assert capsys.readouterr().out == "1 run of 1 sweep: whole\n"
    assert verify([f"runs_dir={runs}", "run=bed9", "copies=false"]) == 1, "a run whose status cannot be read is one"


def test_a_sweep_that_is_not_there_is_answered_with_the_one_that_was_meant(runs: Path) -> None:
    (runs / "default").mkdir()
    with pytest.raises(ConfigError, match=r"sweep=defualt: not in .*; choose one of a, b, default; did you mean def"):
        sweep_folder(runs, "defualt")
