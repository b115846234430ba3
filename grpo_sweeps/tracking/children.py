"""What a Python process that this one starts is given, so that it finds the package where this one did."""

from __future__ import annotations

import os
from pathlib import Path

import grpo_sweeps


def python_path(*more: str) -> str:
    """PYTHONPATH for it: the package's own place, this process's PYTHONPATH, and `more`."""
    root = str(Path(grpo_sweeps.__path__[0]).parent)
    return os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH"), *more]))
