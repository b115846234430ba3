"""Values of prefixes against one continuation at a time, token by token; a stop string that begins in the prefix."""

from __future__ import annotations

import dataclasses
import sys
import types
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from grpo_sweeps.config import (
    AnalysisConfig,
    FunctionConfig,
    ModelConfig,
    RolloutConfig,
    RunConfig,
    TaskConfig,
    TrackingConfig,
    TrainerConfig,
)
from grpo_sweeps.credit.page import pieces
from grpo_sweeps.credit.sampling import Plan, Sampled, choose, draw
from grpo_sweeps.engine.rollouts import row_seed
from grpo_sweeps.loop.setup import Setup, prepare
from grpo_sweeps.types import ConfigError, Problem, TaskData
from tests.sampling import sample

pytestmark = pytest.mark.integration

LIMIT = 8
PLAN = Plan(rollouts=3, continuations=4, every=1, seed=2)


def letters() -> TaskData:
    problems = [Problem(f"p{i}", f"{i * 37}?", str(i)) for i in range(20)]
    return TaskData(train=problems[:10], held_out=problems[10:])


def thirds(completion: str, problem: Problem, seed: int) -> float:
    """Depends on the whole text: a token that is missing or too many shows."""
    return (sum(map(ord, completion)) + len(completion)) % 3 / 2


def nothing(completion: str, problem: Problem, seed: int) -> None:
    return None


