"""A working directory as the sweeps on real models want it: models/ and data/ with small stand-ins in them."""

from __future__ import annotations

from pathlib import Path

from grpo_sweeps.models import tiny_path

SAMPLE = Path(__file__).resolve().parent / "data" / "gsm8k_sample"
MODELS = ("qwen2_5_coder_0_5b", "smollm2_135m")


def furnish(folder: Path) -> Path:
    """Put them into a folder, which is returned."""
    (folder / "models").mkdir(parents=True)
    (folder / "data").mkdir()
    for name in MODELS:
        (folder / "models" / name).symlink_to(tiny_path(), target_is_directory=True)
    (folder / "data" / "gsm8k").symlink_to(SAMPLE, target_is_directory=True)
    return folder
