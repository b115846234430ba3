"""What a sweep's runs trained, for the manifest, and for every caption where its weights came from a GGUF file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from grpo_sweeps.redaction import without_places
from grpo_sweeps.report.read.query import Sweep
from grpo_sweeps.tracking.model import CAME_FROM, read_model
from grpo_sweeps.tracking.provenance import read_made_by
from grpo_sweeps.tracking.weights import in_words


def models(sweep: Sweep) -> list[dict[str, Any]]:
    """Each model once: name, path, what `model.json` says, digests of its files (see `digests.of_model`), its runs."""
    found: dict[str, dict[str, Any]] = {}
    for row in sweep.runs.to_dict("records"):
        folder, config = Path(str(row["path"])), sweep.configs[str(row["run"])].get("model") or {}
        content = {
            "name": config.get("name"), "path": without_places(str(config.get("path"))), "dtype": config.get("dtype"),
            **read_model(folder), "files": read_made_by(folder).weights,
        }  # fmt: skip
        found.setdefault(json.dumps(content, sort_keys=True), content | {"runs": []})["runs"].append(str(row["run"]))
    return list(found.values())


def weights_in_words(sweep: Sweep) -> str:
    """One sentence about the files that the weights were dequantised from; empty where none is known."""
    found: dict[str, set[str]] = {}
    for model in models(sweep):
        if source := model.get(CAME_FROM):
            found.setdefault(in_words(source), set()).add(str(model["name"]))
    return "".join(f"Weights of {', '.join(sorted(names))}: {source}. " for source, names in found.items()).rstrip()
