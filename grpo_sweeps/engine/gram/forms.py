"""How the Gram of one weight is formed: four exact ways, and the measured rule that chooses between them.

blocks   a block of rows' gradients by a batched product, its Gram and weighted sum by library calls; the
         reference, on any device and in any dtype
onepass  the same block, read once by a Triton kernel that does both (CUDA)
fused    no block at all: a Hopper kernel keeps the rows' tiles on the chip (half types, units of up to 8 rows)
ghost    sum over t, s of <x_it, x_js> <y_it, y_js>, plus the ordinary product; for short T
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Sequence
from types import ModuleType
from typing import Literal, get_args

import torch

from grpo_sweeps.engine.gram.layout import HALF_TYPES, GramError, accumulation_dtype

Form = Literal["auto", "blocks", "onepass", "fused", "ghost"]
FORMS: tuple[str, ...] = get_args(Form)

log = logging.getLogger(__name__)

MAX_GHOST_BYTES = 64 * 2**20
# ghost when T^2 (o + i) < factor o i, by the form that it would replace. By arithmetic the factor is 1; what a block
# costs in memory traffic raises it. CPU: `python -m grpo_sweeps.bench forms`, float32, 6 to 10 for widths 512 to 8192.
GHOST_FACTOR = {"blocks": 6.0, "onepass": 4.0, "fused": 1.0}
# Tokens up to which the fused kernel beats the written block: its products run at 680 TFLOP/s, the library's at 800.
MAX_FUSED_TOKENS = 1400
ONEPASS_DTYPES = (torch.float32, *HALF_TYPES)
MAX_FUSED_ROWS = 8
UNUSABLE = "its kernel cannot be compiled or failed its trial here (the log says why)"


@functools.cache
def kernels(name: Literal["onepass", "fused", "norm_rows"]) -> ModuleType | None:
    """The module of a kernel, or None (said once) where it cannot be imported, compiled or trusted: each is tried on a
    small case first, since compilers and drivers change under it."""
    try:
        module = importlib.import_module(f"grpo_sweeps.engine.gram.kernels.{name}")
        module.trial()
    except Exception as error:  # a compiler may raise anything, and a slower form is there
        line = (str(error).strip().splitlines() or [""])[-1]
        log.warning("the %s kernel cannot be used (%s: %s): a slower form stands in", name, type(error).__name__, line)
        return None
    return module


def begin_compiling(groups: Sequence[tuple[int, int]], dtype: torch.dtype, device: torch.device) -> None:
    """Begin, in the background, with the kernels that groups, (rows, groups per block), take if their widths allow."""
    fits = [(R, count) for R, count in groups if R <= MAX_FUSED_ROWS]
    if fits and device.type == "cuda" and dtype in HALF_TYPES and torch.cuda.get_device_capability(device)[0] == 9:
        importlib.import_module("grpo_sweeps.engine.gram.kernels.fused").begin(fits, dtype)


@functools.cache
def refuse_shape(form: str, reason: str) -> None:
    """Say, once for each reason, that the reference stands in for a kernel that cannot take a shape."""
    line = (reason.strip().splitlines() or ["no reason given"])[-1]
    log.warning("the %s kernel cannot take every shape of this model (%s): the reference stands in there", form, line)


def why_not(form: str, o: int, i: int, largest_unit: int, dtype: torch.dtype, device: torch.device) -> str:
    """'' where `form` can measure a weight (o, i), else the reason in a few words."""
    if form in ("blocks", "ghost"):
        return ""
    if device.type != "cuda":
        return f"{form} needs CUDA, not {device.type}"
    if form == "onepass":
        if dtype not in ONEPASS_DTYPES:
            return f"onepass does not know {dtype}"
        return "" if kernels("onepass") else UNUSABLE
    if dtype not in HALF_TYPES:
        return f"fused needs a half type, not {dtype}"
    if largest_unit > MAX_FUSED_ROWS:
        return f"fused takes up to {MAX_FUSED_ROWS} rows a group, not {largest_unit}"
    if o % 8 or i % 8:
        return f"fused needs widths that are multiples of 8, not {o} and {i}"
    if torch.cuda.get_device_capability(device)[0] != 9:
        return f"fused needs a Hopper card, not {torch.cuda.get_device_name(device)}"
    return "" if kernels("fused") else UNUSABLE


def prefer_ghost(instead_of: str, T: int, o: int, i: int, largest_unit: int, dtype: torch.dtype) -> bool:
    """T counts padding, which is multiplied like everything else."""
    pair_bytes = (largest_unit * T) ** 2 * accumulation_dtype(dtype).itemsize
    return T * T * (o + i) < GHOST_FACTOR[instead_of] * o * i and pair_bytes <= MAX_GHOST_BYTES


@functools.cache
def choose_form(
    form: Form, T: int, o: int, i: int, largest_unit: int, dtype: torch.dtype, device: torch.device, whole: bool = True
) -> str:
    """The form for one weight (o, i) and T tokens a row; anything but "auto" is taken as asked for.

    whole: all output rows are at hand; the ghost form needs them (the head brings the vocabulary block by block, and
    an asked-for ghost form is replaced there). Raises GramError where the form asked for cannot be had.
    """
    if form != "auto" and (form != "ghost" or whole):
        reason = why_not(form, o, i, largest_unit, dtype, device)
        if reason:
            raise GramError(f"form={form}: {reason}")
        return form
    candidates = ["onepass", "fused"] if T > MAX_FUSED_TOKENS else ["fused", "onepass"]
    best = next((c for c in candidates if not why_not(c, o, i, largest_unit, dtype, device)), "blocks")
    return "ghost" if whole and prefer_ghost(best, T, o, i, largest_unit, dtype) else best
