"""The prompts of conf/task ask for what the strict parser reads, with and without a chat template."""

from __future__ import annotations

import dataclasses
import re
from types import SimpleNamespace
from typing import Any

import pytest
from hydra import compose, initialize_config_dir

from grpo_sweeps.config import RunConfig
from grpo_sweeps.config_schema import register
from grpo_sweeps.loop.setup import Setup
from grpo_sweeps.rewards.parsing import MARKER, strict_number, verdict
from grpo_sweeps.sweep.paths import conf_dir
from grpo_sweeps.types import Problem

PROBLEM = Problem("p", "Ana has {a} bags of 9 pens: 18 pens?", "18")
PRETRAINED = ("smollm2_135m", "qwen2_5_coder_0_5b")


def configured(*overrides: str) -> RunConfig:
    register()
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        return RunConfig.from_composed(compose("config", overrides=list(overrides)))


def shown(config: RunConfig) -> str:
    needed: Any = SimpleNamespace(config=config)
    return Setup.prompt(needed, PROBLEM)


@pytest.mark.parametrize("task", ["gsm8k", "arithmetic"])
@pytest.mark.parametrize("model", PRETRAINED)
def test_the_users_turn_asks_for_the_strict_answer(task: str, model: str) -> None:
    text = shown(configured(f"task={task}", f"model={model}"))
    assert text.startswith(PROBLEM.question) and text.endswith(f"as {MARKER} followed by the number.")
    assert "last line" in text and verdict(f"9*2 = 18\n{MARKER} 18", PROBLEM.answer).strict


@pytest.mark.parametrize("model", [f"{name} model.chat_template=false" for name in PRETRAINED])
def test_the_plain_text_shows_the_strict_answer_and_goes_on_to_it(model: str) -> None:
    text = shown(configured("task=gsm8k", *f"model={model}".split()))
    before, _, asked = text.rpartition("\nQuestion: ")
    assert asked == f"{PROBLEM.question}\nAnswer:"
    solution = before.rpartition("\nAnswer:")[2].strip()
    assert str(strict_number(solution)) == solution.rpartition(f"{MARKER} ")[2] == "47"
    for a, sign, b, result in re.findall(r"(\d+) ([*+]) (\d+) = (\d+)", solution):
        assert int(result) == (int(a) * int(b) if sign == "*" else int(a) + int(b))


def test_without_a_text_of_its_own_the_chat_has_the_plain_one() -> None:
    config = configured("task=gsm8k", "model=smollm2_135m", "task.chat_prompt=null", "task.prompt='Solve: {question}'")
    assert shown(config) == f"Solve: {PROBLEM.question}"
    plain = dataclasses.replace(config.model, chat_template=False)
    assert shown(dataclasses.replace(config, model=plain)) == shown(config)


def test_the_embedded_model_keeps_the_text_that_it_was_trained_with() -> None:
    assert shown(configured()) == f"Question: {PROBLEM.question}\nAnswer:"
