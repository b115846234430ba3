"""Saves a model and its tokenizer once as safetensors, since a GGUF file takes half a minute to load each time, and
beside them, in converted_from.json, which file they came from: runs keep that, and every table says it. Exit codes: 0,
or 2 for a bad command or a model that cannot be read.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from grpo_sweeps import cli
from grpo_sweeps.text import show
from grpo_sweeps.types import ConfigError

DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True)
class Options:
    """The command's keys."""

    model_path: str = cli.key("", "a GGUF file, a local folder or a hub id", "SOURCE", word="model.path", required=True)
    out: str = cli.key("", "a new folder for the model", "FOLDER", required=True)
    dtype: str = cli.key(DTYPES[0], "the type of the saved weights", "|".join(DTYPES))


COMMAND = cli.Command(
    "python -m grpo_sweeps.convert", Options, __doc__ or "", "{word}: allowed are {allowed}", empty=False
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    return cli.run(COMMAND, argv, _convert)


def _convert(options: Options) -> int:
    folder = _folder(options)
    from grpo_sweeps.config import ModelConfig
    from grpo_sweeps.engine.policy import save_plain
    from grpo_sweeps.tracking.weights import leave

    save_plain(ModelConfig(name=folder.name, path=options.model_path, dtype=options.dtype), folder)
    leave(folder, options.model_path, options.dtype)
    show(str(folder))
    return 0


def _folder(options: Options) -> Path:
    """The folder to write. Raises ConfigError where a key is missing or its value is not allowed."""
    for key, value in (("model.path", options.model_path), ("out", options.out)):
        if not value:
            raise ConfigError(f"{key} is missing: give model.path=SOURCE out=FOLDER")
    if options.dtype not in DTYPES:
        raise ConfigError(f"dtype={options.dtype}: allowed are {', '.join(DTYPES)}")
    folder = Path(options.out).expanduser()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"out={options.out}: exists and is not an empty folder; give a new one")
    return folder


if __name__ == "__main__":
    sys.exit(main())
