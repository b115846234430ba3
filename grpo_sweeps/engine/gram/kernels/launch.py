"""What the kernels share: how they are compiled and launched, and the comparison that each one's trial makes.

Triton: `Launcher` launches a kernel without the cost of Triton's argument analysis, which exceeds that of a small
kernel. Triton looks at every argument of every launch to find the variant to run. A caller of `Launcher` vouches that
the compile-time arguments alone tell it: the run-time arguments are declared not to be specialised on, or are always
alike.

CUDA C++: `Kernel`, compiled by NVRTC, which comes with torch's CUDA builds, and launched through the driver. Both
libraries are called by ctypes. Nothing is compiled at installation, so that one wheel serves every machine.
"""

from __future__ import annotations

import ctypes
import functools
import glob
import hashlib
import logging
import os
import sys
import tempfile
from collections.abc import Hashable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

log = logging.getLogger(__name__)

SOURCES = resources.files("grpo_sweeps.engine.gram.kernels")
DIGEST_BYTES = 32  # SHA-256
MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


class Launcher:
    """Launches one Triton kernel. kernel: a jitted function whose run-time arguments come first."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.compiled: dict[Hashable, Any] = {}

    def __call__(
        self, grid: tuple[int, int, int], arguments: Sequence[Any], constants: dict[str, Any], warps: int,
        device: torch.device, dtype: torch.dtype,
    ) -> None:  # fmt: skip
        """Launch the kernel on a grid. dtype: of the tensors whose dtype varies. Everything else that selects a variant
        is in `constants`, or all arguments on which the kernel may be specialised are `aligned`."""
        key = (device, dtype, warps, *constants.values())
        compiled = self.compiled.get(key)
        if compiled is None:
            self.compiled[key] = self.kernel[grid](*arguments, **constants, num_warps=warps)
        else:
            compiled[grid](*arguments, *constants.values())


def aligned(arguments: Sequence[Any]) -> bool:
    """Whether tensors lie on 16 bytes and whole numbers are multiples of 16: one variant serves all such arguments."""
    return all(
        (a.data_ptr() if isinstance(a, Tensor) else a) % 16 == 0 for a in arguments if isinstance(a, Tensor | int)
    )


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """The device's number of multiprocessors, 1 on a CPU, where only Triton's interpreter runs kernels."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 1


def check_trial(rows_Roi: Tensor, weights_R: Tensor, grad_oi: Tensor, slots: Tensor) -> None:
    """Compare two rows' products and weighted sum with what a kernel made of them. Raises ArithmeticError."""
    rows = rows_Roi.double().flatten(1)
    gram, total = rows @ rows.T, weights_R.double() @ rows
    found = slots.sum(0)[:4]
    expected = torch.stack([gram[0, 0], gram[0, 1], gram[1, 1], total.square().sum()])
    eps = torch.finfo(rows_Roi.dtype).eps
    near = bool((found - expected).abs().max() <= 0.8 * eps**0.5 * expected.abs().max())
    if not near or not torch.allclose(
        grad_oi.double().flatten(), total, rtol=8 * eps, atol=8 * eps * total.abs().max()
    ):
        raise ArithmeticError("wrong sums in the trial of a kernel")


class CudaError(RuntimeError):
    """A library is missing, a source does not compile, or the driver refused a call."""


@functools.cache
def nvrtc() -> Any:
    """The run-time compiler: torch's own, or the toolkit's. Raises CudaError."""
    wheels = [os.path.join(root, "nvidia", "*", "lib", "libnvrtc.so.1[2-9]*") for root in sys.path]
    found = [path for pattern in wheels for path in sorted(glob.glob(pattern), reverse=True)]
    toolkit = sorted(glob.glob("/usr/local/cuda*/lib64/libnvrtc.so*"))
    for path in [*found, "libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so", *toolkit]:
        try:
            # NVRTC looks for its second part by name alone, which is found only where it has been loaded before.
            for builtins in glob.glob(os.path.join(os.path.dirname(path), "libnvrtc-builtins.so*")):
                ctypes.CDLL(builtins, mode=ctypes.RTLD_GLOBAL)
            return ctypes.CDLL(path)
        except OSError:
            continue
    raise CudaError("no NVRTC library (libnvrtc.so) is installed")


@functools.cache
def driver() -> Any:
    """The CUDA driver. Raises CudaError where there is none."""
    try:
        # PyDLL: a call keeps the interpreter's lock, which costs less than to give it back and take it again.
        library = ctypes.PyDLL("libcuda.so.1")
        library.cuTensorMapEncodeTiled  # noqa: B018  since CUDA 12.0
    except (OSError, AttributeError) as error:
        raise CudaError(f"no CUDA driver that knows tensor maps: {error}") from error
    numbers, pointers = [ctypes.c_uint] * 7, [ctypes.c_void_p] * 3
    library.cuLaunchKernel.argtypes = [ctypes.c_void_p, *numbers, *pointers]
    return library


