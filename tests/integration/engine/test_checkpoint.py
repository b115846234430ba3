"""Checkpoints on a file system that is full."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from grpo_sweeps.engine import checkpoint
from tests.unit.engine.test_checkpoint import names, state

pytestmark = pytest.mark.integration


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB, where the system lets this user mount one."""
    folder = tmp_path / "small"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True) if shutil.which("mount") else None
    if done is None or done.returncode != 0:
        pytest.skip(f"no tmpfs can be mounted here: {done.stderr.strip() if done else 'there is no mount command'}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_leaves_the_old_checkpoint_and_no_litter(small_disk: Path) -> None:
    checkpoint.save(small_disk, 1, state(1.0))
    filler = small_disk / "filler"
    for size in (1000, 30_000, 100_000):  # torch's own buffer fails early, on the way, and at the end
        filler.write_bytes(b"\0" * (256 * 1024 - 40_000))
        with pytest.raises(OSError, match=r"No space|could not be written"):
            checkpoint.save(small_disk, 2, {"weights": torch.zeros(size + 10_000)})
        assert names(small_disk) == ["filler", "step_0000001"]
        filler.unlink()
    checkpoint.save(small_disk, 2, {"weights": torch.zeros(1000)})
    assert names(small_disk) == ["step_0000002"]
