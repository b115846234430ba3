"""The run's reward: how functions are called, several of them, what does not apply, failures, and held-out rewards."""

from __future__ import annotations

import dataclasses
import logging
import math
import re
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from grpo_sweeps.config import FunctionConfig, ObjectiveConfig, RolloutConfig, RunConfig, TaskConfig
from grpo_sweeps.config.rewards import SEVERAL, RewardPart, bound_reward, load_reward, per_of, reward_parts
from grpo_sweeps.engine.rollouts import Rollout
from grpo_sweeps.loop.evaluate import evaluate
from grpo_sweeps.loop.inner import inner_step
from grpo_sweeps.loop.judging import Judge
from grpo_sweeps.loop.rewarding import Batch, Rewarder, Rewards
from grpo_sweeps.loop.rollouts import length_penalty
from grpo_sweeps.loop.setup import prepare
from grpo_sweeps.loop.step import training_step
from grpo_sweeps.types import ConfigError, Problem, Verdict

CALLS: list[tuple[Any, ...]] = []
PROBLEMS = [Problem("a", "a?", "1", columns={"level": 3}), Problem("b", "b?", "2")]
TEXTS = ["x", "xx", "xxx", "xxxx"]


def length(completion: str, problem: Problem, seed: int, scale: float = 1.0) -> float:
    CALLS.append((completion, problem.id, seed))
    return scale * len(completion)


def rank(completions: Sequence[str], problem: Problem, seeds: Sequence[int]) -> list[float]:
    CALLS.append((tuple(completions), problem.id))
    return [float(sum(len(other) < len(one) for other in completions)) for one in completions]


def whole(completions: Sequence[str], problems: Sequence[Problem], seeds: Sequence[int]) -> Any:
    CALLS.append((len(completions), [p.id for p in problems], len(seeds)))
    return np.array([float(len(one)) for one in completions])


def trl(prompts: Any, completions: Any, level: Any, **columns: Any) -> list[float | None]:
    CALLS.append((prompts, completions, level, columns))
    return [None if one is None else float(one) for one in level]


def renamed(texts: Sequence[str], asked: Problem, numbers: Sequence[int]) -> list[float]:
    return [1.0] * len(texts)


class Longest:
    """A reward with a state: the share of the longest completion so far."""

    def __init__(self, least: int = 1) -> None:
        self.longest = least

    def __call__(self, completion: str, problem: Problem, seed: int) -> float:
        self.longest = max(self.longest, len(completion))
        return len(completion) / self.longest


class NoCall:
    pass


def never(completion: str, problem: Problem, seed: int) -> None:
    return None


def breaks(completion: str, problem: Problem, seed: int) -> float:
    CALLS.append((completion,))
    if len(completion) == 2 and len([call for call in CALLS if call == (completion,)]) < 3:
        raise OSError("the service is away")
    return 1.0


def short(completions: Sequence[str], problems: Any, seeds: Any) -> list[float]:
    return [1.0]


@pytest.fixture(autouse=True)
def own(monkeypatch: pytest.MonkeyPatch) -> None:
    CALLS.clear()
    module = types.ModuleType("own")
    for one in (length, rank, whole, trl, renamed, Longest, NoCall, never, breaks, short):
        setattr(module, one.__name__, one)
    monkeypatch.setitem(sys.modules, "own", module)


Make = Callable[..., Rewards]


@pytest.fixture
def given(make_config: Any) -> Make:
    def make(reward: FunctionConfig, asked: Any = lambda problem: f"Q{problem.question}", **changes: Any) -> Rewards:
        config = dataclasses.replace(make_config(), reward=reward, **changes)
        keys = [(0, "train", 0, p.id, r) for p in PROBLEMS for r in range(2)]
        rewarder = Rewarder(config, Judge("numbers"))
        return rewarder(Batch(TEXTS, [p for p in PROBLEMS for _ in range(2)], keys, 2, asked))

    return make


def own_reward(name: str, **kwargs: Any) -> FunctionConfig:
    return FunctionConfig(f"own.{name}", kwargs)


