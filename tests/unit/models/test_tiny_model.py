"""The embedded model: what is shipped, and what it can do."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_sweeps import models
from grpo_sweeps.models import tiny_path
from grpo_sweeps.pretrain_tiny import CHARACTERS, PROMPT, build_tokenizer, evaluate
from grpo_sweeps.tasks import arithmetic


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(tiny_path(), local_files_only=True)


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny_path(), local_files_only=True, dtype=torch.float32).eval()


def test_files() -> None:
    names = {file.name for file in tiny_path().iterdir()}
    expected = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "generation_config.json"}
    assert expected | {"README.md", "pretrain_log.json"} == names
    assert (tiny_path() / "model.safetensors").stat().st_size < 5_000_000


def test_a_missing_model_says_how_to_make_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(models, "__file__", str(tmp_path / "__init__.py"))
    with pytest.raises(FileNotFoundError, match="pretrain_tiny out="):
        tiny_path()


def test_architecture(model: Any) -> None:
    assert type(model).__name__ == "LlamaForCausalLM"
    assert sum(parameter.numel() for parameter in model.parameters()) <= 3_000_000
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert model.config.num_key_value_heads < model.config.num_attention_heads
    with safe_open(tiny_path() / "model.safetensors", "pt") as file:
        assert {file.get_tensor(name).dtype for name in file.keys()} == {torch.float32}  # noqa: SIM118 - not a dict


def test_special_tokens(tokenizer: Any, model: Any) -> None:
    assert len({tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id}) == 3
    assert len(tokenizer) == model.config.vocab_size
    for config in (model.config, model.generation_config):
        assert (config.eos_token_id, config.pad_token_id) == (tokenizer.eos_token_id, tokenizer.pad_token_id)


def test_the_generation_defaults_do_not_shape_the_distribution(model: Any) -> None:
    defaults = model.generation_config
    assert (defaults.do_sample, defaults.temperature, defaults.top_p, defaults.top_k) == (True, 1.0, 1.0, 0)


def test_one_token_a_character_and_back(tokenizer: Any) -> None:
    text = "".join(random.Random(0).choices(CHARACTERS, k=500)) + CHARACTERS + "  \n\n 's , ."
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text)
    assert tokenizer.decode(ids) == text
    assert ids == tokenizer(text, add_special_tokens=False)["input_ids"]


def test_unknown_characters(tokenizer: Any) -> None:
    ids = tokenizer("é9\t漢")["input_ids"]
    assert [token == tokenizer.unk_token_id for token in ids] == [True, False, True, True]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "9"


def test_shipped_tokenizer_is_what_the_command_makes(tokenizer: Any) -> None:
    made = build_tokenizer()
    assert tokenizer.get_vocab() == made.get_vocab()
    text = "Question: Ana has 9 pens.\nAnswer: #### 9<eos><pad>é"
    assert tokenizer(text)["input_ids"] == made(text)["input_ids"]


def test_padding_on_the_left_changes_nothing(tokenizer: Any, model: Any) -> None:
    problems = arithmetic(n_train=1, n_held_out=8).held_out
    prompts = [PROMPT.format(question=problem.question) for problem in problems]
    batch = tokenizer(prompts, return_tensors="pt", padding=True)
    positions_BT = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        padded_BV = model(**batch, position_ids=positions_BT).logits[:, -1]
        for prompt, row_V in zip(prompts, padded_BV, strict=True):
            alone_V = model(**tokenizer(prompt, return_tensors="pt")).logits[0, -1]
            torch.testing.assert_close(row_V, alone_V, rtol=1e-4, atol=1e-4)


def test_greedy_solutions_have_the_form_and_end(tokenizer: Any, model: Any) -> None:
    problems = arithmetic(n_train=1, n_held_out=32).held_out
    inputs = tokenizer([PROMPT.format(question=p.question) for p in problems], return_tensors="pt", padding=True)
    output_BT = model.generate(**inputs, max_new_tokens=48, do_sample=False)
    new_BT = output_BT[:, inputs["input_ids"].shape[1] :]
    texts = tokenizer.batch_decode(new_BT, skip_special_tokens=True)
    assert (new_BT == tokenizer.eos_token_id).any(1).float().mean() >= 0.9
    assert sum(text.startswith(" ") and "\n#### " in text for text in texts) >= 29


def test_sampled_accuracy_lies_in_the_window(tokenizer: Any, model: Any) -> None:
    """30-50%, give or take three standard errors of 128 problems."""
    torch.manual_seed(0)
    accuracy = evaluate(model, tokenizer, arithmetic(n_train=1, n_held_out=128).held_out, samples=1)
    assert 0.30 - 0.12 <= accuracy <= 0.50 + 0.12


def test_the_log_of_its_making_stopped_in_the_window() -> None:
    log = json.loads((tiny_path() / "pretrain_log.json").read_text(encoding="utf-8"))
    assert 0.30 <= log[-1]["accuracy"] <= 0.50
    assert all(row["accuracy"] < 0.38 for row in log[:-1])
