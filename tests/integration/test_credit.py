"""The credit command on a run of the embedded model: what it writes, and what it says to bad input."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from grpo_sweeps.config import to_mapping
from grpo_sweeps.credit.__main__ import CreditOptions, main
from grpo_sweeps.credit.build import load_run
from grpo_sweeps.sweep.execute import execute
from grpo_sweeps.sweep.identity import identity
from grpo_sweeps.tracking.status import read_status
from tests.composing import run_config

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("one_thread")]
FEW = ["prompts=2", "rollouts=2", "continuations=3", "every=6", "device=cpu"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """runs/one/ with a run of two steps at a learning rate that moves the weights."""
    folder = tmp_path_factory.mktemp("credit")
    changes = ["R=2", "sweep=one", f"runs_dir={folder / 'runs'}", "tracking=local", "trainer.device=cpu"]
    changes += [f"trainer.{key}" for key in ("steps=2", "prompts=2", "eval_every=0", "lr=1e-3")]
    config = run_config(*changes)
    run_dir = folder / "runs" / "one" / identity(config)
    assert execute(to_mapping(config), run_dir, name="R=2 seed=0").ok
    return folder / "runs"


def only(runs: Path) -> Path:
    (run_dir,) = (runs / "one").iterdir()
    return run_dir


@pytest.fixture(scope="module")
def report(runs: Path) -> Path:
    out = runs.parent / "report"
    assert main(["sweep=one", f"runs_dir={runs}", f"out={out}", *FEW]) == 0
    return out


def test_the_weights_are_those_of_the_checkpoint(runs: Path) -> None:
    run_dir, notes = only(runs), []
    setup, step = load_run(run_dir, read_status(run_dir), "cpu", notes.append)
    assert (step, notes) == (2, [])
    (path,) = (run_dir / "checkpoints").glob("step_*/state.pt")
    saved = torch.load(path, weights_only=True)["state"]["model"]
    found = dict(setup.policy.model.named_parameters())
    assert saved.keys() == found.keys()
    assert all(torch.equal(found[name], saved[name]) for name in saved)


def test_the_table_adds_up(report: Path) -> None:
    table = pd.read_csv(report / "credit.csv", keep_default_na=False)
    assert len(table.groupby(["prompt", "rollout"])) == 4 and table["prompt"].nunique() == 2
    for _, part in table.groupby(["prompt", "rollout"]):
        assert part["t"].tolist() == list(range(0, 6 * len(part), 6))
        after = [*part["value"][1:], part["reward"].iloc[0]]
        np.testing.assert_allclose(part["advantage"], np.array(after) - part["value"], atol=1e-12)
        assert part["advantage"].sum() == pytest.approx(part["reward"].iloc[0] - part["value"].iloc[0])
        noise = np.array([*part["standard_error"] ** 2, 0.0])
        np.testing.assert_allclose(part["advantage_standard_error"] ** 2, noise[1:] + noise[:-1], atol=1e-12)
    assert ((table["value"] * 3).round(9) % 1 == 0).all(), "means of three rewards of 0 or 1"
    profile = pd.read_csv(report / "profile.csv")
    assert (profile["by"] == "tenth").sum() == 10
    shares = pd.read_csv(report / "shares.csv").set_index("quantity")["mean"]
    squares = table["advantage"] ** 2 - table["advantage_standard_error"] ** 2
    assert shares["total"] * shares["variance"] == pytest.approx(squares.sum() / 4)
    for by in ("tenth", "token"):
        assert profile[profile["by"] == by]["share"].sum() == pytest.approx(shares["total"])


def test_the_manifest_says_where_it_comes_from(runs: Path, report: Path) -> None:
    manifest = json.loads((report / "manifest.json").read_text())
    assert manifest["run"] | {"identity": only(runs).name, "step": 2, "state": "finished"} == manifest["run"]
    assert manifest["options"]["continuations"] == 3 and "prompts=2" in manifest["command"]
    assert sorted(p.name for p in report.iterdir()) == manifest["files"]
    assert len(manifest["problems"]) == 2
    assert manifest["continuations"] == 3 * manifest["prefixes"]


def test_the_page_asks_for_nothing_from_elsewhere(report: Path) -> None:
    page = (report / "index.html").read_text()
    assert not re.search(r"https?://", page.replace("http://www.w3.org", "")) and "<script" not in page
    for name in re.findall(r'href="([^"#]+)"', page):
        assert (report / name).exists(), name
    rows = len(pd.read_csv(report / "credit.csv"))
    assert len(re.findall(r'<span class="c\d( far)?" title="token \d+ ', page)) == rows
    assert (report / "credit.pdf").read_bytes().startswith(b"%PDF") and (report / "credit.png").stat().st_size > 10_000


def test_the_same_command_gives_the_same_numbers(runs: Path, report: Path, tmp_path: Path) -> None:
    assert main([f"runs_dir={runs}", "sweep=one", f"run={only(runs).name[:5]}", f"out={tmp_path}", *FEW]) == 0
    for name in ("credit.csv", "profile.csv", "shares.csv"):
        assert (tmp_path / name).read_bytes() == (report / name).read_bytes()
    assert main([f"runs_dir={runs}", "sweep=one", "problems=held_out", f"out={tmp_path}", *FEW]) == 0
    assert (tmp_path / "credit.csv").read_bytes() != (report / "credit.csv").read_bytes()


def said(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one sentence of a command that is refused."""
    assert main(words) == 2
    text = capsys.readouterr().err
    assert text.startswith("error: ") and text.count("\n") == 1
    return text


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["prompt=3"], "credit: 'prompt=3' is not one of sweep=, run=, problems="),
        (["prompts=many"], "credit: prompts=many: a whole number is needed"),
        (["prompts=1"], "credit: prompts=1: 2 or more is needed"),
        (["rollouts=0"], "credit: rollouts=0: 1 or more is needed"),
        (["continuations=2"], "credit: continuations=2: 3 or more is needed"),
        (["every=0"], "credit: every=0: 1 or more is needed"),
        (["seed=-1"], "credit: seed=-1: 0 or more is needed"),
        (["problems=test"], "credit: problems=test: allowed are train, held_out"),
        ([], "credit: sweep= is needed; choose one of one"),
        (["sweep=two"], "sweep=two: not in"),
        (["sweep=one", "run=xyz"], "credit: run=xyz: no such run in sweep=one; there are"),
        (["sweep=one", "prompts=100000"], "credit: prompts=100000: the task has 8192 train problems"),
        (["sweep=one", "device=tpu"], "credit: device=tpu: allowed are auto, cpu, cuda and cuda:N"),
        (["sweep=one", "runs_dir=nowhere"], "runs_dir=nowhere: no such folder"),
    ],
)
def test_a_bad_command_is_one_sentence(runs: Path, words: list[str], sentence: str, capsys) -> None:
    place = [] if "runs_dir=nowhere" in words else [f"runs_dir={runs}"]
    assert sentence in said([*place, *words], capsys)


