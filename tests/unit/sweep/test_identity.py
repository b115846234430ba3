"""What changes a run's identity and what does not; the names that people read."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from typing import Any

import pytest

from grpo_sweeps.config import IRRELEVANT, RunConfig, flatten, to_mapping
from grpo_sweeps.sweep.identity import ADDED, display_names, identity, is_irrelevant

MAPPING: dict[str, Any] = {
    "R": 4, "seed": 0, "sweep": "adhoc", "aggregation": "sum", "runs_dir": "runs",
    "model": {"name": "tiny", "path": "embedded"},
    "task": {"_target_": "a.task", "name": "t", "prompt": "{question}", "stop": [], "n": 3},
    "reward": {"_target_": "a.reward", "p": 0.5}, "estimator": {"_target_": "a.estimator"},
    "rollout": {}, "analysis": {}, "trainer": {}, "tracking": {},
}  # fmt: skip


def config(**changes: Any) -> RunConfig:
    """The base configuration with dotted keys (`__` for the dot) replaced."""
    mapping = to_mapping(RunConfig.from_mapping(MAPPING))
    for key, value in changes.items():
        node, parts = mapping, key.split("__")
        for part in parts[:-1]:
            node = node[part]
        node[parts[-1]] = value
    return RunConfig.from_mapping(mapping)


def changed(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    if isinstance(value, list):
        return [*value, *value, 0.5] if value and not isinstance(value[0], str) else [*value, "x"]
    if isinstance(value, dict):
        return {**value, "x": 1}
    return 3 if value is None else f"{value}x"


def test_written_form_round_trips() -> None:
    one = config()
    assert RunConfig.from_mapping(to_mapping(one)) == one
    assert to_mapping(one)["reward"] == {"_target_": "a.reward", "p": 0.5}
    assert to_mapping(one)["task"]["n"] == 3


@pytest.mark.parametrize("key", sorted(flatten(to_mapping(RunConfig.from_mapping(MAPPING)))))
def test_every_key_counts_unless_it_is_listed(key: str) -> None:
    base = config()
    value = flatten(to_mapping(base))[key]
    new = "abc" if key in ("model.revision", "tracking.uri") else changed(value)
    other = config(**{key.replace(".", "__"): new})
    assert other != base
    assert (identity(other) == identity(base)) == is_irrelevant(key, base)


def test_steps_count_only_where_the_schedule_depends_on_them() -> None:
    assert identity(config(trainer__steps=7)) == identity(config())
    cosine = config(trainer__schedule="cosine")
    assert identity(config(trainer__schedule="cosine", trainer__steps=7)) != identity(cosine)


def test_the_plain_objective_leaves_the_identity_as_it_was_before_there_were_objectives() -> None:
    assert identity(config()) == "794c278fbe64"
    assert identity(config(objective__clip_low=0.1, objective__kl_place="reward")) == identity(config())


def test_settings_of_an_objective_count_where_it_is_on() -> None:
    for on, setting, other in (
        ({"objective__ratio": "token"}, "objective__clip_high", 0.28),
        ({"objective__kl_beta": 0.1}, "objective__kl_estimator", "k1"),
        ({"objective__kl_beta": 0.1}, "objective__kl_place", "reward"),
        ({"objective__resample": True}, "objective__resample_rounds", 3),
        ({"objective__continuations": 8}, "objective__value_every", 4),
    ):
        assert len({identity(config()), identity(config(**on)), identity(config(**on, **{setting: other}))}) == 3
    two = [config(), config(objective__ratio="token", objective__clip_high=0.28)]
    sweep = [["objective=reinforce", "objective.clip_high=0.2"], ["objective=ppo_clip", "objective.clip_high=0.28"]]
    assert display_names(two, sweep)[1] == "R=4 seed=0 objective=ppo_clip clip_high=0.28"


def test_runs_at_equal_prompts_have_the_identity_of_before_there_were_budgets() -> None:
    one = config()
    flat = {k: v for k, v in flatten(to_mapping(one)).items() if not is_irrelevant(k, one)}
    flat = {k: v for k, v in flat.items() if k not in ADDED and not k.startswith("objective.")}
    text = json.dumps(flat, sort_keys=True, separators=(",", ":")).replace(".0,", ",").replace(".0}", "}")
    assert "budget" not in text and identity(one) == hashlib.sha256(text.encode()).hexdigest()[:12]
    assert identity(config(budget_R=8)) == identity(one)
    shared = config(budget="rollouts")
    assert len({identity(c) for c in (one, shared, config(budget="rollouts", budget_R=8))}) == 3
    assert (config(R=8).groups, config(R=8, budget="rollouts").groups, shared.groups) == (8, 4, 8)


def test_the_budget_is_in_the_name() -> None:
    sweep = [["R=2", "budget=prompts"], ["R=2", "budget=rollouts"]]
    assert display_names([config(R=2)] * 2, sweep) == ["R=2 seed=0 budget=prompts", "R=2 seed=0 budget=rollouts"]


def test_a_prompt_counts_where_the_model_sees_it() -> None:
    chat = {"model__chat_template": True}
    assert identity(config(task__chat_prompt="Solve: {question}")) == identity(config())
    assert config(task__chat_prompt="Solve: {question}").prompt_key == config(**chat).prompt_key == "prompt"
    own = config(**chat, task__chat_prompt="Solve: {question}")
    assert own.prompt_key == "chat_prompt"
    assert len({identity(c) for c in (config(**chat), config(**chat, task__prompt="{question}?"), own)}) == 3
    assert identity(config(**chat, task__chat_prompt="Solve: {question}", task__prompt="{question}?")) == identity(own)


def test_listed_keys_exist() -> None:
    keys = flatten(to_mapping(config()))
    for name in IRRELEVANT:
        assert any(key == name or key.startswith(name + ".") for key in keys), name


def test_equal_numbers_are_the_same_run() -> None:
    assert identity(config(reward__p=1)) == identity(config(reward__p=1.0))
    assert len(identity(config())) == 12


def test_names_say_what_varies() -> None:
    two = [config(R=2), config(R=4)]
    sweep = [["R=2", "trainer.lr=1e-5"], ["R=4", "trainer.lr=1e-5"]]
    assert display_names(two, sweep) == ["R=2 seed=0", "R=4 seed=0"]
    rates = [["R=2", "trainer.lr=1e-5", "+sweeps=x"], ["R=2", "trainer.lr=1e-4", "+sweeps=x"]]
    assert display_names([two[0]] * 2, rates) == ["R=2 seed=0 lr=1e-5", "R=2 seed=0 lr=1e-4"]
    assert display_names([two[0]], [["model=tiny", "runs_dir=x", "tracking=local", "hydra.verbose=true"]]) == [
        "R=2 seed=0 model=tiny"
    ]
    clash = [["a.every=1", "b.every=1"], ["a.every=2", "b.every=2"]]
    assert display_names([two[0]] * 2, clash)[0] == "R=2 seed=0 a.every=1 b.every=1"


def test_names_leave_out_what_follows_from_R_and_shorten_what_tells_runs_apart() -> None:
    two = [config(R=2), config(R=4)]
    tied = [["R=2", "trainer.steps=8", "trainer.lr=1"], ["R=4", "trainer.steps=4", "trainer.lr=1"]]
    assert display_names(two, tied) == ["R=2 seed=0", "R=4 seed=0"]
    paths = [["model.path=/data/models/a"], ["model.path='/data/models/b'"]]
    assert display_names([two[0]] * 2, paths) == ["R=2 seed=0 path=a", "R=2 seed=0 path=b"]
    clash = [["model.path=/one/a"], ["model.path=/two/a"]]
    assert display_names([two[0]] * 2, clash) == ["R=2 seed=0 path=/one/a", "R=2 seed=0 path=/two/a"]
    functions = [["estimator._target_=grpo_sweeps.estimators.group.rloo"], ["estimator._target_=mine.group.best"]]
    assert display_names([two[0]] * 2, functions)[0] == "R=2 seed=0 estimator._target_=rloo"


def test_the_name_of_a_single_run_fits_a_line() -> None:
    typed = [f"trainer.key_{letter * 8}=value" for letter in "abcdefgh"]
    (name,) = display_names([config(R=2)], [typed])
    assert len(name) < 100 and name.startswith("R=2 seed=0 key_aaaaaaaa=value ") and name.endswith(" and 5 more")


def test_wrong_types_in_a_mapping_are_named() -> None:
    from grpo_sweeps.types import ConfigError

    for key, value, words in (
        ("trainer__steps", "many", "type int"),
        ("trainer__betas", 3, "a list"),
        ("model__lora", 3, "a group of keys"),
        ("trainer__steps", True, "type int"),
        ("rollout__top_p", 0.9, "top-p is not offered"),
        ("trainer__nothing", 1, "no such key"),
    ):
        with pytest.raises(ConfigError, match=words):
            config(**{key: value})
    incomplete = {key: value for key, value in MAPPING.items() if key != "R"}
    with pytest.raises(ConfigError, match="R: a value is required"):
        RunConfig.from_mapping(incomplete)
    assert dataclasses.is_dataclass(config().trainer)
