"""Writes a trained model as a folder that transformers and vLLM load: safetensors, tokenizer, generation configuration
and a model card; of a LoRA run the adapter, or with merge=true the whole model. The next run can start from a whole
model by model.path=FOLDER. Exit codes: 0, or 2 for a bad command or a run without a checkpoint.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from grpo_sweeps import cli
from grpo_sweeps.cli import say
from grpo_sweeps.text import show
from grpo_sweeps.types import ConfigError

DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True)
class Options:
    """The command's keys."""

    run: str = cli.key("", "the run, by its identity, the first digits of it, or its folder", "IDENTITY", required=True)
    out: str = cli.key("", "a new folder for the model", "FOLDER", required=True)
    step: int | None = cli.key(None, "the checkpoint after so many updates", unset="the newest one", least=1)
    merge: bool = cli.key(False, "add a LoRA run's adapter to the weights below it", "true")
    dtype: str | None = cli.key(None, "the type of the saved weights", "|".join(DTYPES), unset="the run's model.dtype")
    sweep: str = cli.key("", "the sweep of the run", "NAME", unset="any")
    runs_dir: str = cli.key("runs", "where the runs are", "FOLDER", local="runs_dir")


COMMAND = cli.named("export", Options, __doc__ or "")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    return cli.run(COMMAND, words, lambda options: _export(options, words))


def _export(options: Options, words: list[str]) -> int:
    for key, value in (("run", options.run), ("out", options.out)):
        if not value:
            raise ConfigError(f"export: {key}= is needed; give run=IDENTITY out=FOLDER")
    if options.dtype is not None and options.dtype not in DTYPES:
        raise ConfigError(f"export: dtype={options.dtype}: allowed are {', '.join(DTYPES)}")
    out = cli.new_folder(options.out)

    from grpo_sweeps.export.build import build
    from grpo_sweeps.sweep.named import find_run

    run_dir, status = find_run("export", Path(options.runs_dir), options.sweep, options.run)
    command = f"python -m grpo_sweeps.export {shlex.join(words)}"
    try:
        build(run_dir, status, out, options.step, options.merge, options.dtype, command, say)
    except OSError as error:
        raise ConfigError(f"export: out={options.out}: cannot be written to ({error.strerror or error})") from error
    show(str(out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
