"""The prompts of conf/task ask for what the strict parser reads, with and without a chat template."""

from __future__ import annotations

import dataclasses
import re
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from grpo_sweeps.config import RunConfig
from grpo_sweeps.loop.setup import Setup
from grpo_sweeps.paths import conf_dir
from grpo_sweeps.rewards.parsing import MARKER, verdict
from grpo_sweeps.types import Problem
from tests.composing import run_config as configured

PROBLEM = Problem("p", "Ana has {a} bags of 9 pens: 18 pens?", "18")
TASKS = sorted(  # those with texts of their own; custom waits for a function, jsonl and hub for data
    path.stem
    for path in (conf_dir() / "task").glob("*.yaml")
    if yaml.safe_load(path.read_text(encoding="utf-8")).get("_target_", "???") != "???"
)
PRETRAINED = ("smollm2_135m", "qwen2_5_coder_0_5b")


def shown(config: RunConfig) -> str:
    needed: Any = SimpleNamespace(config=config)
    return Setup.prompt(needed, PROBLEM)


@pytest.mark.parametrize("model", [*PRETRAINED, "smollm2_135m model.chat_template=false"])
@pytest.mark.parametrize("task", TASKS)
def test_the_prompt_asks_for_the_strict_answer(task: str, model: str) -> None:
    config = configured(f"task={task}", *f"model={model}".split())
    text = shown(config)
    assert text.count(PROBLEM.question) == 1
    if (task, config.prompt_key) == ("arithmetic", "prompt"):
        return  # the embedded model's, which has learnt the form
    assert f"{MARKER} " in text and "number" in text
    examples = re.findall(rf"^{MARKER}.*$", text, flags=re.MULTILINE)
    assert all(verdict(line, line.removeprefix(MARKER).strip()).strict for line in examples)
    assert examples or re.search(rf"last line .*{MARKER} followed by the number", text)
    for a, sign, b, result in re.findall(r"(\d+) ([*+-]) (\d+) = (\d+)", text):
        assert int(result) == {"*": int(a) * int(b), "+": int(a) + int(b), "-": int(a) - int(b)}[sign]
    assert verdict(f"There are 9 * 2 = 18 pens.\n{MARKER} 18", PROBLEM.answer).strict


def test_there_are_tasks_to_ask() -> None:
    assert {"arithmetic", "gsm8k"} <= set(TASKS) and "custom" not in TASKS


def test_the_plain_text_ends_where_a_base_model_goes_on_with_the_answer() -> None:
    text = shown(configured("task=gsm8k", "model=smollm2_135m", "model.chat_template=false"))
    assert text.endswith(f"\nQuestion: {PROBLEM.question}\nAnswer:") and text == text.rstrip()


def test_without_a_text_of_its_own_the_chat_has_the_plain_one() -> None:
    config = configured("task=gsm8k", "model=smollm2_135m", "task.chat_prompt=null", "task.prompt='Solve: {question}'")
    assert shown(config) == f"Solve: {PROBLEM.question}"
    plain = dataclasses.replace(config.model, chat_template=False)
    assert shown(dataclasses.replace(config, model=plain)) == shown(config)


def test_the_embedded_model_keeps_the_text_that_it_was_trained_with() -> None:
    assert shown(configured()) == f"Question: {PROBLEM.question}\nAnswer:"
