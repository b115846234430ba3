"""The Triton kernels on a CPU, by Triton's interpreter, in a process of its own: the interpreter is chosen when Triton
is imported."""

import os
import subprocess
import sys

import pytest


def test_interpreted_kernels_agree_with_the_reference():
    pytest.importorskip("triton", reason="Triton is not installed (there are builds for Linux only)")
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "tests.integration.interpreted_kernels"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    if "only 0-dimensional arrays can be converted" in done.stderr:
        pytest.skip("this Triton's interpreter does not work with this NumPy")
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(done.stdout.splitlines()) == 10
