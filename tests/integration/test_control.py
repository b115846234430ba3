"""The supervised control on the embedded model: its rows, their Grams against separate backwards, and the command."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from grpo_sweeps import spectra
from grpo_sweeps.control import measure
from grpo_sweeps.control.__main__ import main
from grpo_sweeps.control.measure import KINDS, QUANTITIES, gram_of
from grpo_sweeps.loop.scoring import row_sums
from grpo_sweeps.loop.setup import Setup, prepare
from tests.composing import run_config

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("one_thread")]
WORDS = ["tracking=local", "trainer.device=cpu", "rollout.max_new_tokens=12"]


def setup_of(R: int) -> Setup:
    return prepare(measure._plain(run_config(f"R={R}", *WORDS)))


def separately(setup: Setup, rollouts: list) -> np.ndarray:
    """(R, R): the products of the rows' gradients, each from a backward of its own."""
    parameters = [p for p in setup.policy.model.parameters() if p.requires_grad]
    rows = []
    for one in rollouts:
        gradients = torch.autograd.grad(row_sums(setup, [one]).sum(), parameters)
        rows.append(torch.cat([g.flatten().double() for g in gradients]))
    return (torch.stack(rows) @ torch.stack(rows).T).numpy()


@pytest.mark.parametrize("R", [3, measure.ROWS_AT_ONCE + 2])  # whole, and in parts
def test_the_grams_are_those_of_separate_backwards(R: int) -> None:
    setup = setup_of(R)
    problems = measure._problems(setup, 1)
    assert len({problem.id for problem in problems}) == R
    rows = measure._rows(setup, problems)
    assert len({one.prompt_ids for one in rows["one prompt"]}) == 1
    assert [one.prompt_ids for one in rows["one each"]] == [one.prompt_ids for one in rows["solutions"]]
    assert len({one.prompt_ids for one in rows["solutions"]}) == R
    for kind in KINDS:
        wanted = separately(setup, rows[kind])
        np.testing.assert_allclose(gram_of(setup, rows[kind]), wanted, rtol=1e-4, atol=1e-4 * wanted.max())
        assert all(p.grad is None for p in setup.policy.model.parameters())


def test_a_solution_is_the_text_of_the_problem_and_ends() -> None:
    setup = setup_of(2)
    problems = measure._problems(setup, 2)
    tokenizer = setup.policy.tokenizer
    for problem, row in zip(problems, measure._rows(setup, problems)["solutions"], strict=True):
        assert tokenizer.decode(row.completion_ids[:-1]) == f" {problem.solution}"
        ends = [token in setup.policy.eos_ids for token in row.completion_ids]
        assert ends == [False] * (len(ends) - 1) + [True]


def test_the_first_prompts_are_those_of_a_run() -> None:
    setup = setup_of(2)
    assert measure._problems(setup, 3)[:4] == replace(
        setup, config=replace(setup.config, trainer=replace(setup.config.trainer, prompts=4))
    ).problems(0)


def test_the_values_of_rows_that_are_known() -> None:
    from grpo_sweeps.engine.rollouts import Rollout

    def row(*tokens: int) -> Rollout:
        return Rollout((1,), tokens, "", np.zeros(len(tokens)), False)

    K = np.array([[4.0, 4.0, 0.0], [4.0, 4.0, 0.0], [0.0, 0.0, 1.0]])
    found = measure._values(K, [row(5), row(5), row(6, 7)])
    singular = [8**0.5, 1.0, 0.0]
    assert (
        found["effective_rank"]
        == pytest.approx(spectra.effective_rank(singular))
        == pytest.approx(found["null_effective_rank"])
    )
    assert found["top1_fraction"] == pytest.approx(8 / 9) == pytest.approx(found["null_top1_fraction"])
    assert (found["beyond_null"], found["mean_cosine"]) == (pytest.approx(0), 0)
    assert (found["norm_ratio"], found["different_texts"], found["mean_length"]) == (2, 2, pytest.approx(4 / 3))


def test_the_command_writes_tables_that_agree(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert main(["R=2", "groups=3", f"out={out}", f"runs_dir={tmp_path / 'runs'}", *WORDS]) == 0
    said = capsys.readouterr().out
    assert "effective rank, solutions: " in said and "index.html" in said
    groups, table = pd.read_csv(out / "groups.csv"), pd.read_csv(out / "control.csv")
    assert len(groups) == 9 and set(groups["kind"]) == set(KINDS) and set(table["quantity"]) == set(QUANTITIES)
    found = table.set_index(["kind", "quantity"])
    for kind in KINDS:
        own = groups[groups["kind"] == kind]
        for name in QUANTITIES:
            assert found.loc[(kind, name), "mean"] == pytest.approx(own[name].mean(), rel=1e-6, abs=1e-8)
    paired = found.loc[("solutions - one each", "effective_rank")]
    assert paired["mean"] == pytest.approx(
        found.loc[("solutions", "effective_rank"), "mean"] - found.loc[("one each", "effective_rank"), "mean"], abs=1e-7
    )
    assert paired["low"] < paired["mean"] < paired["high"] and paired["groups"] == 3
    record = json.loads((out / "manifest.json").read_text())
    assert str(tmp_path) not in json.dumps(record) and record["model"]["name"] == "tiny"
    assert set(record["files"]) == {path.name for path in out.iterdir()} and not (tmp_path / "runs").exists()
    page = (out / "index.html").read_text()
    assert "effective rank less its null" in page and "Weights:" not in page


def test_the_same_command_gives_the_same_bytes(tmp_path: Path) -> None:
    for name in ("one", "two"):
        assert main(["R=2", "groups=2", f"out={tmp_path / name}", *WORDS]) == 0
    for file in ("control.csv", "groups.csv", "control.md"):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["groups=1"], "groups=1"),
        (
            ["task=custom", "task._target_=tests.integration.test_control.without_solutions", "trainer.eval_every=0"],
            "has no worked solution",
        ),
        (["task.n_train=5", "trainer.prompts=2"], "8 different problems are needed at R=4"),
        (["-m", "R=2,4"], "-m is of no use here"),
        (["dry_run=true"], "dry_run=true is of no use here"),
        (["R=x"], "R"),
    ],
)
def test_what_it_cannot_do_is_one_sentence(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = [] if any(word.startswith("groups=") for word in words) else ["groups=2"]
    R = [] if any(word.startswith("R=") for word in words) else ["R=4"]
    assert main([*words, *own, *R, f"out={tmp_path / 'out'}", *WORDS]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert said in line and not (tmp_path / "out").exists()


def test_it_writes_over_nothing_but_an_earlier_control(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "index.html").write_text("a report")
    assert main(["R=2", "groups=2", f"out={tmp_path}", *WORDS]) == 2
    assert "exists and is not an empty folder" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["index.html"]
    for _ in range(2):
        assert main(["R=2", "groups=2", f"out={tmp_path / 'own'}", *WORDS]) == 0


def without_solutions():
    """A task of answers alone."""
    from grpo_sweeps.types import Problem, TaskData

    problems = [Problem(str(i), f"What is {i} plus 1?", str(i + 1)) for i in range(60)]
    return TaskData(problems[:30], problems[30:])