def test_a_run_without_a_checkpoint_is_refused(runs: Path, tmp_path: Path, capsys) -> None:
    copy = tmp_path / "runs" / "one" / only(runs).name
    shutil.copytree(only(runs), copy)
    states = list((copy / "checkpoints").glob("step_*/state.pt"))
    states[0].write_bytes(b"cut")
    capsys.readouterr()
    assert main(["sweep=one", f"runs_dir={tmp_path / 'runs'}", *FEW]) == 2
    text = capsys.readouterr().err
    assert "is damaged" in text and "(finished at step 2): no whole checkpoint in" in text.splitlines()[-1]
    shutil.rmtree(copy / "checkpoints")
    assert "(finished at step 2): no whole checkpoint in" in said(
        ["sweep=one", f"runs_dir={tmp_path / 'runs'}"], capsys
    )
    second = copy.with_name("0" * 12)
    shutil.copytree(copy, second)
    text = said(["sweep=one", f"runs_dir={tmp_path / 'runs'}"], capsys)
    assert f"has 2 runs, run= is needed; choose one of {second.name} (R=2 seed=0), {copy.name}" in text
    (second / "checkpoints").mkdir()
    shutil.copytree(next((only(runs) / "checkpoints").glob("step_*")), second / "checkpoints" / "step_0000002")
    (second / "config.yaml").write_text("- no mapping")
    text = said(["sweep=one", "run=000", f"runs_dir={tmp_path / 'runs'}"], capsys)
    assert "config.yaml is no configuration" in text
    assert not list(tmp_path.rglob("index.html"))


def test_help_and_defaults(capsys) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    for name, value in vars(CreditOptions()).items():
        assert f"{name}=" in text and (isinstance(value, str) or f"{name}={value}" in text)
