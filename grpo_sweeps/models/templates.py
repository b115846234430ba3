"""A model's chat template, as its files have it, and the arguments that a run gives it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path


def chat_template(folder: Path) -> str:
    """The templates of a folder, one text; "" where it has none that can be read."""
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in sorted(folder.glob("chat_template*"))]
    try:
        named = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8")).get("chat_template")
    except (OSError, ValueError, AttributeError):
        named = None
    return "\n".join([*texts, *([str(named)] if named else [])])


def unread(path: str, arguments: Mapping[str, object], template: str) -> Iterator[str]:
    """A sentence for each argument whose name the template of the model at `path` does not hold."""
    for name, value in arguments.items():
        if name not in template:
            yield (
                f"model.chat_template_kwargs.{name}={value}: the chat template of {path} reads nothing of that name; "
                "drop it"
            )
