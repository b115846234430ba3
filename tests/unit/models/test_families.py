"""What config.json tells of a model that cannot be measured: tiny random ones of transformers, against GradientGram."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

transformers = pytest.importorskip("transformers")

from grpo_sweeps import check  # noqa: E402
from grpo_sweeps.config import ModelConfig  # noqa: E402
from grpo_sweeps.engine.gram import GradientGram, GramError  # noqa: E402
from grpo_sweeps.engine.head import output_head  # noqa: E402
from grpo_sweeps.engine.policy import load_model  # noqa: E402
from grpo_sweeps.models.families import unmeasured, unscored  # noqa: E402
from grpo_sweeps.run import main  # noqa: E402
from grpo_sweeps.sweep.preflight import look  # noqa: E402
from grpo_sweeps.types import ConfigError  # noqa: E402
from tests.unit.sweep.test_preflight import config  # noqa: E402

BASE = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LINEAR = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
UNMEASURED: dict[str, tuple[dict[str, Any], str]] = {
    "gemma": ({}, "multiplied by a constant"),
    "gemma3_text": ({}, "multiplied by a constant"),
    "opt": ({"ffn_dim": 48, "word_embed_proj_dim": 32}, "learned positions"),
    "mixtral": (EXPERTS, "mixture of experts"),
    "qwen3_moe": (EXPERTS, "mixture of experts"),
    "olmoe": (EXPERTS, "mixture of experts"),
    "mamba": ({"state_size": 8}, "no attention"),
    "falcon_h1": ({"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8}, "no attention"),
    "lfm2": ({"layer_types": ["conv", "full_attention"]}, "no attention"),
    "qwen3_5_text": ({"layer_types": ["linear_attention", "full_attention"], **LINEAR}, "no attention"),
}
UNSCORED = {"cohere": "logit_scale=0.0625", "gemma2": "final_logit_softcapping=30.0", "phi": "has a bias"}
MEASURED = (
    "llama", "mistral", "qwen2", "qwen3", "nemotron", "phi3", "olmo2", "smollm3", "granite", "glm4", "stablelm",
    "starcoder2", "gpt_neox",
)  # fmt: skip


def made(kind: str, **more: Any) -> Any:
    if kind not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} does not know {kind}")
    return transformers.AutoConfig.for_model(kind, **{**BASE, **more})


def model_of(shape: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_config(shape, attn_implementation="eager")


@pytest.mark.parametrize("kind", UNMEASURED)
def test_what_the_gram_refuses_is_told_by_the_configuration(kind: str) -> None:
    more, said = UNMEASURED[kind]
    shape = made(kind, **more)
    assert said in unmeasured(shape.to_dict())
    assert said in unmeasured({"model_type": "of_images", "text_config": shape.to_dict()})
    with pytest.raises(GramError, match="is not covered"):
        GradientGram(model_of(shape))


@pytest.mark.parametrize("kind", UNSCORED)
def test_a_head_that_a_run_does_not_know_is_told_by_the_configuration(kind: str) -> None:
    shape = made(kind)
    assert UNSCORED[kind] in unscored(shape.to_dict())
    with pytest.raises(GramError, match=r"changes the logits|with bias"):
        output_head(model_of(shape))


@pytest.mark.parametrize("kind", MEASURED)
def test_nothing_is_said_against_what_is_measured(kind: str) -> None:
    shape = made(kind)
    assert not unmeasured(shape.to_dict()) and not unscored(shape.to_dict())
    model = model_of(shape)
    assert GradientGram(model) is not None and output_head(model) is not None


@pytest.fixture
def gemma(tmp_path: Path) -> Path:
    (tmp_path / "gemma").mkdir()
    model_of(made("gemma")).save_pretrained(tmp_path / "gemma")
    return tmp_path / "gemma"


def test_it_is_refused_before_the_start(
    gemma: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(gemma.parent)
    words = ["R=2", "model.path=gemma", "reward=random", "tracking=local"]
    said = "model.path=gemma: a model of type gemma cannot be measured: its embedding is multiplied by a constant in a"
    for command in (main, check.main):
        assert command(words) == 2
        assert capfd.readouterr().err.startswith(f"error: {said}")
    assert main([*words, "dry_run=true"]) == 0
    assert said in capfd.readouterr().out and not (gemma.parent / "runs").exists()


def test_what_is_not_measured_or_adapted_is_not_refused(gemma: Path) -> None:
    run = config(str(gemma))
    assert len(look([run]).problems) == 1
    unmeasured_run = replace(run, analysis=replace(run.analysis, every=0))
    adapted = replace(run, model=replace(run.model, lora=replace(run.model.lora, r=8)))
    assert not look([unmeasured_run, adapted]).problems
    shape = json.loads((gemma / "config.json").read_text()) | {"logits_scaling": 8.0}
    (gemma / "config.json").write_text(json.dumps(shape))
    (found,) = look([unmeasured_run]).problems
    assert "cannot be trained here: its logits_scaling=8.0 changes the logits after the output head" in found
    (gemma / "config.json").write_text("[")
    assert not look([run]).problems, "what cannot be read is said when the model is loaded"


def test_a_model_without_sdpa_names_the_remedy(tmp_path: Path) -> None:
    model_of(made("gemma2")).save_pretrained(tmp_path)
    run = ModelConfig("mine", str(tmp_path), attention="sdpa")
    if not transformers.Gemma2ForCausalLM._supports_sdpa:
        said = (
            r"model\.attention=sdpa: Gemma2ForCausalLM does not have it; model\.attention=eager is what every model has"
        )
        with pytest.raises(ConfigError, match=said):
            load_model(run)
    assert load_model(replace(run, attention="eager")).config.model_type == "gemma2"
