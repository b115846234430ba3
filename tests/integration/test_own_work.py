"""A user's own work, end to end on the embedded model from files: the commands of docs/own_work.md, and four tasks."""

from __future__ import annotations

import json
import re
import shlex
import sys
from importlib.util import find_spec
from pathlib import Path

import pandas as pd
import pytest

from grpo_sweeps.report.__main__ import main as report
from grpo_sweeps.run import main
from grpo_sweeps.tasks import arithmetic
from grpo_sweeps.tracking.local import read_evals, read_groups, read_metrics
from grpo_sweeps.tracking.status import read_status

pytestmark = pytest.mark.integration
PAGE = (Path(__file__).parents[2] / "docs" / "own_work.md").read_text(encoding="utf-8")
FILES = re.findall(r"^`([\w./]+)`:\n\n```\w+\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)
COMMANDS = [line for line in PAGE.replace("\\\n", " ").splitlines() if line.startswith("python -m grpo_sweeps.run ")]
SMALL = ("R=4", "trainer.steps=2", "trainer.prompts=2", "trainer.eval_problems=2", "trainer.eval_samples=2",
         "trainer.checkpoint_every=0", "rollout.max_new_tokens=24", "tracking=local")  # fmt: skip


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of the user's own, in which commands are given."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("my_rewards", "my_verdicts", "grader"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


def the_run(here: Path, sweep: str) -> Path:
    (status,) = (here / "runs" / sweep).glob("*/status.json")
    assert read_status(status.parent).state == "finished"
    return status.parent


def last(metrics: pd.DataFrame, name: str) -> float:
    return float(metrics[name].dropna().iloc[-1])


def test_the_page_is_true(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert len(FILES) == 5 and len(COMMANDS) == 4
    for name, content in FILES:
        (here / name).parent.mkdir(parents=True, exist_ok=True)
        (here / name).write_text(content, encoding="utf-8")
    data, verdict, rewards, chat = (shlex.split(command)[3:] for command in COMMANDS)
    assert main([*data, "dry_run=true", "tracking=local"]) == 0 and not (here / "runs").exists()
    assert main([*data, "tracking=local"]) == 0
    first = read_metrics(the_run(here, "cities"))
    assert {"eval/reward", "eval/reward_greedy", "eval/accuracy", "reward/strict"} <= set(first.columns)
    assert {g.prompt_id for g in read_groups(the_run(here, "cities"))} <= {f"cities-{i}" for i in range(1, 5)}
    assert main([*verdict, "tracking=local"]) == 0
    judged = read_metrics(the_run(here, "verdict"))
    assert judged["reward"].dropna().tolist() == judged["reward/strict"].dropna().tolist()
    assert main([*rewards, "tracking=local"]) == 0
    logged = read_metrics(the_run(here, "rewards"))
    parts = {"reward/right", "reward/brevity", "reward/of_europe", "reward/runs", "reward/failed"}
    assert parts <= set(logged.columns)
    assert last(logged, "reward/failed") == 0.0 and 0 < last(logged, "reward/brevity") < 1
    assert main([*chat, "tracking=local", "dry_run=true"]) == 0
    assert "sweep chat: 1 run, 1 to do (dry run" in capfd.readouterr().err


def test_text_is_matched_and_trained_on(here: Path) -> None:
    """The arithmetic problems as text: the embedded model gets some of them right, character for character."""
    problems = arithmetic(n_train=8, n_held_out=8, steps=[1])
    for split, half in (("train", problems.train), ("test", problems.held_out)):
        rows = [json.dumps({"q": p.question, "a": p.answer}) for p in half]
        (here / f"{split}.jsonl").write_text("\ufeff" + "\n".join(rows), encoding="utf-8")
    words = ["task=jsonl", "task.path=.", "task.question=q", "task.answer=a", "sweep=text", *SMALL]
    words[words.index("trainer.eval_problems=2")] = "trainer.eval_problems=8"
    assert main([*words, "task.prompt='Question: {question}\nAnswer:'"]) == 0
    metrics = read_metrics(the_run(here, "text"))
    assert last(metrics, "eval/accuracy") == last(metrics, "eval/reward") > 0
    records = read_evals(the_run(here, "text"))
    assert all(r.reward == r.strict / r.samples and r.greedy_reward == r.greedy_strict for r in records)


def test_fractions_in_boxes(here: Path) -> None:
    rows = [{"problem": f"What is {i}/7?", "solution": f"\\frac{{{i}}}{{7}}", "level": "Level 1"} for i in range(1, 7)]
    (here / "maths.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    verdict = "math" if find_spec("math_verify") else "exact"
    words = ["task=jsonl", "task.path=maths.jsonl", "task.held_out=2", "task.question=problem", "task.answer=solution"]
    boxed = r"task.prompt='{question} Put the answer into \boxed{}.'"
    assert main([*words, boxed, f"task.verdict={verdict}", "sweep=maths", *SMALL]) == 0
    assert last(read_metrics(the_run(here, "maths")), "eval/accuracy") in (0.0, 0.25, 0.5, 0.75, 1.0)


def test_multiple_choice(here: Path) -> None:
    rows = [{"question": f"{i} + 1? A) {i} B) {i + 1}", "answer": "B", "choices": ["A", "B"]} for i in range(6)]
    (here / "choice.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    (here / "my_rewards.py").write_text(
        "def looks(completion, problem, seed):\n"
        "    return sum(choice in completion for choice in problem.columns['choices']) / 2\n"
    )
    functions = ["reward=several", "+reward.functions.right._target_=grpo_sweeps.rewards.verdicts.correct",
                 "+reward.functions.right.verdict=choice", "+reward.functions.looks._target_=my_rewards.looks",
                 "+reward.functions.looks.weight=0.5"]  # fmt: skip
    words = ["task=jsonl", "task.path=choice.jsonl", "task.held_out=2", "task.verdict=choice", "sweep=choice"]
    assert main([*words, *functions, *SMALL]) == 0
    metrics = read_metrics(the_run(here, "choice"))
    expected = metrics["reward/right"] + 0.5 * metrics["reward/looks"]
    assert metrics["reward"].dropna().tolist() == pytest.approx(expected.dropna().tolist())


GRADER = """
import subprocess
import sys
import time
from pathlib import Path


def grade(completion, problem, seed):
    Path("calls.txt").open("a").write(f"{seed % 5 == 0:d}")
    while seed % 5 == 0:
        time.sleep(60)
    done = subprocess.run([sys.executable, "-S", "-E", "-c", completion], capture_output=True, timeout=5)
    return float(done.returncode == 0) + 0.1 * len(problem.columns["tests"])
"""


def test_code_whose_grader_sometimes_hangs(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    rows = [{"question": f"Print {i}.", "tests": [f"{i}"] * i} for i in range(1, 7)]
    (here / "code.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    (here / "grader.py").write_text(GRADER)
    words = ["task=jsonl", "task.path=code.jsonl", "task.held_out=2", "task.answer=null", "task.verdict=none"]
    own = ["reward=custom", "reward._target_=grader.grade", "reward_timeout=1"]
    assert main([*words, *own, "sweep=stops", *SMALL]) == 1, "a hanging reward ends the run, unless it is told else"
    assert "did not return within 1 s" in capfd.readouterr().err
    (here / "calls.txt").unlink()
    assert main([*words, *own, "reward_on_failure=zero", "sweep=code", *SMALL]) == 0
    run_dir = the_run(here, "code")
    metrics, hung = read_metrics(run_dir), (here / "calls.txt").read_text().count("1")
    assert hung > 0 and (metrics["reward/failed"].dropna() < 1).all()
    assert "eval/accuracy" not in metrics and "reward/strict" not in metrics and last(metrics, "eval/reward") > 0
    groups = read_groups(run_dir)
    zeros = sum(reward == 0.0 for group in groups for reward in group.rewards)
    assert metrics["reward/failed"].sum() * 8 == pytest.approx(zeros)
    capfd.readouterr()
    assert report(["sweep=code"]) == 0, "a sweep without verdicts is reported, without an accuracy"
    table = pd.read_csv(here / "reports" / "code" / "table1.csv")
    assert table["accuracy"].isna().all()
