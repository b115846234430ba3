"""What is refused, and what is only named, before anything is queued."""

from __future__ import annotations

import json
import shutil
import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from grpo_sweeps.config import RunConfig
from grpo_sweeps.sweep import preflight
from grpo_sweeps.sweep.preflight import (
    EMBEDDED,
    check_nodes,
    gpu_need,
    look,
    model_folder,
    parameters,
    parse_nodes,
)
from grpo_sweeps.types import ConfigError

Run = Callable[..., int]
SINFO = "low*|21694|2|gpu:2|infinite\nbig|515000|64|gpu:a100:8(S:0-1)|2-00:00:00\nbig|128000+|128|(null)|2-00:00:00\n"


def config(path: str = "embedded", **model: Any) -> RunConfig:
    from tests.unit.sweep.conftest import frozen_config

    frozen = frozen_config()
    frozen["model"] = {"name": "mine", "path": path, **model}
    return RunConfig.from_mapping(frozen)


def test_a_local_folder_must_hold_all_its_weights(random_model_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(random_model_folder, folder)
    assert model_folder(config(str(folder)).model) == folder
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}})
    )
    (found,) = look([config(str(folder))]).problems
    assert found == f"model.path={folder}: {folder}/model-2.safetensors is missing or not readable; fetch it anew"
    (folder / "model.safetensors.index.json").write_text("{")
    assert "model.safetensors.index.json cannot be read" in look([config(str(folder))]).problems[0]
    (folder / "model.safetensors.index.json").unlink()
    (folder / "model.safetensors").unlink()
    assert "holds no weights (*.safetensors or *.bin)" in look([config(str(folder))]).problems[0]
    assert not look([config(str(folder), random=True)]).problems


def test_without_a_network_a_hubs_model_must_be_in_the_cache(
    run: Run, workplace: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str],
    random_model_folder: Path,
) -> None:  # fmt: skip
    from huggingface_hub import constants

    cache = workplace / "cache"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert run("-m", "R=2,4", "model.path=nobody/nothing") == 2
    err = capfd.readouterr().err
    assert err.startswith(f"error: model.path=nobody/nothing: not in the cache ({cache}), and HF_HUB_OFFLINE is set")
    assert err.count("\n") == 1 and not (workplace / "runs").exists()
    assert run("-m", "R=2,4", "model.path=nobody/nothing", "dry_run=true") == 0
    assert "not in the cache" in capfd.readouterr().out
    snapshot = cache / "models--nobody--nothing" / "snapshots" / "abc"
    shutil.copytree(random_model_folder, snapshot)
    (cache / "models--nobody--nothing" / "refs").mkdir()
    (cache / "models--nobody--nothing" / "refs" / "main").write_text("abc")
    assert model_folder(config("nobody/nothing").model) == snapshot
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    assert model_folder(config("nobody/other").model) is None, "it will be fetched"


