"""The kernels on a machine without a card: Triton's interpreter runs two of them, its compiler makes all three for a
Hopper card."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="Triton is not installed (there are builds for Linux only)")


def test_interpreted_kernels_agree_with_the_reference():
    """In a process of its own: the interpreter is chosen when Triton is imported."""
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "tests.integration.interpreted_kernels"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    if "only 0-dimensional arrays can be converted" in done.stderr:
        pytest.skip("this Triton's interpreter does not work with this NumPy")
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(done.stdout.splitlines()) == 10


HOPPER_SHARED_BYTES = 227 * 1024


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("R", [1, 5, 8])
def test_the_fused_kernel_compiles_and_fits_a_hopper_card(R, dtype):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon._runtime import GluonASTSource

    from grpo_sweeps.engine.gram.kernels import fused

    block = f"tensordesc<{dtype}[1,{fused.DEPTH},{fused.SIDE}],{fused.LAYOUT!r}>"
    signature = {"y": block, "x": block, "weights": "*fp32", "grad": "*i32", "total": "*fp32", "slots": "*fp64"}
    signature |= {name: "i32" for name in ("T", "o", "i", "slot_stride")}
    constants = fused.constants_of(R, width=64, first=False, read_total=True, write_total=R < 8)
    signature |= {name: "constexpr" for name in constants}
    source = GluonASTSource(fn=fused._weight_gram, signature=signature, constexprs=constants)
    kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": fused.WARPS})
    assert "wgmma.mma_async" in kernel.asm["ptx"] and "cp.async.bulk.tensor.3d" in kernel.asm["ptx"]
    assert kernel.metadata.shared <= HOPPER_SHARED_BYTES
