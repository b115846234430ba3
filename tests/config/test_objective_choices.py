"""What a choice of objective brings along, and that its page says so."""

from __future__ import annotations

import dataclasses
import re
import shlex
from pathlib import Path

import numpy as np
import pytest

from grpo_sweeps.config import ObjectiveConfig, RunConfig
from grpo_sweeps.config.checks import KL_ESTIMATORS, RATIOS, check
from grpo_sweeps.config.functions import load_estimator
from grpo_sweeps.estimators import row_weights
from grpo_sweeps.types import ConfigError
from tests.composing import run_config

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "objective.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^python -m grpo_sweeps.run (.*)$", PAGE, flags=re.MULTILINE)
CHOICES = sorted(path.stem for path in (ROOT / "conf" / "objective").glob("*.yaml"))


# What each choice changes of the default.
CHANGES = {
    "reinforce": {},
    "ppo_clip": {"ratio": "token", "inner_updates": 2},
    "ppo": {"ratio": "token", "inner_updates": 2, "critic": True},
    "vine": {"ratio": "token", "inner_updates": 2, "continuations": 8, "value_every": 8},
    "vine_long": {"ratio": "token", "inner_updates": 2, "continuations": 4, "value_every": 64},
    "oracle": {"continuations": 32},
    "no_baseline": {},
    "leave_one_out": {},
    "gspo": {"ratio": "sequence", "clip_low": 3e-4, "clip_high": 4e-4, "minibatches": 4},
}


def composed(*overrides: str) -> RunConfig:
    config = run_config(*overrides)
    check(config)
    return config


def test_the_default_is_one_plain_update() -> None:
    assert composed().objective == ObjectiveConfig() == composed("objective=reinforce").objective
    assert ObjectiveConfig().on_policy


@pytest.mark.parametrize("name", CHOICES)
def test_a_choice_is_the_default_but_for_what_it_changes(name: str) -> None:
    assert dataclasses.asdict(composed(f"objective={name}").objective) == {
        **dataclasses.asdict(ObjectiveConfig()),
        **CHANGES[name],
    }


@pytest.mark.parametrize("name", CHOICES)
def test_a_choice_is_what_the_page_says(name: str) -> None:
    (line,) = [line for line in PAGE.splitlines() if line.startswith(f"| `{name}` |")]
    ratio, updates, kl = (cell.strip() for cell in line.split("|")[2:5])
    config = composed(f"objective={name}")
    assert (config.objective.ratio, str(config.objective.updates), kl) == (ratio, updates, "none")
    assert config.objective.kl_beta == 0
    assert config.aggregation == ("length" if name == "gspo" else "sum")


@pytest.mark.parametrize(("name", "estimator"), [("no_baseline", "reinforce"), ("leave_one_out", "rloo")])
def test_plain_updates_that_bring_their_estimator(name: str, estimator: str) -> None:
    assert composed(f"objective={name}") == composed("objective=reinforce", f"estimator={estimator}")
    assert composed(f"objective={name}", "estimator=opo") == composed("estimator=opo")


@pytest.mark.parametrize("name", ["ppo", "vine", "vine_long", "oracle"])
def test_values_choose_their_estimator_where_the_command_does_not(name: str) -> None:
    assert composed(f"objective={name}").estimator.target.endswith(".reinforce")
    with pytest.raises(ConfigError, match="estimator=reinforce is needed"):
        composed(f"objective={name}", "estimator=rloo")


def test_values_have_one_source_each() -> None:
    ppo, vine, oracle = (composed(f"objective={name}").objective for name in ("ppo", "vine", "oracle"))
    assert ppo.critic and not ppo.continuations
    assert not vine.critic and vine.continuations and vine.value_every
    assert not oracle.critic and oracle.continuations and not oracle.value_every and not oracle.on_policy
    reward = composed("objective=oracle", "objective.kl_beta=0.1", "objective.kl_place=reward").objective
    assert reward.kl_in_reward, "of whole rollouts the KL in the reward is the rollout's own"


def test_the_aggregation_of_gspo_can_be_overridden_and_wins_over_the_estimator_s() -> None:
    assert composed("objective=gspo", "aggregation=sum").aggregation == "sum"
    assert composed("objective=gspo", "estimator=dapo").aggregation == "length"


@pytest.mark.parametrize("turned", [False, True])
def test_the_papers_gspo_is_one_word_more(turned: bool) -> None:
    """arXiv 2507.18071: the ratio by sequence, 1/length, and the reward less the group's mean over its deviation."""
    words = ["objective=gspo", "estimator=grpo_std"]
    config, plain = composed(*(words[::-1] if turned else words)), composed("objective=gspo")
    assert config == dataclasses.replace(plain, estimator=config.estimator)
    rewards = np.array([[1.0, 0.0, 0.0, 0.0]])
    lengths = np.array([[2, 4, 8, 8]])
    advantages = load_estimator(config.estimator)(rewards, lengths)
    assert advantages == pytest.approx((rewards - 0.25) / 0.5, rel=1e-3)
    weights = row_weights(advantages, lengths, config.aggregation, config.R)
    assert weights[0] / advantages[0] == pytest.approx(np.array([4, 2, 1, 1]) * weights[0, 3] / advantages[0, 3])


def test_the_page_names_every_key_and_value() -> None:
    for key in ObjectiveConfig.__dataclass_fields__:
        assert f"`objective.{key}`" in PAGE, key
    assert all(value in PAGE for value in (*RATIOS, *KL_ESTIMATORS))


def test_the_lists_of_the_checks_are_those_of_the_functions() -> None:
    from grpo_sweeps.maths import objective

    assert objective.RATIOS == RATIOS and objective.KL_ESTIMATORS == KL_ESTIMATORS


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_of_the_page_compose(command: str) -> None:
    words = [word for word in shlex.split(command) if word != "-m"]
    axes = [word.split("=", 1) for word in words]
    for key, values in axes:
        for value in values.split(","):
            config = composed(*(f"{k}={value if k == key else v.split(',')[0]}" for k, v in axes))
            assert config.R in (2, 4, 8)