@pytest.fixture(autouse=True)
def functions(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = types.ModuleType("credit_functions")
    module.letters, module.thirds, module.nothing = letters, thirds, nothing
    monkeypatch.setitem(sys.modules, "credit_functions", module)


def setup_of(folder: Path, stop: tuple[str, ...] = (), reward: str = "thirds", batch: int = 64) -> Setup:
    config = RunConfig(
        R=2,
        seed=0,
        sweep="test",
        aggregation="sum",
        runs_dir="",
        model=ModelConfig(name="random", path=str(folder), dtype="float64"),
        task=TaskConfig("letters", FunctionConfig("credit_functions.letters"), prompt="Q{question}", stop=stop),
        reward=FunctionConfig(f"credit_functions.{reward}"),
        estimator=FunctionConfig("grpo_sweeps.estimators.group.grpo"),
        rollout=RolloutConfig(temperature=1.3, max_new_tokens=LIMIT, batch=batch),
        analysis=AnalysisConfig(every=0),
        trainer=TrainerConfig(device="cpu", eval_every=0),
        tracking=TrackingConfig(kind="local"),
    )
    return prepare(config)


def common_pair(setup: Setup, problems: list[Problem]) -> str:
    """The two characters that most often stand beside each other in completions."""
    texts = [o.text for o in draw(setup, problems, PLAN).rollouts]
    return Counter(text[i : i + 2] for text in texts for i in range(len(text) - 1)).most_common(1)[0][0]


def with_stop(folder: Path) -> tuple[Setup, list[Problem], str]:
    """A policy whose completions often end early, four problems, and the string that ends them."""
    plain = setup_of(folder)
    problems = choose(plain.data.train, 4, 0)
    stop = common_pair(plain, problems)
    return setup_of(folder, (stop,)), problems, stop


def ended(setup: Setup, ids: list[int]) -> bool:
    text = setup.policy.tokenizer.decode(ids, skip_special_tokens=True)
    return ids[-1] in setup.policy.eos_ids or any(stop in text for stop in setup.config.task.stop)


def slow_rewards(setup: Setup, problem: Problem, prefix: tuple[int, ...], plan: Plan) -> list[float]:
    """Each continuation by itself, without stop strings, then walked along until the whole text has ended."""
    prompt = setup.policy.encode([setup.prompt(problem)])[0]
    rollout = dataclasses.replace(setup.config.rollout, max_new_tokens=LIMIT - len(prefix))
    rewards = []
    for c in range(plan.continuations):
        key = (plan.seed, "credit value", problem.id, *prefix, c)
        ids = list(prefix)
        for token in sample(setup.policy, [[*prompt, *prefix]], [row_seed(*key)], rollout)[0].completion_ids:
            ids.append(token)
            if ended(setup, ids):
                break
        text = setup.policy.tokenizer.decode(ids, skip_special_tokens=True)
        for stop in setup.config.task.stop:
            text = text.split(stop)[0]
        rewards.append(thirds(text, problem, 0))
    return rewards


def check_against_slow(setup: Setup, sampled: Sampled, plan: Plan) -> None:
    for i, rollout in enumerate(sampled.rollouts):
        p, edges = int(sampled.values.prompt_N[i]), sampled.edges(i)
        assert edges == [*range(0, rollout.length, plan.every), rollout.length]
        for k, edge in enumerate(edges[:-1]):
            rewards = slow_rewards(setup, sampled.problems[p], rollout.completion_ids[:edge], plan)
            assert sampled.values.values_NE[i, k] == pytest.approx(np.mean(rewards))
            assert sampled.values.noise_NE[i, k] == pytest.approx(np.var(rewards, ddof=1) / len(rewards))
        own = thirds(rollout.text, sampled.problems[p], 0)
        assert (sampled.values.values_NE[i, len(edges) - 1 :] == own).all()
        assert not sampled.values.noise_NE[i, len(edges) - 1 :].any()
        assert (sampled.values.edges_NE[i, len(edges) - 1 :] == rollout.length).all()


@pytest.mark.parametrize("every", [1, 3])
def test_values_are_those_of_one_continuation_at_a_time(random_model_folder: Path, every: int) -> None:
    setup = setup_of(random_model_folder)
    plan = dataclasses.replace(PLAN, every=every)
    sampled = draw(setup, choose(setup.data.train, 2, 0), plan)
    check_against_slow(setup, sampled, plan)
    prefixes = {
        (int(p), o.completion_ids[:edge])
        for i, (p, o) in enumerate(zip(sampled.values.prompt_N, sampled.rollouts, strict=True))
        for edge in sampled.edges(i)[:-1]
    }
    assert (sampled.prefixes, sampled.drawn) == (len(prefixes), 4 * len(prefixes))


@pytest.mark.parametrize("every", [1, 3])
def test_a_stop_string_that_begins_in_the_prefix_ends_the_continuation(random_model_folder: Path, every: int) -> None:
    setup, problems, stop = with_stop(random_model_folder)
    plan = dataclasses.replace(PLAN, every=every)
    sampled = draw(setup, problems, plan)
    check_against_slow(setup, sampled, plan)
    texts = [
        setup.policy.tokenizer.decode(list(o.completion_ids[:edge]))
        for i, o in enumerate(sampled.rollouts)
        for edge in sampled.edges(i)[:-1]
    ]
    assert every > 1 or any(text.endswith(stop[0]) for text in texts), "some prefix ends within the stop string"
    assert len({o.length for o in sampled.rollouts}) > 1, "rollouts of different lengths"


def test_the_size_of_a_batch_changes_nothing(random_model_folder: Path) -> None:
    found = []
    for batch in (5, 64):
        setup = setup_of(random_model_folder, batch=batch)
        found.append(draw(setup, choose(setup.data.held_out, 2, 1), PLAN))
    first, second = found
    np.testing.assert_array_equal(first.values.values_NE, second.values.values_NE)
    np.testing.assert_array_equal(first.starts.rewards_PM, second.starts.rewards_PM)
    np.testing.assert_array_equal(first.starts.segments_PM, second.starts.segments_PM)


def test_starts_are_whole_completions(random_model_folder: Path) -> None:
    setup, problems, _ = with_stop(random_model_folder)
    plan = dataclasses.replace(PLAN, every=3)
    sampled = draw(setup, problems, plan)
    assert len(np.unique(sampled.starts.segments_PM)) > 1
    for p, problem in enumerate(sampled.problems):
        prompt = setup.policy.encode([setup.prompt(problem)])[0]
        for c in range(4):
            seed = row_seed(plan.seed, "credit value", problem.id, c)
            one = sample(setup.policy, [prompt], [seed], setup.config.rollout, setup.config.task.stop)[0]
            assert sampled.starts.segments_PM[p, c] == -(-one.length // 3)
            assert sampled.starts.rewards_PM[p, c] == thirds(one.text, problem, 0)


def test_credit_has_mean_zero_at_every_position(random_model_folder: Path) -> None:
    """What a wrong limit, temperature or prompt of the continuations would break."""
    setup = setup_of(random_model_folder, batch=1024)
    N = 400
    sampled = draw(setup, choose(setup.data.train, 1, 0), Plan(rollouts=N, continuations=3, every=2, seed=0))
    A_NK = sampled.values.advantages_NK[:, 1:]  # V(s_0) is one estimate for all rollouts: its error stays
    assert (np.abs(A_NK.mean(axis=0)) < 4.5 * (A_NK.std(axis=0) / N**0.5)).all()
    assert A_NK.std(axis=0).max() > 0.1


def test_a_reward_that_is_no_number_is_refused(random_model_folder: Path) -> None:
    setup = setup_of(random_model_folder, reward="nothing")
    with pytest.raises(ConfigError, match=r"credit_functions\.nothing gave None: a finite number is needed"):
        draw(setup, choose(setup.data.train, 1, 0), PLAN)


def test_problems_are_chosen_once_each_by_the_seed() -> None:
    problems = letters().train
    assert len({p.id for p in choose(problems, 10, 0)}) == 10
    assert choose(problems, 4, 0) == choose(problems, 10, 0)[:4] != choose(problems, 4, 1)


class Bytes:
    """A tokenizer of bytes: characters of several bytes are open in between."""

    def decode(self, ids: list[int], **_: Any) -> str:
        return bytes(ids).decode("utf-8", errors="replace")


@pytest.mark.parametrize("every", [1, 2, 3])
def test_pieces_make_the_text(every: int) -> None:
    text = "5 € – ok ü"
    ids = list(text.encode())
    edges = [*range(0, len(ids), every), len(ids)]
    found = pieces(Bytes(), ids, edges)
    assert "".join(found) == text and len(found) == len(edges) - 1
    assert pieces(Bytes(), ids[:3], [0, 1, 2, 3])[:2] == ["5", " "], "and a character that never ends is shown as open"
