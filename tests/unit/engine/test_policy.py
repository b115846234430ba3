"""Loading: dtypes, ends of rollouts, refusals in one sentence."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from grpo_sweeps.config import LoraConfig, ModelConfig
from grpo_sweeps.engine.policy import load_model, load_policy, resolve_device, save_plain
from grpo_sweeps.engine.rollouts import Rollout, collate
from grpo_sweeps.models.shapes import SHAPES, shape_config, twin_config
from grpo_sweeps.types import ConfigError


def config(folder: Path, **changes: object) -> ModelConfig:
    return ModelConfig(**{"name": "random", "path": str(folder), **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_dtype(random_model_folder: Path, dtype: str) -> None:
    model = load_model(config(random_model_folder, dtype=dtype))
    assert {p.dtype for p in model.parameters()} == {getattr(torch, dtype)}


def test_every_end_token_counts(random_model_folder: Path, tmp_path: Path) -> None:
    import json
    import shutil

    folder = tmp_path / "two_ends"
    shutil.copytree(random_model_folder, folder)
    generation = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps({**generation, "eos_token_id": [5, 6]}))
    policy = load_policy(config(folder), torch.device("cpu"))
    assert policy.eos_ids == (policy.tokenizer.eos_token_id, 5, 6)


def test_random_weights_differ_from_the_saved(random_model_folder: Path) -> None:
    saved = load_model(config(random_model_folder))
    torch.manual_seed(1)  # the saved ones were drawn after another seed; other tests leave the generator anywhere
    drawn = load_model(config(random_model_folder, random=True))
    assert not torch.equal(saved.get_input_embeddings().weight, drawn.get_input_embeddings().weight)


def test_lora_trains_the_adapters_alone(random_model_folder: Path) -> None:
    pytest.importorskip("peft", reason="the extra `lora` is not installed")
    model = load_model(config(random_model_folder, lora=LoraConfig(r=2)))
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    assert names and all("lora_" in name for name in names)


@pytest.mark.parametrize("path", ["/no/such/folder", "no-such/model", "missing.gguf"])
def test_an_unreadable_model_is_one_sentence(path: str) -> None:
    with pytest.raises(ConfigError, match=r"model\.path=.*allowed are") as caught:
        load_policy(ModelConfig(name="x", path=path), torch.device("cpu"))
    assert "\n" not in str(caught.value)


def test_a_missing_chat_template_is_refused(random_model_folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.chat_template"):
        load_policy(config(random_model_folder, chat_template=True), torch.device("cpu"))


@pytest.mark.parametrize("name", ["cuda:99", "gpu"])
def test_a_device_that_is_not_there(name: str) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.device"):
        resolve_device(name)


def test_saved_plainly_it_is_the_same_model(random_model_folder: Path, tmp_path: Path) -> None:
    save_plain(config(random_model_folder), tmp_path / "copy")
    one, two = load_model(config(random_model_folder)), load_model(config(tmp_path / "copy"))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))


@pytest.mark.parametrize("name", sorted(SHAPES))
def test_twins_keep_what_makes_the_architecture(name: str) -> None:
    real, twin = shape_config(name), twin_config(name)
    for field in ("model_type", "tie_word_embeddings", "hidden_act", "attention_bias"):
        assert getattr(twin, field, None) == getattr(real, field, None)
    assert twin.num_attention_heads > twin.num_key_value_heads

    def head(c: object) -> int:
        return getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads  # type: ignore[attr-defined]

    assert head(twin) == head(real)


def test_collate_masks_by_length() -> None:
    import numpy as np

    rollouts = [Rollout((5, 6), (7, 0), "", np.zeros(2), False), Rollout((5,), (8,), "", np.zeros(1), False)]
    batch = collate(rollouts, pad_id=0, device=torch.device("cpu"))
    assert batch.input_ids_BT.tolist() == [[5, 6, 7, 0], [5, 8, 0, 0]]
    assert batch.attention_mask_BT.tolist() == [[1, 1, 1, 1], [1, 1, 0, 0]]
    assert batch.completion_mask_BT.long().tolist() == [[0, 0, 1, 1], [0, 1, 0, 0]]
