"""Which code, packages and machine made a run. No imports of the packages themselves, nothing from the environment
but SLURM's job id, and no passwords: an address of the form scheme://user:password@host loses both.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
import platform
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

PACKAGES = (
    "grpo_sweeps",
    "torch",
    "transformers",
    "tokenizers",
    "datasets",
    "numpy",
    "hydra-core",
    "submitit",
    "mlflow",
    "peft",
)

_CREDENTIALS = re.compile(r"(?<=://)[^/@\s]+(?=@)")


def redact(text: str) -> str:
    """`text` with the user and password of every address replaced by ***."""
    return _CREDENTIALS.sub("***", text)


@functools.cache
def commit() -> str | None:
    """The git commit of the package's own source, or None when it does not run from a checkout (a wheel, no git)."""
    if _git("ls-files", "--error-unmatch", "types.py") is None:
        return None  # installed inside some other project's checkout: its commit says nothing about this package
    return _git("rev-parse", "HEAD")


@functools.cache
def dirty() -> bool | None:
    """Does the checkout differ from its commit? Changed tracked files and new source files count, reports do not.

    None when there is no checkout.
    """
    top = _git("rev-parse", "--show-toplevel")
    if commit() is None or top is None:
        return None
    changed = _git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!reports", cwd=Path(top))
    new = _git("ls-files", "--others", "--exclude-standard", "--", "*.py", "*.yaml", ":!reports", cwd=Path(top))
    return bool(changed or new)


@functools.cache
def diff() -> str | None:
    """The uncommitted changes of tracked files, reports aside, as `git diff` writes them; None without a checkout.

    Read once a process, like the commit: the modules in memory are those of its start.
    """
    top = _git("rev-parse", "--show-toplevel")
    if commit() is None or top is None:
        return None
    return _git("diff", "HEAD", "--no-color", "--no-ext-diff", "--", ".", ":!reports", cwd=Path(top))


def _git(*arguments: str, cwd: Path | None = None) -> str | None:
    """git's answer, or None when git is missing, slow, or says no."""
    try:
        done = subprocess.run(
            ["git", *arguments],
            cwd=cwd or Path(__file__).resolve().parents[1],
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
            capture_output=True,
            text=True,
            errors="replace",  # a file of another encoding in the diff
            timeout=20,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


@functools.cache
def versions() -> dict[str, str]:
    """Python's version and those of the packages that can change a result, where they are installed."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def host() -> str:
    """This machine's name, as `RunStatus.stale` compares it."""
    return socket.gethostname()


def job_id(environment: dict[str, str] | None = None) -> str | None:
    """SLURM's id of this job ("12_3" for an array's task), or None outside a job."""
    env = os.environ if environment is None else environment
    if "SLURM_ARRAY_JOB_ID" in env and "SLURM_ARRAY_TASK_ID" in env:
        return f"{env['SLURM_ARRAY_JOB_ID']}_{env['SLURM_ARRAY_TASK_ID']}"
    return env.get("SLURM_JOB_ID")


def command(argv: Sequence[str] | None = None) -> str:
    """The command line, quoted so that a shell takes it, without credentials."""
    words = list(sys.argv if argv is None else argv)
    main = sys.modules.get("__main__")
    module = getattr(getattr(main, "__spec__", None), "name", None)
    if argv is None and module:
        words = ["python", "-m", module.removesuffix(".__main__"), *words[1:]]
    return redact(shlex.join(words))