def test_parameters_are_counted_from_the_headers(random_model_folder: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(random_model_folder)
    assert parameters(random_model_folder) == sum(one.numel() for one in model.parameters())
    assert parameters(None) is None and parameters(tmp_path) is None
    (tmp_path / "broken.safetensors").write_bytes(b"\x05\0\0\0\0\0\0\0abcde")
    assert parameters(tmp_path) is None


def test_a_disk_that_cannot_hold_the_checkpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    one = preflight.checkpoint_bytes(config(), EMBEDDED) * (config().trainer.keep_checkpoints + 1)
    assert one > 10_000_000
    for free, problems, notes in ((one - 1, 1, 0), (one + 1, 0, 1), (2 * one + 1, 0, 0)):
        monkeypatch.setattr(shutil, "disk_usage", lambda path, free=free: types.SimpleNamespace(free=free))
        found = look([config(), replace(config(), seed=5)])
        assert (len(found.problems), len(found.notes)) == (problems, notes)
        text = "".join([*found.problems, *found.notes])
        assert not text or text.startswith("runs_dir=runs: 0.0 GB are free, and the checkpoints of")


def test_a_gpu_that_a_run_will_hardly_fit_is_named() -> None:
    need = gpu_need(config(), EMBEDDED)
    assert need is not None and 0.01 < need < 5
    assert not look([config()], gpu_mem_gb=need + 0.2).notes
    (note,) = look([config()], gpu_mem_gb=0.01).notes
    assert note.startswith("hydra.launcher.gpu_mem_gb=0.01: R=4 with model=mine takes about")
    assert not look([config()]).notes
    half = gpu_need(config(dtype="bfloat16", gradient_checkpointing=True), EMBEDDED)
    lora = gpu_need(config(lora={"r": 8}), EMBEDDED)
    assert half is not None and lora is not None and half < need and lora < need
    assert gpu_need(config(), None) is None


@pytest.mark.parametrize(
    ("params", "sentence"),
    [
        ({"mem_gb": 32}, "hydra.launcher.mem_gb=32: no node of the default partition can ever give it; at most 21.18"),
        ({"cpus_per_task": 4}, "hydra.launcher.cpus_per_task=4: no node of the default partition"),
        ({"gpus_per_node": 9, "partition": "big"}, "hydra.launcher.gpus_per_node=9: no node of partition big"),
        ({"timeout_min": 3000, "partition": "big"}, "hydra.launcher.timeout_min=3000: no node of partition big"),
        ({"cpus_per_task": 100, "gpus_per_node": 1, "partition": "big"}, "no node of partition big can ever give all"),
    ],
)
def test_what_no_node_can_give_is_refused(params: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_nodes(params, SINFO)
    assert sentence in str(caught.value)


def test_what_some_node_can_give_is_taken() -> None:
    assert check_nodes({"mem_gb": 20, "cpus_per_task": 2, "gpus_per_node": 2, "timeout_min": 99999}, SINFO) == ""
    assert check_nodes({"mem_gb": 400, "gpus_per_node": 8, "partition": "low,big"}, SINFO) == ""
    assert check_nodes({"mem_gb": None, "cpus_per_task": 128, "partition": "big"}, SINFO) == ""
    assert check_nodes({"mem_gb": 9999, "partition": "unknown"}, SINFO) == "", "sbatch says that there is none"
    assert check_nodes({"mem_gb": 9999}, "").startswith("sinfo does not answer")


def test_lines_of_sinfo() -> None:
    low, *_ = parse_nodes(SINFO, None)
    assert (low.mem_mb, low.cpus, low.gpus, low.minutes) == (21694, 2, 2, float("inf"))
    assert [(node.gpus, node.minutes) for node in parse_nodes(SINFO, "big")] == [(8, 2880), (0, 2880)]
    assert parse_nodes("x*|100|4|gpu:2,gpu:v100:3|30:00\n", None)[0].minutes == 30
    assert parse_nodes("x*|100|4|gpu:2,gpu:v100:3|30:00\n", None)[0].gpus == 5


@pytest.mark.parametrize(
    ("key", "value", "noted"),
    [
        ("prompt", r"Question: {question}\nAnswer:", True),
        ("stop", (r"\nQuestion:",), True),
        ("system", r"Think.\n", True),
        ("prompt", "Question: {question}\nAnswer:", False),
        ("prompt", r"Is \nu in {question} or \neq?", False),
    ],
)
def test_a_spelled_line_break_is_named(key: str, value: Any, noted: bool) -> None:
    run = config()
    run = replace(run, task=replace(run.task, **{key: value}))
    found = [note for note in look([run, run]).notes if note.startswith(f"task.{key} holds a backslash and an n")]
    assert len(found) == noted


@pytest.mark.parametrize("place", ["chat_template.jinja", "tokenizer_config.json"])
def test_an_argument_that_the_chat_template_does_not_read_is_refused(
    place: str, random_model_folder: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(random_model_folder, folder)
    template = "{% if enable_thinking %}{% endif %}{{ messages[0].content }}"
    text = json.dumps({"chat_template": template}) if place.endswith(".json") else template
    (folder / place).write_text(text)
    asked = {"chat_template": True, "chat_template_kwargs": {"enable_thinking": False, "verbose": 1}}
    (problem,) = look([config(str(folder), **asked)] * 2).problems
    assert problem.startswith("model.chat_template_kwargs.verbose=1: the chat template of ")
