"""The kernels on a machine without a card: Triton's interpreter runs those of Triton, NVRTC compiles the other."""

import os
import re
import subprocess
import sys

import pytest
import torch

from grpo_sweeps.engine.gram.kernels import fused, launch


def test_interpreted_kernels_agree_with_the_reference():
    """In a process of its own: the interpreter is chosen when Triton is imported."""
    pytest.importorskip("triton", reason="Triton is not installed (there are builds for Linux only)")
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "tests.integration.interpreted_kernels"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    if "only 0-dimensional arrays can be converted" in done.stderr:
        pytest.skip("this Triton's interpreter does not work with this NumPy")
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(done.stdout.splitlines()) == 17


HOPPER_SHARED_BYTES = 227 * 1024


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("R", [1, 5, 8])
def test_the_fused_kernel_compiles_for_a_hopper_card(R, dtype):
    try:
        launch.nvrtc()
    except launch.CudaError as error:
        pytest.skip(str(error))
    options = [*fused.options(R, dtype, first=False, read_total=True, write_total=R < 8), "--ptxas-options=-v"]
    binary, log = launch.compile_source("fused.cu", ["hopper.cuh"], options)
    assert binary[:4] == b"\x7fELF"
    assert int(re.search(r"Used (\d+) registers", log)[1]) == 168  # of 65,536, for 384 threads
    assert fused.SHARED_BYTES <= HOPPER_SHARED_BYTES


def test_a_source_that_does_not_compile_says_why():
    try:
        launch.nvrtc()
    except launch.CudaError as error:
        pytest.skip(str(error))
    with pytest.raises(launch.CudaError, match=r"fused\.cu does not compile.*rows"):
        launch.compile_source("fused.cu", ["hopper.cuh"], fused.options(9, torch.bfloat16, True, False, False))


@pytest.fixture
def compiled(monkeypatch, tmp_path):
    """Counts what the compiler is asked for; the cache folder is a test's own."""
    try:
        launch.nvrtc()
    except launch.CudaError as error:
        pytest.skip(str(error))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    calls = []

    def compile_source(source, headers, options):
        calls.append(tuple(options))
        return repr(options).encode(), ""

    monkeypatch.setattr(launch, "compile_source", compile_source)
    return calls


def test_a_compiled_kernel_is_kept_for_the_next_process(compiled, tmp_path):
    made = [launch.cached_binary("fused.cu", ["hopper.cuh"], [option]) for option in ("-DR=2", "-DR=3", "-DR=2")]
    assert compiled == [("-DR=2",), ("-DR=3",)] and made[0] == made[2] != made[1]
    for file in launch.cache_folder().iterdir():
        file.write_bytes(file.read_bytes()[:-1])  # a disk that lost the end of it
    assert launch.cached_binary("fused.cu", ["hopper.cuh"], ["-DR=2"]) == made[0]
    assert len(compiled) == 3, "a damaged file is compiled again"
    assert launch.cached_binary("fused.cu", ["hopper.cuh"], ["-DR=2"]) == made[0] and len(compiled) == 3


def test_a_cache_that_cannot_be_written_costs_the_time_alone(compiled, tmp_path):
    (tmp_path / "cache").write_text("a file where the folder should be")
    for _ in range(2):
        assert launch.cached_binary("fused.cu", ["hopper.cuh"], ["-DR=2"])
    assert len(compiled) == 2
