"""A reward in a process of its own: what it gives, how it is ended, and that nothing of it is left."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from grpo_sweeps.config import FunctionConfig, to_mapping
from grpo_sweeps.config.rewards import RewardPart
from grpo_sweeps.loop import judging
from grpo_sweeps.loop.judging import Judge
from grpo_sweeps.loop.reward_process import RewardProcess, RewardStopped
from grpo_sweeps.loop.train import train
from grpo_sweeps.sweep.execute import execute
from grpo_sweeps.tracking.status import process_lives
from grpo_sweeps.types import Problem

pytestmark = pytest.mark.integration
ROOT = Path(__file__).resolve().parents[3]
PROBLEM = Problem("p1", "1?", "1")
MODULE = """
import os, random, re, signal, sys, time
PIDS = {pids!r}

def note():
    with open(PIDS, "a") as file:
        file.write(f"{{os.getpid()}}\\n")

def plain(completion, problem, seed, scale=1.0):
    print("a word on the standard output")
    return scale * len(completion) + seed + float(problem.answer)

def draws(completion, problem, seed):
    return random.random()

def even_length(completion, problem, seed):
    note()
    return float(len(completion) % 2 == 0)

def hangs(completion, problem, seed):
    note()
    if os.fork() == 0:
        note()
        time.sleep(300)
    re.match("(a+)+$", "a" * 60 + "b")  # in C, with the lock of the interpreter: no thread and no signal gets through

def stops_the_process(completion, problem, seed):
    if completion == "exits":
        os._exit(3)
    if completion == "crashes":
        os.kill(os.getpid(), signal.SIGSEGV)
    if completion == "leaves":
        sys.exit(4)
    if completion == "fails":
        raise KeyError("no such key")
    if completion == "odd":
        return lambda: 0
    os.kill(os.getpid(), signal.SIGTERM)  # what a scheduler sends to every process of a job
    os.kill(os.getpid(), signal.SIGUSR2)
    return 1.0
"""


@pytest.fixture
def pids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[int]]:
    """A module of rewards on the path; gives the processes that they have noted."""
    path = tmp_path / "pids"
    (tmp_path / "own_rewards.py").write_text(MODULE.format(pids=str(path)))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "own_rewards", raising=False)
    return lambda: [int(line) for line in path.read_text().split()] if path.exists() else []


@pytest.fixture
def reward(pids: Any) -> Iterator[Callable[..., RewardProcess]]:
    made: list[RewardProcess] = []

    def make(name: str, timeout_s: float = 60.0, **kwargs: Any) -> RewardProcess:
        made.append(RewardProcess(RewardPart(FunctionConfig(f"own_rewards.{name}", kwargs)), timeout_s))
        return made[-1]

    yield make
    for one in made:
        one.close()


def until_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + 20
    while any(process_lives(pid) for pid in pids):
        assert time.monotonic() < deadline, [pid for pid in pids if process_lives(pid)]
        time.sleep(0.02)


def test_it_gives_what_the_function_gives(reward: Any) -> None:
    called = reward("plain", scale=2.0)
    assert [called("ab", PROBLEM, 10), called("", PROBLEM, 20)] == [15.0, 21.0]
    drawn = reward("draws")
    first, second = drawn("", PROBLEM, 1), drawn("", PROBLEM, 2)
    assert first != second and drawn("", PROBLEM, 1) == first, "the same wherever a run was resumed"


def test_errors_are_the_functions_own(reward: Any) -> None:
    called = reward("stops_the_process")
    with pytest.raises(KeyError, match="no such key") as caught:
        called("fails", PROBLEM, 0)
    assert "in stops_the_process" in str(caught.value.__cause__)
    with pytest.raises(SystemExit):
        called("leaves", PROBLEM, 0)
    with pytest.raises(TypeError, match="cannot be taken out of the reward's process; a number is needed"):
        called("odd", PROBLEM, 0)
    assert called("signals", PROBLEM, 0) == 1.0


@pytest.mark.parametrize(("completion", "how"), [("exits", "exit code 3"), ("crashes", "by SIGSEGV")])
def test_a_process_that_ends_is_said_to_have(reward: Any, completion: str, how: str) -> None:
    called = reward("stops_the_process")
    with pytest.raises(RewardStopped, match=rf"^ended its process \({how}\)$"):
        called(completion, PROBLEM, 0)
    assert called("again", PROBLEM, 0) == 1.0


def test_a_call_that_takes_too_long_is_ended_with_its_helpers(reward: Any, pids: Any) -> None:
    called = reward("hangs", 0.5)
    with pytest.raises(RewardStopped, match=r"^did not return within 0.5 s$"):
        called("x", PROBLEM, 0)
    assert len(pids()) == 2
    until_gone(pids())


RUN = """
import sys
sys.path.insert(0, sys.argv[1])
from grpo_sweeps.config import FunctionConfig
from grpo_sweeps.config.rewards import RewardPart
from grpo_sweeps.loop.reward_process import RewardProcess
from grpo_sweeps.types import Problem
RewardProcess(RewardPart(FunctionConfig("own_rewards.hangs")), 600.0)("x", Problem("p", "1", "1"), 0)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_nothing_is_left_of_a_run_that_is_killed(pids: Any, tmp_path: Path, number: int) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", RUN, str(tmp_path)], env={**os.environ, "PYTHONPATH": str(ROOT)},
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while len(pids()) < 2:
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.02)
    process.send_signal(number)
    process.wait(20)
    until_gone(pids())


