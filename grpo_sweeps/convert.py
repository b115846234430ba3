"""Saves a model and its tokenizer once as safetensors: a GGUF file, which takes half a minute to load each time, or the
newest checkpoint of a run (sweep=NAME run=IDENTITY), so that a trained policy can be held fixed and measured by
model.path. converted_from.json beside the weights says which file they came from: runs keep that, and every table says
it. Exit codes: 0, or 2 for a bad command or a model that cannot be read.
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

    model_path: str = cli.key("", "a GGUF file, a local folder or a hub id", "SOURCE", word="model.path")
    sweep: str = cli.key("", "instead of model.path: the sweep of a run, whose checkpoint is taken", "NAME")
    run: str = cli.key("", "the run", "IDENTITY", unset="the sweep's one run")
    runs_dir: str = cli.key("runs", "where the runs are", "FOLDER", local="runs_dir")
    out: str = cli.key("", "a new folder for the model", "FOLDER", required=True)
    dtype: str = cli.key("", "the type of the saved weights", "|".join(DTYPES), unset="bfloat16; of a run its own")


COMMAND = cli.Command(
    "python -m grpo_sweeps.convert", Options, __doc__ or "", "{word}: allowed are {allowed}", empty=False
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    return cli.run(COMMAND, argv, _convert)


def _convert(options: Options) -> int:
    folder = _folder(options)
    if options.sweep:
        _of_a_run(options, folder)
    else:
        from grpo_sweeps.config import ModelConfig
        from grpo_sweeps.engine.policy import save_plain
        from grpo_sweeps.tracking.weights import leave

        dtype = options.dtype or DTYPES[0]
        save_plain(ModelConfig(name=folder.name, path=options.model_path, dtype=dtype), folder)
        leave(folder, options.model_path, dtype)
    show(str(folder))
    return 0


def _of_a_run(options: Options, folder: Path) -> None:
    """Save the policy of a run's newest checkpoint. Raises ConfigError for a run without one and for adapters."""
    from grpo_sweeps.credit.build import find_run, load_run
    from grpo_sweeps.engine.policy import DTYPES as TORCH
    from grpo_sweeps.tracking.weights import leave

    run_dir, status = find_run(Path(options.runs_dir), options.sweep, options.run, "convert")
    setup, step = load_run(run_dir, status, "cpu", cli.say, "convert")
    setup.close()
    model, settings = setup.policy.model, setup.config.model
    if settings.lora.r:
        raise ConfigError(f"convert: run={run_dir.name}: it trained adapters (model.lora.r), which are no whole model")
    if options.dtype:
        model = model.to(TORCH[options.dtype])
    model.config.use_cache = True
    model.save_pretrained(folder)
    setup.policy.tokenizer.save_pretrained(folder)
    leave(folder, settings.path, settings.dtype, f"{step} updates of run {run_dir.name}")


def _folder(options: Options) -> Path:
    """The folder to write. Raises ConfigError where a key is missing or its value is not allowed."""
    if bool(options.model_path) == bool(options.sweep):
        given = "model.path is missing" if not options.sweep else "model.path and sweep: one of both is allowed"
        raise ConfigError(f"{given}: give model.path=SOURCE out=FOLDER, or sweep=NAME run=IDENTITY out=FOLDER")
    if options.run and not options.sweep:
        raise ConfigError(f"run={options.run}: needs sweep=NAME beside it")
    if not options.out:
        raise ConfigError("out is missing: give out=FOLDER, a new folder for the model")
    if options.dtype and options.dtype not in DTYPES:
        raise ConfigError(f"dtype={options.dtype}: allowed are {', '.join(DTYPES)}")
    folder = Path(options.out).expanduser()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"out={options.out}: exists and is not an empty folder; give a new one")
    return folder


if __name__ == "__main__":
    sys.exit(main())
