"""Entry point: `python -m grpo_sweeps.convert model.path=FILE.gguf out=FOLDER [dtype=bfloat16]`.

Saves a model and its tokenizer once as safetensors, since a GGUF file takes half a minute to load each time. Exit
codes: 0, or 2 for a bad command or a model that cannot be read.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from grpo_sweeps.types import ConfigError

DTYPES = ("bfloat16", "float16", "float32")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    try:
        source, folder, dtype = _parse(sys.argv[1:] if argv is None else argv)
        from grpo_sweeps.config import ModelConfig
        from grpo_sweeps.engine.policy import save_plain

        save_plain(ModelConfig(name=folder.name, path=source, dtype=dtype), folder)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(folder)
    return 0


def _parse(words: Sequence[str]) -> tuple[str, Path, str]:
    values = {"dtype": DTYPES[0]}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not value or key not in ("model.path", "out", "dtype"):
            raise ConfigError(f"{word}: allowed are model.path=SOURCE, out=FOLDER and dtype={'|'.join(DTYPES)}")
        values[key] = value
    for key in ("model.path", "out"):
        if key not in values:
            raise ConfigError(f"{key} is missing: give model.path=SOURCE out=FOLDER")
    if values["dtype"] not in DTYPES:
        raise ConfigError(f"dtype={values['dtype']}: allowed are {', '.join(DTYPES)}")
    folder = Path(values["out"]).expanduser()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"out={values['out']}: exists and is not an empty folder; give a new one")
    return values["model.path"], folder, values["dtype"]


if __name__ == "__main__":
    sys.exit(main())
