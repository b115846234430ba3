"""A working directory as the sweeps on real models want it: models/ and data/ with small stand-ins in them."""

from __future__ import annotations

import json
from pathlib import Path

from grpo_sweeps.models import tiny_path

MODELS = ("qwen2_5_coder_0_5b", "smollm2_135m")
PROBLEMS = {"train": 320, "test": 256}  # as many as the sweeps take


def furnish(folder: Path) -> Path:
    """Put them into a folder, which is returned."""
    (folder / "models").mkdir(parents=True)
    for name in MODELS:
        (folder / "models" / name).symlink_to(tiny_path(), target_is_directory=True)
    data = folder / "data" / "gsm8k"
    data.mkdir(parents=True)
    for half, count in PROBLEMS.items():
        lines = [
            json.dumps({"question": f"Box {i} of {half} holds {i} pens. How many pens?", "answer": f"#### {i}"})
            for i in range(count)
        ]
        (data / f"{half}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder
