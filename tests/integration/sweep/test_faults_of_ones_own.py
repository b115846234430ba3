"""What a user's own functions give in the middle of a run: nonsense makes that run fail, and no bad command of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from grpo_sweeps.run import main
from grpo_sweeps.tracking.local import read_metrics
from grpo_sweeps.tracking.status import read_status
from grpo_sweeps.types import ConfigError
from tests.integration.sweep.test_ends import loop

pytestmark = pytest.mark.integration
__all__ = ["loop"]

# Each is at fault in the run with seed 0, and then from its second step on.
OWN = """
from dataclasses import replace

import numpy as np

from grpo_sweeps.engine.samplers.eager import EagerSampler
from grpo_sweeps.estimators.group import grpo
from grpo_sweeps.tasks import arithmetic

CALLS = {}


def late(name):
    CALLS[name] = CALLS.get(name, 0) + 1
    return CALLS[name] == 2


def ending(completion):
    return float(len(completion) % 2)


def reward(completions, problems, seeds):
    return [float("nan") if late("reward") else ending(text) for text in completions]


def lacking(completions, problems, seeds):
    return [ending(text) for text in completions[late("lacking"):]]


def never(completion, problem, seed):
    return None


def text(completion, problem, seed):
    return "right" if late("text") else ending(completion)


def estimator(rewards_GR):
    return grpo(rewards_GR) * (np.nan if late("estimator") else 1.0)


def shape(rewards_GR):
    return grpo(rewards_GR)[late("shape"):]


def metric(gram_RR, rewards_R, weights_R, lengths_R):
    return "much" if late("metric") else 1.0


def task():
    data = arithmetic(n_train=8, n_held_out=4, steps=[1])
    return replace(data, train=[replace(one, question="") for one in data.train])


class Sampler(EagerSampler):
    name = "own"

    def sample(self, prompt_ids, *args, **kwargs):
        drawn = super().sample(prompt_ids, *args, **kwargs)
        return drawn[late("sampler"):]
"""
SMALL = ("trainer.steps=3", "trainer.prompts=2", "trainer.eval_every=0", "rollout.max_new_tokens=8", "tracking=local",
         "trainer.checkpoint_every=0", "analysis.groups=all")  # fmt: skip
FAULTS = {
    "a reward that is no number": (
        ("reward=custom", "reward._target_=own_faults.reward"), "own_faults.reward gave nan"),
    "a reward that is a text": (("reward=custom", "reward._target_=own_faults.text"), "own_faults.text gave 'right'"),
    "one reward too few": (
        ("reward=custom", "reward._target_=own_faults.lacking"), "own_faults.lacking gave 7 values for 8 completions"),
    "none of several rewards": (
        ("reward=several", "+reward.functions.a._target_=own_faults.never"), "none of a applies to rollout 0"),
    "the task's right answer among several": (
        ("reward=several", "+reward.functions.right._target_=grpo_sweeps.rewards.verdicts.correct",
         "+reward.functions.a._target_=own_faults.reward"), "own_faults.reward gave nan"),
    "a metric": (("reward=random", "analysis.own_metrics=[own_faults.metric]"), "own/metric is 'much'"),
    "an estimator": (("reward=random", "estimator=custom", "estimator._target_=own_faults.estimator"),
                     "estimator own_faults.estimator gave nan"),
    "an estimator's shape": (("reward=random", "estimator=custom", "estimator._target_=own_faults.shape"),
                             "estimator own_faults.shape gave (1, 4)"),
    "a sampler": (("reward=random", "rollout.engine=own_faults.Sampler"), "7 rollouts came back for 8 rows"),
    "a task whose prompt is empty": (("reward=random", "task=custom", "task._target_=own_faults.task",
                                      "task.prompt='{question}'"), "has no token for this tokenizer"),
}  # fmt: skip


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(__import__("sys").modules, "own_faults", raising=False)
    (tmp_path / "own_faults.py").write_text(OWN)
    return tmp_path


@pytest.mark.parametrize("words, said", FAULTS.values(), ids=list(FAULTS))
def test_nonsense_in_the_middle_of_a_run_is_a_failed_run(
    own: Path, words: tuple[str, ...], said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, "R=4", "sweep=faults", *SMALL]) == 1
    (file,) = (own / "runs" / "faults").glob("*/status.json")
    status = read_status(file.parent)
    assert status.state == "failed" and said in (status.error or "")
    assert said in (file.parent / "log.txt").read_text()
    err = capfd.readouterr().err
    assert said in err and "1 of 1 run did not finish" in err and "error: " not in err


def test_the_other_runs_of_the_sweep_go_on(own: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = ("reward=custom", "reward._target_=own_faults.reward", "-m", "R=4", "seed=0,1")
    assert main([*words, "sweep=faults", *SMALL]) == 1
    found = {read_status(file.parent).name: file.parent for file in (own / "runs" / "faults").glob("*/status.json")}
    states = {name: read_status(folder).state for name, folder in found.items()}
    assert states == {"R=4 seed=0": "failed", "R=4 seed=1": "finished"}
    assert len(read_metrics(found["R=4 seed=1"])) == 3
    assert "1 of 2 runs did not finish" in capfd.readouterr().err


@pytest.mark.parametrize("begun", [False, True])
def test_before_the_loop_begins_it_is_a_bad_configuration(
    own: Path, loop: Callable[[Any], None], begun: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    def train(config: Any, run_dir: Path, watch: Any, name: str) -> None:
        if begun:
            watch.begin(0)
        raise ConfigError("model.path=x: cannot be used")

    loop(train)
    assert main(["R=4", "sweep=faults", "reward=random", *SMALL]) == (1 if begun else 2)
    assert "model.path=x: cannot be used" in capfd.readouterr().err
