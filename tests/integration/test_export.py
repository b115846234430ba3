"""A trained model taken out: its weights are the run's, transformers loads it, the next run starts from it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_sweeps.config import to_mapping
from grpo_sweeps.config.checks import check
from grpo_sweeps.engine.policy import load_model
from grpo_sweeps.export.__main__ import main
from grpo_sweeps.export.card import card
from grpo_sweeps.models import tiny_path
from grpo_sweeps.sweep.execute import execute
from grpo_sweeps.sweep.identity import identity
from grpo_sweeps.sweep.named import frozen_config
from grpo_sweeps.tracking.local import read_metrics, read_status
from grpo_sweeps.tracking.weights import came_from, in_words
from grpo_sweeps.types import ConfigError
from tests.composing import run_config

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("one_thread")]
STEPS = 3


def trained(runs: Path, *changes: str) -> Path:
    """The folder of a run of `STEPS` steps of the embedded model, each kept, evaluated before and after."""
    words = ["R=4", "sweep=one", f"runs_dir={runs}", "tracking=local", "trainer.device=cpu", "analysis.every=0"]
    words += [f"trainer.steps={STEPS}", "trainer.prompts=2", "trainer.lr=1e-3", f"trainer.eval_every={STEPS}"]
    words += ["trainer.eval_problems=16", "trainer.eval_samples=2", "trainer.checkpoint_every=1"]
    words += ["trainer.keep_checkpoints=3", "reward=random"]
    given = {change.partition("=")[0] for change in changes}
    config = run_config(*(word for word in words if word.partition("=")[0] not in given), *changes)
    run_dir = runs / config.sweep / identity(config)
    assert execute(to_mapping(config), run_dir, name=f"R={config.R} seed={config.seed}").ok
    return run_dir


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("export") / "runs"


@pytest.fixture(scope="module")
def float32_run(runs: Path) -> Path:
    return trained(runs)


@pytest.fixture(scope="module")
def lora_run(runs: Path) -> Path:
    pytest.importorskip("peft")
    return trained(runs, "model.lora.r=4", "model.dtype=bfloat16")


def state_of(run_dir: Path, step: int = STEPS) -> dict[str, Any]:
    path = run_dir / "checkpoints" / f"step_{step:07}" / "state.pt"
    return torch.load(path, weights_only=True)["state"]


def policy_of(run_dir: Path, step: int = STEPS) -> torch.nn.Module:
    """The model as the run has it after so many steps, made from the run's own checkpoint."""
    config = run_config(
        "R=4", *(["model.lora.r=4", "model.dtype=bfloat16"] if "lora" in str(state_names(run_dir)) else [])
    )
    model = load_model(config.model)
    with torch.no_grad():
        for name, value in state_of(run_dir, step)["model"].items():
            dict(model.named_parameters())[name].copy_(value)
    return model


def state_names(run_dir: Path) -> list[str]:
    return list(state_of(run_dir)["model"])


def logits(model: torch.nn.Module) -> torch.Tensor:
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        return model(ids).logits


def exported(run_dir: Path, out: Path, *words: str) -> Path:
    assert main([f"run={run_dir.name}", f"runs_dir={run_dir.parents[1]}", f"out={out}", *words]) == 0
    return out


def test_the_model_is_the_runs_and_trains_on(float32_run: Path, tmp_path: Path) -> None:
    out = exported(float32_run, tmp_path / "model")
    loaded = AutoModelForCausalLM.from_pretrained(out)
    assert torch.equal(logits(loaded), logits(policy_of(float32_run)))
    assert not torch.equal(logits(loaded), logits(load_model(run_config("R=4").model))), "training moved nothing"
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert tokenizer.decode(tokenizer("Tom has 3")["input_ids"]) == "Tom has 3"
    assert loaded.config.use_cache and loaded.generation_config.eos_token_id == [tokenizer.eos_token_id]
    assert (out / "model.safetensors").exists() and not list(out.glob("*.bin"))
    assert in_words(came_from(str(out), "float32")) == f"trained by {STEPS} updates of run {float32_run.name}"

    following = trained(tmp_path / "runs", f"model.path={out}")
    after, begins = read_metrics(float32_run).iloc[-1], read_metrics(following).iloc[0]
    names = [name for name in begins.index if name.startswith("eval/")]
    assert "eval/accuracy" in names and (after["step"], begins["step"]) == (STEPS, 0)
    assert {name: begins[name] for name in names} == {name: after[name] for name in names}
    assert not torch.equal(logits(policy_of(following)), logits(loaded)), "the second run trained from there"


def test_a_step_and_a_folder_choose_the_checkpoint(float32_run: Path, tmp_path: Path) -> None:
    out = tmp_path / "early"
    assert main([f"run={float32_run}", f"out={out}", "step=1"]) == 0
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(out)), logits(policy_of(float32_run, 1)))
    assert "Not evaluated after 1 update." in (out / "README.md").read_text()


def test_half_types_are_cast_from_the_optimisers_weights(runs: Path, tmp_path: Path) -> None:
    run_dir = trained(runs, "model.dtype=bfloat16")
    same = AutoModelForCausalLM.from_pretrained(exported(run_dir, tmp_path / "same"))
    state = state_of(run_dir)
    found = dict(same.named_parameters())
    assert all(
        torch.equal(found[name], value) and value.dtype == torch.bfloat16 for name, value in state["model"].items()
    )
    wide = AutoModelForCausalLM.from_pretrained(exported(run_dir, tmp_path / "wide", "dtype=float32"))
    found = dict(wide.named_parameters())
    masters = dict(zip(state["model"], state["optimizer"]["masters"], strict=True))
    assert all(torch.equal(found[name], value) for name, value in masters.items())
    assert any(not torch.equal(masters[name], value.float()) for name, value in state["model"].items())