def check(status: int, what: str) -> None:
    """Raise CudaError unless the driver's status is 0."""
    if status:
        text = ctypes.c_char_p()
        driver().cuGetErrorString(ctypes.c_int(status), ctypes.byref(text))
        raise CudaError(f"{what}: CUDA error {status} ({(text.value or b'?').decode()})")


def compile_source(source: str, headers: Sequence[str], options: Sequence[str]) -> tuple[bytes, str]:
    """(cubin, the compiler's log) of a source beside this file. Raises CudaError with the log."""
    library, program = nvrtc(), ctypes.c_void_p()
    texts = [SOURCES.joinpath(name).read_bytes() for name in headers]
    count = len(headers)
    status = library.nvrtcCreateProgram(
        ctypes.byref(program), SOURCES.joinpath(source).read_bytes(), source.encode(), count,
        (ctypes.c_char_p * count)(*texts), (ctypes.c_char_p * count)(*[name.encode() for name in headers]),
    )  # fmt: skip
    if status:
        raise CudaError(f"{source}: NVRTC error {status}")
    try:
        array = (ctypes.c_char_p * len(options))(*[option.encode() for option in options])
        status = library.nvrtcCompileProgram(program, len(options), array)
        log = _text(library.nvrtcGetProgramLogSize, library.nvrtcGetProgramLog, program)
        text = log.rstrip(b"\0").decode(errors="replace").strip()
        if status:
            raise CudaError(f"{source} does not compile (NVRTC error {status}): {text}")
        return _text(library.nvrtcGetCUBINSize, library.nvrtcGetCUBIN, program), text
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def cached_binary(source: str, headers: Sequence[str], options: Sequence[str]) -> bytes:
    """The cubin of `compile_source`, kept in the user's cache folder: a variant takes seconds to compile.

    It is found by what it was made of (sources, options, compiler), and taken only where its digest stands before it. A
    folder that cannot be written costs only the time. Raises CudaError with the compiler's log.
    """
    version = (ctypes.c_int(), ctypes.c_int())
    nvrtc().nvrtcVersion(ctypes.byref(version[0]), ctypes.byref(version[1]))
    key = hashlib.sha256(repr((version[0].value, version[1].value, list(options))).encode())
    for name in (source, *headers):
        key.update(SOURCES.joinpath(name).read_bytes())
    path = cache_folder() / f"{key.hexdigest()}.cubin"
    try:
        kept = path.read_bytes()
        if hashlib.sha256(kept[DIGEST_BYTES:]).digest() == kept[:DIGEST_BYTES]:
            return kept[DIGEST_BYTES:]
    except OSError:
        pass  # not there yet
    cubin = compile_source(source, headers, options)[0]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(hashlib.sha256(cubin).digest() + cubin)
        os.replace(file.name, path)
    except OSError as error:
        log.info("the compiled kernel is not kept in %s: %s", path.parent, error)
    return cubin


def cache_folder() -> Path:
    """XDG_CACHE_HOME/grpo_sweeps/kernels, by default in ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "grpo_sweeps" / "kernels"


def _text(size_of: Any, get: Any, program: ctypes.c_void_p) -> bytes:
    size = ctypes.c_size_t()
    size_of(program, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    get(program, buffer)
    return buffer.raw


class Kernel:
    """One compiled kernel on one device."""

    def __init__(self, cubin: bytes, name: str, shared_bytes: int, device: torch.device) -> None:
        self.cubin = cubin  # the driver may read it later
        self.shared_bytes = shared_bytes
        library, module, function = driver(), ctypes.c_void_p(), ctypes.c_void_p()
        with torch.cuda.device(device):
            torch.cuda.current_stream().query()  # makes the device's context current
            check(library.cuModuleLoadData(ctypes.byref(module), ctypes.c_char_p(cubin)), "cuModuleLoadData")
            check(library.cuModuleGetFunction(ctypes.byref(function), module, name.encode()), "cuModuleGetFunction")
            check(library.cuFuncSetAttribute(function, MAX_DYNAMIC_SHARED, shared_bytes), "cuFuncSetAttribute")
        self.function = function.value

    def launch(self, programs: int, threads: int, stream: int, parameters: int) -> None:
        """parameters: address of an array of the arguments' addresses, which are read before this returns."""
        status = driver().cuLaunchKernel(
            self.function, programs, 1, 1, threads, 1, 1, self.shared_bytes, stream, parameters, None
        )
        check(status, "cuLaunchKernel")
