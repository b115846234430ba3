"""A run whose process is gone, here and elsewhere."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from grpo_sweeps.tracking.status import STALE_AFTER, RunStatus, process_lives

pytestmark = pytest.mark.integration


def test_stale_by_process_here_and_by_heartbeat_elsewhere() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    here, now = socket.gethostname(), time.time()
    while Path(f"/proc/{child.pid}/stat").exists() and process_lives(child.pid):
        time.sleep(0.01)
    assert RunStatus("running", host=here, pid=child.pid, heartbeat=now).stale()  # a zombie is dead, too
    child.wait()
    assert RunStatus("running", host=here, pid=child.pid, heartbeat=now).stale()
    assert not RunStatus("running", host=here, pid=os.getpid(), heartbeat=now).stale()
    assert not RunStatus("running", host="elsewhere", pid=child.pid, heartbeat=now).stale()
    assert RunStatus("running", host="elsewhere", pid=1, heartbeat=now - STALE_AFTER - 1).stale()
    for state in ("queued", "finished", "failed", "interrupted"):
        assert not RunStatus(state, host=here, pid=child.pid, heartbeat=0.0).stale()  # type: ignore[arg-type]