def test_an_adapter_alone_and_merged(lora_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    adapter = exported(lora_run, tmp_path / "adapter")
    assert (adapter / "adapter_model.safetensors").exists() and not (adapter / "model.safetensors").exists()
    from peft import PeftModel

    base = AutoModelForCausalLM.from_pretrained(tiny_path(), dtype=torch.bfloat16)
    assert torch.equal(logits(PeftModel.from_pretrained(base, adapter)), logits(policy_of(lora_run)))
    found = dict(AutoModelForCausalLM.from_pretrained(adapter, dtype=torch.float32).named_parameters())
    saved = state_of(lora_run)["model"]
    assert all(torch.equal(found[name.removeprefix("base_model.model.")], value) for name, value in saved.items())
    AutoTokenizer.from_pretrained(adapter)
    whole = exported(lora_run, tmp_path / "whole", "merge=true", "dtype=float32")
    merged = logits(AutoModelForCausalLM.from_pretrained(whole))
    torch.testing.assert_close(merged, logits(policy_of(lora_run).float()), rtol=1e-4, atol=1e-4)
    assert yaml.safe_load((adapter / "README.md").read_text().split("---")[1])["library_name"] == "peft"
    with pytest.raises(ConfigError, match="holds a LoRA adapter, which needs the model below it"):
        check(run_config(f"model.path={adapter}"))


def test_the_card_says_where_it_comes_from(float32_run: Path, tmp_path: Path) -> None:
    text = (exported(float32_run, tmp_path / "model") / "README.md").read_text()
    header = yaml.safe_load(text.split("---")[1])
    assert header["license"] == "mit" and "base_model" not in header
    status = json.loads((float32_run / "status.json").read_text())
    source = json.loads((float32_run / "source.json").read_text())
    for part in (
        float32_run.name,
        status["commit"] or "unknown",
        source["made_by"]["data"]["train"],
        f"{STEPS} of {STEPS} (finished)",
    ):
        assert part in text, part
    metrics = read_metrics(float32_run)
    rows = [f"{metrics['eval/accuracy'].iloc[i]:.3f}" for i in (0, -1)]
    assert f"| accuracy | {rows[0]} | {rows[1]} |" in text and "## Accuracy and reward on held-out problems" in text
    config = frozen_config("export", float32_run)
    without = dataclasses.replace(config, task=dataclasses.replace(config.task, verdict="none"))
    of_it = card(float32_run, read_status(float32_run), without, STEPS, False, None, "export")
    assert "## Reward on held-out problems" in of_it and "## Accuracy" not in of_it


def test_a_license_is_named_only_where_it_is_known(random_model_folder: Path, tmp_path: Path) -> None:
    run_dir = trained(tmp_path / "runs", f"model.path={random_model_folder}", "trainer.eval_every=0")
    text = (exported(run_dir, tmp_path / "model") / "README.md").read_text()
    assert "license" not in yaml.safe_load(text.split("---")[1])
    assert "| license of the model it was trained from | not known |" in text
    assert "The run made no evaluation up to here." in text or "| accuracy" in text
    (random_model_folder / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
    text = (exported(run_dir, tmp_path / "again") / "README.md").read_text()
    assert yaml.safe_load(text.split("---")[1])["license"] == "apache-2.0"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "export: run= is needed; give run=IDENTITY out=FOLDER"),
        (["run={run}"], "export: out= is needed; give run=IDENTITY out=FOLDER"),
        (["run=xyz", "out={new}"], "export: run=xyz: no such run in runs_dir="),
        (["run={run}", "out={new}", "step=7"], "step=7: run={run} (finished at step 3) has no such whole checkpoint"),
        (["run={run}", "out={new}", "step=0"], "export: step=0: 1 or more is needed"),
        (["run={run}", "out={new}", "dtype=int8"], "export: dtype=int8: allowed are bfloat16, float16, float32"),
        (["run={run}", "out={new}", "merge=true"], "export: merge=true: the run trained all weights"),
        (["run={run}", "out={runs}"], "exists and is not an empty folder; give a new one"),
        (["run={runs}", "out={new}"], "holds no config.yaml; an identity or the folder of a run is needed"),
        (["run={run}", "out={new}", "stepp=1"], "export: 'stepp=1' is not one of "),
    ],
)  # fmt: skip
def test_a_bad_command_is_one_sentence(
    words: list[str], sentence: str, float32_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    places = {"run": float32_run.name, "runs": float32_run.parents[1], "new": tmp_path / "new"}
    assert main([*(word.format(**places) for word in words), f"runs_dir={float32_run.parents[1]}"]) == 2
    text = capsys.readouterr().err
    assert text.startswith("error: ") and len(text.splitlines()) == 1 and sentence.format(**places) in text
    assert not list(tmp_path.iterdir())


def test_a_model_that_has_changed_since_is_refused(random_model_folder: Path, tmp_path: Path, capsys) -> None:
    run_dir = trained(tmp_path / "runs", f"model.path={random_model_folder}", "trainer.eval_every=0")
    path = random_model_folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_max_length": 7}))
    assert main([f"run={run_dir}", f"out={tmp_path / 'model'}"]) == 2
    assert "since it ran model.path: tokenizer_config.json has changed; put back" in capsys.readouterr().err
    assert not (tmp_path / "model").exists()
