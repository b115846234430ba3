"""This machine's own values, for commands that compose no configuration: what conf/local/default.yaml says.

`run` and `check` compose the same file (docs/local.md).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from grpo_sweeps.paths import conf_dir
from grpo_sweeps.types import ConfigError

FOLDER = "local"  # in conf/
GLOBAL = re.compile(r"^#\s*@package\s+_global_\s*$", re.MULTILINE)  # the header of a file there


def value(key: str) -> Any:
    """The value of a key of the configuration, such as `runs_dir` or `tracking`; None where the machine has none.

    Raises:
        ConfigError: for a file that cannot be read or understood; it names the file.
    """
    path = conf_dir() / FOLDER / "default.yaml"
    if not path.is_file():
        return None
    text = checked(path)
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    try:
        found = OmegaConf.select(OmegaConf.create(text), key)
        return OmegaConf.to_container(found, resolve=True) if OmegaConf.is_config(found) else found
    except (OmegaConfBaseException, YAMLError, ValueError) as error:
        raise ConfigError(f"{path}: {key} cannot be read ({' '.join(str(error).split())})") from error


def checked(path: Path) -> str:
    """The text of a file of conf/local. Raises ConfigError where its keys would go nowhere; those of launchers have a
    package of their own."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read ({' '.join(str(error).split())})") from error
    if not path.stem.startswith("submitit_") and not GLOBAL.search(text):
        raise ConfigError(f"{path}: its first line has to be '# @package _global_', see docs/local.md")
    return text