def several(**functions: Any) -> FunctionConfig:
    return FunctionConfig(SEVERAL, {"functions": functions})


def test_each_function_is_called_as_its_parameters_tell(given: Make) -> None:
    assert given(own_reward("length", scale=2.0)).values == [2, 4, 6, 8]
    assert [call[:2] for call in CALLS] == [("x", "a"), ("xx", "a"), ("xxx", "b"), ("xxxx", "b")]
    CALLS.clear()
    assert given(own_reward("rank")).values == [0, 1, 0, 1]
    assert CALLS == [(("x", "xx"), "a"), (("xxx", "xxxx"), "b")]
    CALLS.clear()
    assert given(own_reward("whole")).values == [1, 2, 3, 4]
    assert CALLS == [(4, ["a", "a", "b", "b"], 4)]
    assert given(own_reward("renamed", per="group")).values == [1, 1, 1, 1]
    assert [per_of(one) for one in (length, rank, whole, trl, renamed)] == [
        "rollout",
        "group",
        "batch",
        "trl",
        "rollout",
    ]


def test_a_function_by_trls_signature_is_given_texts_and_columns(given: Make) -> None:
    found = given(several(level={"_target_": "own.trl"}, length={"_target_": "own.length", "weight": 0.5}))
    ((prompts, completions, level, columns), *_) = CALLS
    assert prompts == ["Qa?", "Qa?", "Qb?", "Qb?"] and completions == TEXTS and level == [3, 3, None, None]
    assert columns["answer"] == ["1", "1", "2", "2"] and columns["id"] == ["a", "a", "b", "b"]
    assert found.values == [3.5, 4.0, 1.5, 2.0], "what does not apply is left out of the sum"
    assert found.parts == {"level": [3, 3, None, None], "length": [1, 2, 3, 4]}


def test_with_a_chat_template_trls_functions_see_messages(given: Make) -> None:
    asked = [{"role": "user", "content": "?"}]
    given(several(level={"_target_": "own.trl"}, one={"_target_": "own.length"}), asked=lambda problem: asked)
    assert CALLS[0][0][0] == asked and CALLS[0][1][0] == [{"role": "assistant", "content": "x"}]


def test_a_class_is_made_once(given: Make) -> None:
    assert given(own_reward("Longest", least=4)).values == [0.25, 0.5, 0.75, 1.0]
    with pytest.raises(ConfigError, match=r"own\.NoCall: its objects cannot be called; a class with __call__"):
        load_reward(RewardPart(own_reward("NoCall")))
    with pytest.raises(ConfigError, match=r"reward\.most=1: own\.Longest takes no argument of that name"):
        bound_reward(RewardPart(own_reward("Longest", most=1)))
    with pytest.raises(
        ConfigError, match=r"reward\.most=1: own\.trl takes no such argument \(allowed: level, columns\)"
    ):
        bound_reward(RewardPart(own_reward("trl", most=1)))


def test_where_nothing_applies_it_is_said(given: Make) -> None:
    reward = several(level={"_target_": "own.trl"})
    with pytest.raises(ConfigError, match=r"none of level applies to rollout 0 of problem b in step 0; .*=zero"):
        given(reward)
    found = given(reward, reward_on_failure="zero")
    assert (found.values, found.failed) == ([3, 3, 0, 0], [False, False, True, True])
    with pytest.raises(ConfigError, match=r"reward own\.never gave None: a finite number is needed"):
        given(own_reward("never"))
    with pytest.raises(ConfigError, match=r"reward own\.short gave 1 values for 4 completions"):
        given(own_reward("short"))


