"""The local record in a process without torch and MLflow."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration


def test_the_record_needs_neither_torch_nor_mlflow() -> None:
    code = (
        "import sys; sys.modules['torch'] = sys.modules['mlflow'] = None\n"  # importing either would raise
        "import tempfile; from grpo_sweeps.tracking.local import LocalRecord, read_metrics\n"
        "d = tempfile.mkdtemp()\n"
        "with LocalRecord(d) as r: r.log_metrics(0, {'reward': 1.0})\n"
        "assert len(read_metrics(d)) == 1"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).resolve().parents[3])
