"""The names of a run's choices: as Hydra chose them, and from the configuration where a record does not say."""

from __future__ import annotations

import pytest

from grpo_sweeps.config import RunConfig, choices_of, to_mapping
from grpo_sweeps.config.choices import choice_names
from grpo_sweeps.config.functions import imported
from grpo_sweeps.config.schema import CHOICES
from grpo_sweeps.types import ConfigError
from tests.composing import composed


def names(*words: str, known: bool = True) -> dict[str, str]:
    config = composed(*words)
    chosen = choices_of(config.hydra.runtime.choices) if known else {}
    return choice_names(to_mapping(RunConfig.from_composed(config)), chosen)


def test_every_group_has_its_choice() -> None:
    assert names() == {
        "model": "tiny", "task": "arithmetic", "reward": "exact_match", "estimator": "grpo", "objective": "reinforce",
        "trainer": "default", "rollout": "short", "analysis": "every_step",
    }  # fmt: skip
    assert tuple(names()) == CHOICES


def test_what_a_choice_chooses_is_named() -> None:
    found = names("model=smollm2_135m", "objective=leave_one_out", "trainer.lr=3e-6")
    assert (found["trainer"], found["rollout"], found["objective"]) == ("pretrained", "long", "leave_one_out")
    assert found["estimator"] == "rloo"


def test_a_function_of_ones_own_has_its_name() -> None:
    found = names("reward=custom", "reward._target_=my.module.brief")
    assert found["reward"] == "module.brief"


def test_a_function_that_is_not_there_is_answered_with_the_one_that_was_meant() -> None:
    with pytest.raises(ConfigError, match=r"a dotted path module.function is needed; did you mean strict\?$"):
        imported("grpo_sweeps.rewards.exact_match.strct", "reward._target_=x")
    with pytest.raises(ConfigError, match=r"No module named 'nowhere'\); a dotted path module.function is needed$"):
        imported("nowhere.strict", "reward._target_=x")


@pytest.mark.parametrize("objective", ["reinforce", "ppo", "gspo"])
def test_older_records_are_named_by_their_configuration(objective: str) -> None:
    found = names(f"objective={objective}", "estimator=rloo" if objective != "ppo" else "R=4", known=False)
    assert found["objective"] == objective and found["model"] == "tiny" and found["reward"] == "exact_match.strict"
    assert not {"trainer", "rollout", "analysis"} & set(found)
