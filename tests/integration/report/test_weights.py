"""Weights from a quantised file are told of from the conversion to the caption of every table."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from grpo_sweeps import convert
from grpo_sweeps.config import to_mapping
from grpo_sweeps.models import tiny_path
from grpo_sweeps.report.__main__ import main
from grpo_sweeps.sweep.execute import execute
from grpo_sweeps.sweep.identity import identity
from grpo_sweeps.tracking.model import read_model
from grpo_sweeps.tracking.weights import FILE
from tests.composing import run_config

pytestmark = pytest.mark.integration
SOURCE = {"file": "Tiny.Q4_0.gguf", "sha256": "ab" * 32, "quantisation": "Q4_0", "dtype": "bfloat16"}
SAID = "Weights of tiny: Tiny.Q4_0.gguf (sha256 abababab...), a 4-bit file (Q4_0) dequantised to bfloat16."


def test_from_the_conversion_to_every_table(tmp_path: Path, undrawn: None) -> None:
    first = Path(shutil.copytree(tiny_path(), tmp_path / "first"))
    (first / FILE).write_text(json.dumps(SOURCE))
    folder = tmp_path / "model"
    assert convert.main([f"model.path={first}", f"out={folder}", "dtype=float32"]) == 0
    changes = ["R=2", "sweep=one", f"runs_dir={tmp_path / 'runs'}", "tracking=local", f"model.path={folder}"]
    changes += [f"trainer.{key}" for key in ("steps=1", "prompts=2", "eval_every=0", "device=cpu")]
    config = run_config(*changes, "reward=random")
    run_dir = tmp_path / "runs" / "one" / identity(config)
    assert execute(to_mapping(config), run_dir, name="R=2 seed=0").ok
    assert read_model(run_dir)["came_from"] == SOURCE
    out = tmp_path / "out"
    assert main(["sweep=one", f"runs_dir={tmp_path / 'runs'}", f"out={out}"]) == 0
    (model,) = json.loads((out / "manifest.json").read_text())["models"]
    assert model["came_from"] == SOURCE and model["runs"] == [run_dir.name] and model["model_type"] == "llama"
    assert "model.safetensors" in model["files"] and str(tmp_path) not in json.dumps(model)
    for name in ("table1.md", "claims.md"):
        assert SAID in (out / name).read_text(), name
    assert "a 4-bit file (Q4\\_0) dequantised to bfloat16" in (out / "table1.tex").read_text()
    page = (out / "index.html").read_text()
    assert page.count("<table") == page.count(f'<caption class="soft">{SAID}</caption>') > 2


def test_nothing_is_said_of_other_weights(tmp_path: Path, undrawn: None, write) -> None:
    write(tmp_path / "runs", "plain", 2, 0, model="smollm2_135m")
    assert main(["sweep=plain", f"runs_dir={tmp_path / 'runs'}", f"out={tmp_path / 'out'}"]) == 0
    assert (
        "Weights of" not in "".join(path.read_text() for path in (tmp_path / "out").glob("*.*d"))
        and "<caption" not in (tmp_path / "out" / "index.html").read_text()
    )
