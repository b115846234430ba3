"""`python -m grpo_sweeps.convert`: the same model afterwards; one sentence for a bad command."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from grpo_sweeps.config import ModelConfig
from grpo_sweeps.convert import main
from grpo_sweeps.engine.policy import load_model


def test_the_saved_model_is_the_same(random_model_folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "saved"
    assert main([f"model.path={random_model_folder}", f"out={out}", "dtype=float32"]) == 0
    one, two = (load_model(ModelConfig("m", str(folder))) for folder in (random_model_folder, out))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    assert main([f"model.path={random_model_folder}", f"out={out}"]) == 2  # not into a folder that holds something


@pytest.mark.parametrize(
    "words",
    [[], ["out=x"], ["model.path=x"], ["model.path=x", "out=y", "dtype=int8"], ["what=1"], ["model.path=", "out=y"]],
)
def test_a_bad_command_is_one_sentence(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ") and len(message.splitlines()) == 1
