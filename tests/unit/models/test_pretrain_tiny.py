"""The command that makes the embedded model."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_sweeps import pretrain_tiny
from grpo_sweeps.pretrain_tiny import (
    COMMAND,
    PROMPT,
    TASK_SEED,
    build_model,
    build_tokenizer,
    main,
    pack,
    weighted_loss,
)
from grpo_sweeps.tasks import arithmetic
from grpo_sweeps.tasks.arithmetic import is_held_out
from grpo_sweeps.types import Problem

SMALL = ["steps=3", "batch=4", "problems=64", "eval_every=3", "eval_problems=4", "warmup=1"]


def test_parse() -> None:
    options = COMMAND.parse(["out=x", "steps=7", "lr=2e-3"])
    assert (options.out, options.steps, options.lr, options.device) == ("x", 7, 2e-3, "cpu")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "out is missing"),
        (["out="], "out is missing"),
        (["out=x", "stepz=3"], "'stepz=3' is not allowed: give key=value with a key of out, steps"),
        (["out=x", "--nope"], "give key=value"),
        (["out=x", "steps=many"], "steps='many' is not allowed: a whole number is needed."),
    ],
)
def test_a_bad_command_is_one_sentence_and_exit_code_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and error.count("\n") == 1


def test_it_trains_writes_and_repeats_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = []
    for name in ("one", "two"):
        assert main([f"out={tmp_path / name}", *SMALL]) == 1  # three steps do not reach the window, and it says so
        assert "outside low=0.38 to high=0.5" in capsys.readouterr().err
        weights.append(load_file(tmp_path / name / "model.safetensors"))
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])
    assert [row["step"] for row in json.loads((tmp_path / "one" / "pretrain_log.json").read_text())] == [3]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "one")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "one")
    assert len(tokenizer) == model.config.vocab_size


def test_it_stops_at_the_first_evaluation_in_the_window(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    accuracies = iter([0.1, 0.45, 0.9])
    monkeypatch.setattr(pretrain_tiny, "evaluate", lambda *_, **__: next(accuracies))
    words = [word for word in SMALL if not word.startswith(("steps=", "eval_every="))]
    assert main([f"out={tmp_path}", *words, "steps=9", "eval_every=1"]) == 0
    assert [row["accuracy"] for row in json.loads((tmp_path / "pretrain_log.json").read_text())] == [0.1, 0.45]


def test_held_out_problems_never_occur_in_it() -> None:
    problems = arithmetic(seed=TASK_SEED, n_train=20_000, n_held_out=1).train
    assert not any(is_held_out(problem.question) for problem in problems)


def test_packing_is_tokenizing() -> None:
    tokenizer = build_tokenizer()
    problems = arithmetic(n_train=20, n_held_out=1).train
    rows_NT, prompt_lengths_N = pack(problems, tokenizer)
    for problem, row_T, prompt_length in zip(problems, rows_NT, prompt_lengths_N, strict=True):
        prompt = PROMPT.format(question=problem.question)
        expected = tokenizer(f"{prompt} {problem.solution}")["input_ids"] + [tokenizer.eos_token_id]
        assert row_T[: len(expected)].tolist() == expected
        assert (row_T[len(expected) :] == tokenizer.pad_token_id).all()
        assert prompt_length == len(tokenizer(prompt)["input_ids"])


def slow_loss(model: Any, tokenizer: Any, problems: list[Problem], prompt_weight: float) -> float:
    total = weight_sum = 0.0
    for problem in problems:
        prompt = tokenizer(PROMPT.format(question=problem.question))["input_ids"]
        row = prompt + tokenizer(" " + problem.solution)["input_ids"] + [tokenizer.eos_token_id]
        logprobs_TV = model(input_ids=torch.tensor([row])).logits[0].log_softmax(-1)
        for position in range(1, len(row)):
            weight = prompt_weight if position < len(prompt) else 1.0
            total -= weight * logprobs_TV[position - 1, row[position]].item()
            weight_sum += weight
    return total / weight_sum


@pytest.mark.parametrize("prompt_weight", [0.0, 0.1, 1.0])
def test_loss_is_the_slow_sum_over_tokens(prompt_weight: float) -> None:
    torch.manual_seed(0)
    tokenizer = build_tokenizer()
    model = build_model(tokenizer).double()
    problems = list(arithmetic(n_train=5, n_held_out=1).train)
    loss = weighted_loss(model, *pack(problems, tokenizer), prompt_weight)
    assert loss.item() == pytest.approx(slow_loss(model, tokenizer, problems, prompt_weight), rel=1e-9)