def test_a_failure_stops_is_tried_again_or_counts_as_zero(given: Make, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(OSError, match="the service is away") as caught:
        given(own_reward("breaks"))
    assert re.fullmatch(r"reward own\.breaks failed on rollout \d of problem a in step 0", *caught.value.__notes__)
    CALLS.clear()
    assert given(own_reward("breaks"), reward_retries=2).failed == [False] * 4
    CALLS.clear()
    with caplog.at_level(logging.WARNING):
        found = given(own_reward("breaks"), reward_on_failure="zero", reward_retries=1)
    assert (found.values, found.failed) == ([1, 0, 1, 1], [False, True, False, False])
    assert "own.breaks failed on rollout 1 of problem a in step 0 (OSError: the service is away)" in caplog.text


def with_parts(config: RunConfig, **changes: Any) -> RunConfig:
    functions = {"even": {"_target_": "loop_functions.even_length"}, "size": {"_target_": "own.length", "weight": 0.1}}
    return dataclasses.replace(config, reward=several(**functions), **changes)


def test_a_step_logs_each_function_and_an_evaluation_the_reward(make_config: Any) -> None:
    config = with_parts(
        make_config(), reward_on_failure="zero", task=dataclasses.replace(make_config().task, verdict="none")
    )
    setup = prepare(config)
    metrics = training_step(setup, 0).metrics
    assert metrics["reward"] == pytest.approx(metrics["reward/even"] + 0.1 * metrics["reward/size"])
    assert metrics["reward/failed"] == 0.0 and "reward/strict" not in metrics
    logged, records = evaluate(setup, 0)
    assert set(logged) == {"eval/reward", "eval/reward_greedy"}, "a task without verdicts has no accuracy"
    assert logged["eval/reward"] == pytest.approx(sum(r.reward for r in records) / len(records))
    assert logged["eval/reward"] > 0
    assert logged["eval/reward_greedy"] == pytest.approx(sum(r.greedy_reward for r in records) / len(records))
    judged, _ = evaluate(prepare(make_config()), 0)
    assert {"eval/accuracy", "eval/accuracy_greedy", "eval/reward"} <= set(judged)


def test_an_evaluation_moves_no_random_generator(make_config: Any) -> None:
    import random

    setup = prepare(make_config(reward="dice"))
    before = random.getstate()
    evaluate(setup, 0)
    assert random.getstate() == before


def often_cut(make_config: Any, cut: str = "keep", cut_penalty: float = 0.0, **changes: Any) -> RunConfig:
    """A run of which about half of the rollouts end by themselves."""
    task = dataclasses.replace(make_config().task, stop=tuple("aeiourst"))
    rollout = RolloutConfig(max_new_tokens=2, cut=cut, cut_penalty=cut_penalty)
    return make_config(task=task, rollout=rollout, **changes)


def test_cut_rollouts_are_masked_or_pay(make_config: Any) -> None:
    plain, masked, paying = (
        training_step(prepare(often_cut(make_config, **changes)), 0)
        for changes in ({}, {"cut": "mask"}, {"cut_penalty": 0.5})
    )
    assert any(any(g.cut) and not all(g.cut) and g.mixed for g in plain.groups), "the test needs both kinds"
    for one, other, third in zip(plain.groups, masked.groups, paying.groups, strict=True):
        assert one.cut == other.cut == third.cut and one.rewards == other.rewards
        expected = [0.0 if cut else w for cut, w in zip(one.cut, one.weights, strict=True)]
        assert other.weights == pytest.approx(expected), "the others weigh as they did"
        assert other.advantages == one.advantages
        assert third.rewards == pytest.approx([r - 0.5 * c for r, c in zip(one.rewards, one.cut, strict=True)])
        assert (other.gram is not None) == any(expected)
    assert masked.metrics["grad_norm"] != plain.metrics["grad_norm"]
    squares = [sum(w * w for w in g.weights) for g in masked.groups if g.gram is not None]
    nulls = [
        sum(map(abs, g.weights)) ** 2 / s
        for g, s in zip([g for g in masked.groups if g.gram is not None], squares, strict=True)
    ]
    assert masked.metrics["spectral/null_effective_rank"] == pytest.approx(sum(nulls) / len(nulls))
    assert paying.metrics["reward/task"] == pytest.approx(plain.metrics["reward"])
    assert "reward/task" not in masked.metrics


def of_length(length: int, truncated: bool = False) -> Rollout:
    return Rollout((1,), (2,) * length, "x", np.full(length, -1.0, np.float32), truncated)


def test_the_penalty_grows_over_the_buffer() -> None:
    """DAPO's setting, by hand: L_max = 20480, L_cache = 4096; R_length = (16384 - |y|) / 4096 in the buffer."""
    dapo = RolloutConfig(max_new_tokens=20480, cut_penalty=1.0, cut_buffer=4096)
    expected = {1: 0.0, 16383: 0.0, 16384: 0.0, 16385: 1 / 4096, 17408: 0.25, 18432: 0.5, 20479: 4095 / 4096, 20480: 1}
    assert {length: length_penalty(of_length(length), dapo) for length in expected} == expected
    assert length_penalty(of_length(20480, truncated=True), dapo) == 1.0
    half = RolloutConfig(max_new_tokens=8, cut_penalty=0.5, cut_buffer=4)
    assert [length_penalty(of_length(T), half) for T in (4, 5, 6, 7, 8)] == [0, 0.125, 0.25, 0.375, 0.5]
    hard = RolloutConfig(max_new_tokens=8, cut_penalty=0.5)
    assert [length_penalty(of_length(8, cut), hard) for cut in (False, True)] == [0.0, 0.5]


def test_a_step_takes_the_growing_penalty_off(make_config: Any) -> None:
    task = dataclasses.replace(make_config().task, stop=tuple("aeio"))
    plain, paying = (
        training_step(prepare(make_config(task=task, rollout=RolloutConfig(max_new_tokens=6, **keys))), 0)
        for keys in ({}, {"cut_penalty": 0.6, "cut_buffer": 5})
    )
    lost = {1: 0.0, 2: 0.12, 3: 0.24, 4: 0.36, 5: 0.48, 6: 0.6}
    lengths = {length for g in plain.groups for length in g.lengths}
    assert len(lengths & {2, 3, 4, 5}) >= 2 and 6 in lengths, "the test needs lengths within the buffer"
    for one, other in zip(plain.groups, paying.groups, strict=True):
        assert other.lengths == one.lengths
        assert other.rewards == pytest.approx([r - lost[T] for r, T in zip(one.rewards, one.lengths, strict=True)])
    assert paying.metrics["reward/task"] == pytest.approx(plain.metrics["reward"])


@pytest.mark.parametrize("objective", [{"ratio": "token"}, {"kl_beta": 0.1}, {"critic": True, "ratio": "token"}])
def test_a_masked_rollout_has_no_part_in_any_loss(make_config: Any, objective: dict[str, Any]) -> None:
    estimator = f"grpo_sweeps.estimators.{'reinforce.reinforce' if objective.get('critic') else 'group.grpo'}"
    config = often_cut(make_config, "mask", estimator=estimator, objective=ObjectiveConfig(**objective))
    groups = [g for g in inner_step(prepare(config), 0).groups if g.gram is not None]
    assert groups and any(any(g.cut) for g in groups)
    for group in groups:
        for row, cut in enumerate(group.cut):
            assert (group.gram[row, row] == 0.0) >= cut and (not cut or group.weights[row] == 0.0)


def concentration(gram_RR: Any, rewards_R: Any, weights_R: Any, lengths_R: Any) -> dict[str, float]:
    assert gram_RR.shape == (4, 4) and len(rewards_R) == len(weights_R) == len(lengths_R) == 4
    return {"top": float(gram_RR.max()), "nothing": math.nan}


def mean_length(gram_RR: Any, rewards_R: Any, weights_R: Any, lengths_R: Any) -> float:
    return float(lengths_R.mean())


def test_metrics_of_a_group_of_ones_own(make_config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for one in (concentration, mean_length):
        monkeypatch.setattr(sys.modules["own"], one.__name__, one, raising=False)
    result = training_step(prepare(make_config(analysis={"own_metrics": ("own.concentration", "own.mean_length")})), 0)
    measured = [g for g in result.groups if g.gram is not None]
    top = sum(float(g.gram.max()) for g in measured if g.gram is not None) / len(measured)
    assert result.metrics["own/concentration/top"] == pytest.approx(top)
    assert "own/concentration/nothing" not in result.metrics
    lengths = [sum(g.lengths) / 4 for g in measured]
    assert result.metrics["own/mean_length"] == pytest.approx(sum(lengths) / len(lengths))
    monkeypatch.setattr(sys.modules["own"], "mean_length", lambda *_: "long")
    with pytest.raises(ConfigError, match=r"own/mean_length is 'long'; a number is needed"):
        training_step(prepare(make_config(analysis={"own_metrics": ("own.mean_length",)})), 0)


def second(completion: str, problem: Problem) -> bool:
    CALLS.append((completion, problem.id))
    return completion.count("x") == 2 + 2 * (problem.id == "b")


def readings(completion: str, problem: Problem) -> Verdict:
    return Verdict(strict=False, flexible="x" in completion, parsed=True)


def number(completion: str, problem: Problem) -> float:
    return 1.0


@pytest.fixture
def verdicts(monkeypatch: pytest.MonkeyPatch) -> None:
    for one in (second, readings, number):
        monkeypatch.setattr(sys.modules["own"], one.__name__, one, raising=False)


def test_a_verdict_of_ones_own_is_asked_once_for_each_text_and_problem(verdicts: None) -> None:
    judge, problems = Judge("own.second"), [PROBLEMS[0], PROBLEMS[0], PROBLEMS[1], PROBLEMS[1]]
    found = judge.all(["x", "xx", "xx", "xxxx"], problems)
    assert [v.strict for v in found] == [False, True, False, True] == [v.flexible for v in found]
    assert judge("xx", PROBLEMS[0]).strict and len(CALLS) == 4 and not judge.metrics()
    assert Judge("own.readings")("x", PROBLEMS[0]) == Verdict(strict=False, flexible=True, parsed=True)
    with pytest.raises(ConfigError, match=r"task\.verdict=own\.number: gave 1\.0 on problem a; true or false"):
        Judge("own.number")("x", PROBLEMS[0])


def test_the_reward_and_the_accuracy_go_by_ones_own_verdict(make_config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def even(completion: str, problem: Problem) -> bool:
        return len(completion) % 2 == 0

    monkeypatch.setattr(sys.modules["own"], "even", even, raising=False)
    reward = FunctionConfig("grpo_sweeps.rewards.verdicts.correct", {"verdict": "own.even"})
    own = make_config(task=dataclasses.replace(make_config().task, verdict="own.even"))
    judged, oracle = prepare(dataclasses.replace(own, reward=reward)), prepare(make_config(reward="even_length"))
    step, expected = training_step(judged, 0), training_step(oracle, 0)
    assert [g.rewards for g in step.groups] == [g.rewards for g in expected.groups], "even_length by hand"
    assert step.metrics["reward/strict"] == step.metrics["reward/flexible"] == step.metrics["reward"] > 0
    metrics, _ = evaluate(judged, 0)
    assert metrics["eval/accuracy"] == metrics["eval/reward"] == evaluate(oracle, 0)[0]["eval/reward"] > 0


def test_a_verdict_of_ones_own_that_hangs_is_ended(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "slow_verdict.py").write_text(
        "import time\n\ndef slow(completion, problem):\n    time.sleep(60 * ('x' in completion))\n    return True\n"
    )
    judge = Judge("slow_verdict.slow", 2.0)
    try:
        assert [judge(text, PROBLEMS[0]).strict for text in ("x", "y")] == [False, True]
        assert judge.metrics() == {"verdict/stopped": 1.0}
    finally:
        judge.close()


def test_the_parts_of_a_reward() -> None:
    parts = reward_parts(several(a={"_target_": "x.y", "weight": 2, "limit": 3}, b={"_target_": "x.z", "per": "trl"}))
    assert parts == (
        RewardPart(FunctionConfig("x.y", {"limit": 3}), "a", 2),
        RewardPart(FunctionConfig("x.z"), "b", 1.0, "trl"),
    )
    assert TaskConfig("t", FunctionConfig("t.t"), "{question}").judged