def test_a_run_gives_the_same_records_with_a_limit(make_config: Any, pids: Any, tmp_path: Path) -> None:
    config = make_config(reward="even_length", trainer={"steps": 2, "eval_every": 0})
    config = dataclasses.replace(config, reward=FunctionConfig("own_rewards.even_length"))
    rewards = []
    for timeout in (None, 30.0):
        run_dir = tmp_path / f"run {timeout}"
        run_dir.mkdir()
        train(dataclasses.replace(config, reward_timeout=timeout), run_dir)
        lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
        rewards.append([(line["reward"], line["grad_norm"]) for line in lines])
    assert rewards[0] == rewards[1]
    here, other = set(pids()) & {os.getpid()}, set(pids()) - {os.getpid()}
    assert here and len(other) == 1, "one process serves the whole run"
    until_gone(list(other))


def test_a_run_whose_reward_hangs_fails_with_one_sentence(make_config: Any, pids: Any, tmp_path: Path) -> None:
    config = make_config(trainer={"steps": 2, "eval_every": 0})
    config = dataclasses.replace(config, reward=FunctionConfig("own_rewards.hangs"), reward_timeout=0.5)
    result = execute(to_mapping(config), tmp_path / "run", name="mine")
    assert result.state == "failed" and result.error is not None
    assert result.error.startswith(
        "RewardStopped: reward own_rewards.hangs did not return within 0.5 s on rollout 0 of problem p"
    )
    assert result.error.endswith(" in step 0")
    until_gone(pids())


MATH = """
import time
def parse(text, **_):
    while "forever" in text:
        time.sleep(1)
    return [text.strip("$")]
def verify(gold, found, **_):
    return gold == found
"""


def test_a_verdict_that_takes_too_long_is_not_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "math_verify.py").write_text(MATH)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(judging, "MATH_S", 0.5)
    judge = Judge("math")
    problem = Problem("p", "?", "1/2")
    try:
        judge(r"\boxed{1/2}", problem)  # starts the process
        texts = [r"\boxed{1/2}", r"\boxed{forever}", r"\boxed{forever}", r"\boxed{1/3}"]
        assert [v.strict for v in judge.all(texts, [problem] * 4)] == [True, False, False, False]
        assert judge.metrics() == {"verdict/stopped": 1.0}, "and the same text is not asked for again"
    finally:
        judge.close()
    assert Judge("exact").metrics() == {}
