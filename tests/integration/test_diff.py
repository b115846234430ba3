"""What differs between two runs, in plain lines."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from grpo_sweeps.diff import main
from grpo_sweeps.tracking import provenance
from grpo_sweeps.tracking.made_by import MadeBy
from tests.unit.report.conftest import write_run


def run_of(root: Path, R: int, digits: str, made_by: MadeBy, **versions: str) -> Path:
    folder = write_run(root, "one", R, 0, steps=1).rename(root / "one" / digits)
    status = folder / "status.json"
    status.write_text(status.read_text().replace(f"run{R}-0---", digits))
    provenance.write(folder, provenance.Source(commit="0" * 40, versions={"torch": "2.1", **versions}, made_by=made_by))
    return folder


MADE = MadeBy("c" * 16, "b", {"reward._target_=my.reward": {"my": "1"}}, {"train": "8 problems, x"}, {"model": "w"})


def test_what_differs_is_listed_and_what_does_not_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = MadeBy("d" * 16, "b", {"reward._target_=my.reward": {"my": "2"}}, {"train": "8 problems, x"}, {})
    run_of(tmp_path, 2, "aaaa", MADE)
    second = run_of(tmp_path, 4, "bbbb", other, torch="2.2")
    config = yaml.safe_load((second / "config.yaml").read_text())
    config["trainer"]["api_key"] = "hunter2hunter2"
    (second / "config.yaml").write_text(yaml.safe_dump(config))
    assert main(["run=aa,bb", f"runs_dir={tmp_path}"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "a: aaaa (R=2 seed=0), sweep one, finished at step 1",
        "b: bbbb (R=4 seed=0), sweep one, finished at step 1",
        "configuration: 3 differences",
        "  R: 2 | 4",
        "  trainer.micro_batch: 8 | 16",
        "  trainer.api_key: (not set) | ***",
        "code of the package differs: ccccccc (commit 0123456) | ddddddd (commit 0123456)",
        "functions of your own: 1 difference",
        "  reward._target_=my.reward: my: 1 | 2",
        "data: the same",
        "weights: not known of b",
        "versions: 1 difference",
        "  torch: 2.1 | 2.2",
    ]


def test_a_run_does_not_differ_from_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run_of(tmp_path, 2, "aaaa", MADE)
    assert main([f"run={folder},aaaa", f"runs_dir={tmp_path}"]) == 0
    lines = capsys.readouterr().out.splitlines()[2:]
    assert len(lines) == 6 and all("the same" in line for line in lines)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["run=aaaa"], "diff: run=aaaa: two runs are needed, run=IDENTITY,IDENTITY"),
        ([], "diff: run=: two runs are needed"),
        (["run=aaaa,cccc"], "diff: run=cccc: no such run in runs_dir="),
        (["runs=a,b"], "diff: 'runs=a,b' is not one of run=, sweep=, runs_dir="),
    ],
)
def test_a_bad_command_is_one_sentence(
    words: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_of(tmp_path, 2, "aaaa", MADE)
    assert main([*words, f"runs_dir={tmp_path}"]) == 2
    text = capsys.readouterr().err
    assert text.startswith("error: ") and len(text.splitlines()) == 1 and sentence in text
