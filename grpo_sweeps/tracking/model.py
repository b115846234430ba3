"""model.json: what was trained, by its own configuration and not by its name. Small, read without torch.

model_type, and each of SIZES that the architecture has; weights: "loaded" or "drawn" (model.random=true)
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grpo_sweeps.files import write_text

FILE = "model.json"
SIZES = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size",
)  # fmt: skip
LOADED, DRAWN = "loaded", "drawn"


def write_model(run_dir: Path, config: Mapping[str, Any], random: bool) -> None:
    """config: the loaded model's own, as a mapping. random: its weights were drawn."""
    known = {name: config[name] for name in ("model_type", *SIZES) if config.get(name) is not None}
    write_text(run_dir / FILE, json.dumps(known | {"weights": DRAWN if random else LOADED}, indent=1) + "\n")


def read_model(run_dir: Path) -> dict[str, Any]:
    """Empty where a run did not write it: one of an older version, or one that has not loaded its model yet."""
    try:
        found = json.loads((run_dir / FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
