"""The command line: Hydra's own arguments in any order, and what a file of sweeps/ implies."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from grpo_sweeps import machine
from grpo_sweeps.cli import MOST_SHOWN, VERSION, twice
from grpo_sweeps.paths import conf_dir
from grpo_sweeps.types import ConfigError

PROGRAM = "python -m grpo_sweeps.run"
MOST_NAME = 255  # bytes of the name of a file, on every common file system


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, argparse.ArgumentParser]:
    """Hydra's parse of `argv`; flags and overrides may be mixed, and a sweep file switches --multirun on.

    The parser comes from Hydra's internals, because the public decorator reads sys.argv and prints the usage for a word
    it does not know; hydra-core 1.3 and 1.4 have it in the same place.
    """
    from hydra._internal.utils import get_args_parser

    parser = get_args_parser()
    parser.error = _refuse  # type: ignore[method-assign]
    parser._option_string_actions["--version"].version = VERSION  # type: ignore[attr-defined]  # ours, not Hydra's
    args = parser.parse_intermixed_args(list(argv))
    files = [item for item in args.overrides if _key(item) == "sweeps"]
    if len(files) > 1 or any("," in item for item in files):
        raise ConfigError(f"{' '.join(files)}: one sweep at a time; give one +sweeps=NAME")
    if args.resolve and not (args.cfg or args.help):
        raise ConfigError("--resolve: belongs to --cfg; write --cfg job --resolve, or leave it out")
    _check_length(f"--config-dir {args.config_dir}", args.config_dir or "")
    _check_groups(args.overrides)
    _check_twice(args.overrides)
    places = [Path(folder) / machine.FOLDER for folder in (conf_dir(), args.config_dir) if folder]
    for path in (path for place in places for path in sorted(place.glob("*.yaml"))):
        machine.checked(path)
    if not any(place.is_dir() for place in places):  # Hydra then knows no group of that name
        args.overrides = [item for item in args.overrides if _key(item) != "local"]
    if files:
        name = files[0].partition("=")[2]
        args.overrides = [f"+sweeps={name}" if item == files[0] else item for item in args.overrides]
        if not (args.cfg or args.info or args.shell_completion):
            args.run, args.multirun = False, True
    return args, parser


def command_of(hydra_config: Any) -> str:
    """The command that gave this configuration, as a person would type it."""
    overrides = [*hydra_config.overrides.hydra, *hydra_config.overrides.task]
    several = "hydra.mode=MULTIRUN" in overrides and not any(_key(item) == "sweeps" for item in overrides)
    shown = [item for item in overrides if not item.startswith("hydra.mode=")]
    return " ".join([PROGRAM, *(["-m"] if several else []), *(shlex.quote(item) for item in shown)])


def _check_groups(overrides: Sequence[str]) -> None:
    """Require one choice per group: Hydra silently takes the last of two, and the schema's defaults without any."""
    groups = {path.parent.relative_to(conf_dir()).as_posix() for path in conf_dir().rglob("*.yaml")} - {"."}
    groups |= {"hydra/launcher", "hydra/sweeper"}
    given: dict[str, str] = {}
    for item in overrides:
        key = _key(item)
        if key in groups or key == "sweeps":
            _check_length(item, item.partition("=")[2])
        if key not in groups:
            continue
        if item.startswith("~"):
            raise ConfigError(f"{item}: a run needs a choice of {key}; give another with {key}=NAME")
        if key in given:
            raise ConfigError(
                f"{given[key]} {item}: two choices of one group; give one (with -m, {key}=A,B is an axis)"
            )
        given[key] = item


def _check_twice(overrides: Sequence[str]) -> None:
    """Require one value per key: Hydra silently takes the last of two."""
    given: dict[str, list[str]] = {}
    for item in overrides:
        if "=" in item and not item.startswith("~"):
            given.setdefault(_key(item), []).append(item)
    for key, items in given.items():
        if len(items) > 1:
            raise ConfigError(f"{twice(key, items)} (with -m, {key}=A,B is an axis)")


def _check_length(word: str, value: str) -> None:
    """Refuse the name of a file or folder that no file system can hold; Hydra lets the error of the system through."""
    if any(len(name.encode()) > MOST_NAME for name in re.split("[,/]", value)):
        raise ConfigError(f"{word[:MOST_SHOWN]}...: a name of at most {MOST_NAME} bytes is needed")


def _key(override: str) -> str:
    return override.partition("=")[0].lstrip("+~")


def _refuse(message: str) -> NoReturn:
    raise ConfigError(f"{message}; see {PROGRAM} --help")
