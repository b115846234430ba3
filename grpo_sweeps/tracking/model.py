"""model.json: what was trained, by its own configuration and not by its name. Small, read without torch.

model_type, and each of SIZES that the architecture has; weights: "loaded" or "drawn" (model.random=true); came_from:
the GGUF file that loaded weights came from, where they did, see `weights`
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
CAME_FROM = "came_from"


def write_model(
    run_dir: Path, config: Mapping[str, Any], random: bool, came_from: Mapping[str, str] | None = None
) -> None:
    """config: the loaded model's own, as a mapping. random: its weights were drawn. came_from: see `weights`."""
    known: dict[str, Any] = {name: config[name] for name in ("model_type", *SIZES) if config.get(name) is not None}
    known["weights"] = DRAWN if random else LOADED
    if came_from and not random:
        known[CAME_FROM] = dict(came_from)
    write_text(run_dir / FILE, json.dumps(known, indent=1) + "\n")


def read_model(run_dir: Path) -> dict[str, Any]:
    """Empty where a run did not write it: one of an older version, or one that has not loaded its model yet."""
    try:
        found = json.loads((run_dir / FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
