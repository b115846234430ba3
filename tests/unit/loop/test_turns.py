"""Prompts with a system message, examples, arguments of the template and a prefix: what `apply_chat_template` gives."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_sweeps.config import ModelConfig, RunConfig, TaskConfig, to_mapping
from grpo_sweeps.engine.policy import Policy, Turns, load_policy
from grpo_sweeps.loop.setup import prepare, turns_of
from grpo_sweeps.sweep.identity import identity
from grpo_sweeps.types import ConfigError

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }};{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% if enable_thinking is false %}(no) {% endif %}{% endif %}"
)
NO_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system here') }}{% endif %}{{ messages[0].content }}"
)
EXAMPLES = ({"question": "1+1", "answer": "2"}, {"question": "2+2", "answer": "4"})


@pytest.fixture
def policy(random_model_folder: Path) -> Policy:
    plain = load_policy(ModelConfig(name="random", path=str(random_model_folder)), torch.device("cpu"))
    plain.tokenizer.chat_template = TEMPLATE
    return dataclasses.replace(plain, chat_template=True)


def with_turns(config: RunConfig, **task: Any) -> RunConfig:
    chat = dataclasses.replace(config.model, chat_template=True, chat_template_kwargs={"enable_thinking": False})
    return dataclasses.replace(
        config, model=chat, task=dataclasses.replace(config.task, chat_prompt="Solve {question}", **task)
    )


def template_gives(policy: Policy, messages: list[dict[str, str]], **more: Any) -> list[int]:
    found = policy.tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True, **more)
    return list(found["input_ids"])


def test_all_of_it_is_what_the_template_gives(policy: Policy, make_config: Any) -> None:
    config = with_turns(make_config(), system="Be brief", few_shot=EXAMPLES)
    asked = dataclasses.replace(policy, turns=turns_of(config))
    messages = [{"role": "system", "content": "Be brief"}]
    for example in EXAMPLES:
        messages += [{"role": "user", "content": f"Solve {example['question']}"}]
        messages += [{"role": "assistant", "content": example["answer"]}]
    messages += [{"role": "user", "content": "Solve 3+3"}]
    assert asked.messages("Solve 3+3") == messages
    expected = template_gives(policy, messages, add_generation_prompt=True, enable_thinking=False)
    assert asked.encode(["Solve 3+3"]) == [expected]
    assert asked.encode(["Solve 3+3"]) != policy.encode(["Solve 3+3"])


def test_a_prefix_is_the_beginning_of_the_answer(policy: Policy) -> None:
    asked = dataclasses.replace(policy, turns=Turns(prefix="Let us see: "))
    whole = template_gives(policy, policy.messages("3+3"), add_generation_prompt=True)
    begun = [*policy.messages("3+3"), {"role": "assistant", "content": "Let us see: "}]
    continued = template_gives(policy, begun, continue_final_message=True)
    (ids,) = asked.encode(["3+3"])
    assert ids == continued and ids[: len(whole)] == whole
    without = dataclasses.replace(asked, chat_template=False)
    assert without.encode(["3+3"]) == [policy.tokenizer("3+3Let us see: ")["input_ids"]]


def test_a_template_that_refuses_a_message_is_one_sentence(policy: Policy) -> None:
    policy.tokenizer.chat_template = NO_SYSTEM
    asked = dataclasses.replace(policy, turns=Turns(({"role": "system", "content": "Be brief"},)))
    with pytest.raises(ConfigError, match=r"refuses messages of system, user \(no system here\); task\.system=null"):
        asked.encode(["3+3"])


def test_an_argument_that_the_template_does_not_read_is_refused(random_model_folder: Path, tmp_path: Path) -> None:
    import shutil

    folder = tmp_path / "chat"
    shutil.copytree(random_model_folder, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    model = ModelConfig(name="x", path=str(folder), chat_template=True, chat_template_kwargs={"enable_thinkng": False})
    with pytest.raises(ConfigError, match=r"model\.chat_template_kwargs\.enable_thinkng=False: .* reads nothing"):
        load_policy(model, torch.device("cpu"))
    good = dataclasses.replace(model, chat_template_kwargs={"enable_thinking": False})
    assert load_policy(good, torch.device("cpu")).chat_template


def test_a_run_asks_with_its_turns(make_config: Any, random_model_folder: Path, tmp_path: Path) -> None:
    import shutil

    folder = tmp_path / "chat"
    shutil.copytree(random_model_folder, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    config = with_turns(make_config(), system="Be brief")
    setup = prepare(dataclasses.replace(config, model=dataclasses.replace(config.model, path=str(folder))))
    problem = setup.data.train[0]
    (ids,) = setup.policy.encode([setup.prompt(problem)])
    text = f"[system] Be brief;[user] Solve {problem.question};[assistant] (no) "
    assert ids == setup.policy.tokenizer(text, add_special_tokens=False)["input_ids"]
    assert setup.asked(problem) == setup.policy.messages(f"Solve {problem.question}")


def test_turns_are_of_the_identity_and_their_absence_is_not(make_config: Any) -> None:
    plain = make_config()
    changes: list[dict[str, Any]] = [{"system": "x"}, {"few_shot": EXAMPLES}, {"assistant_prefix": "x"}]
    tasks = [dataclasses.replace(plain.task, **change) for change in changes]
    runs = [plain, *(dataclasses.replace(plain, task=task) for task in tasks), with_turns(plain)]
    assert len({identity(run) for run in runs}) == len(runs)
    assert all(RunConfig.from_mapping(to_mapping(run)) == run for run in runs)
    assert TaskConfig("t", plain.task.function, "{question}").few_shot == ()
