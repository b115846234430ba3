"""Where conf/ and sweeps/ are, and the folders below the folder of runs; and the working directory, which stays.

In a wheel both folders are inside the package (grpo_sweeps/_data); in a checkout and an editable install they are
beside it. The package's own place decides, never the working directory.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from grpo_sweeps.text import did_you_mean
from grpo_sweeps.types import ConfigError

PACKAGE = Path(__file__).resolve().parent


def data_root() -> Path:
    """The folder that holds conf/ and sweeps/."""
    for root in (PACKAGE / "_data", PACKAGE.parent):
        if (root / "conf" / "config.yaml").is_file():
            return root
    raise ConfigError(
        f"conf/config.yaml: not found in {PACKAGE / '_data'} nor in {PACKAGE.parent}; install the package anew"
    )


def conf_dir() -> Path:
    return data_root() / "conf"


def sweep_files(root: Path | None = None) -> dict[str, Path]:
    """Name -> file of each sweep that `+sweeps=NAME` finds in the package's own sweeps/ (or in `root`/sweeps)."""
    folder = (root or data_root()) / "sweeps"
    return {path.relative_to(folder).with_suffix("").as_posix(): path for path in sorted(folder.rglob("*.yaml"))}


def sweeps_help() -> str:
    """Lines for --help, one per sweep: its name and its axes."""
    import yaml

    lines = []
    for name, path in sweep_files().items():
        text = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
        axes = ((text.get("hydra") or {}).get("sweeper") or {}).get("params") or {}
        lines.append(f"  +sweeps={name}: " + " ".join(f"{key}={value}" for key, value in axes.items()))
    return "\n".join(lines)


def why_no_path(text: str) -> str:
    """Why no file system can hold a text as a path; empty where one can, whether or not there is something."""
    try:
        os.lstat(text)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return ""
    except (OSError, ValueError) as error:
        return str(error.strerror if isinstance(error, OSError) else error)
    return ""


@contextlib.contextmanager
def working_directory_kept() -> Iterator[None]:
    """A context after which relative paths mean what they meant before: a function of the user's own may have changed
    the working directory, and record, checkpoints, model and tracker are named by paths that may be relative."""
    try:
        before = os.getcwd()
    except FileNotFoundError:  # it has been removed: there is nothing to come back to
        yield
        return
    try:
        yield
    finally:
        os.chdir(before)


def run_dir(runs_dir: str | Path, sweep: str, identity: str) -> Path:
    return Path(runs_dir) / sweep / identity


def sweep_names(runs_dir: Path) -> list[str]:
    """The sweeps in a folder of runs. Raises ConfigError where there is no such folder."""
    if not runs_dir.is_dir():
        raise ConfigError(f"runs_dir={runs_dir}: no such folder; run something first, or name the folder of your runs")
    return sorted(path.name for path in runs_dir.iterdir() if path.is_dir() and not path.name.startswith("."))


def sweep_folder(runs_dir: Path, sweep: str) -> Path:
    """The folder of an existing sweep. Raises ConfigError, with the names of those that exist, for another name."""
    names = sweep_names(runs_dir)
    if sweep not in names:
        sentence = f"sweep={sweep}: not in {runs_dir}; choose one of {', '.join(names) or '(none)'}"
        raise ConfigError(did_you_mean(sentence, sweep, names))
    return runs_dir / sweep
