"""Block form against ghost form of one linear layer, over T: the number behind `GHOST_FACTOR` in
engine/gram/linear.py."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_sweeps.engine.gram.layout import RowLayout
from grpo_sweeps.engine.gram.linear import WeightSums, block_bytes_for
from grpo_sweeps.engine.gram.recorder import Workspace

SHAPES = ((512, 512), (1408, 512), (2048, 2048), (2048, 8192))
LENGTHS = (4, 8, 12, 16, 24, 32, 48, 64, 96, 128)


@dataclass(frozen=True)
class Options:
    """One layer (o, i) of SHAPES at a time, R rows; `repeats` timings each, the fastest counts."""

    R: int = 8
    device: str = "auto"
    dtype: str = "float32"
    repeats: int = 5


def run(options: Options) -> None:
    """Print both times for every shape and T, and the factor T^2 (o + i) / (o i) at which the ghost form stops
    paying."""
    name = options.device if options.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    device, dtype = torch.device(name), getattr(torch, options.dtype)
    layout = RowLayout.build([options.R], None, False, device)
    workspace = Workspace()
    print(f"{device}, {options.dtype}, R={options.R}; ms of the block and of the ghost form")
    for o, i in SHAPES:
        factor = 0.0
        for T in LENGTHS:
            y, x = (torch.randn(options.R, T, n, dtype=dtype, device=device) for n in (o, i))
            blocks, ghost = (fastest(form, y, x, layout, workspace, options.repeats) for form in ("blocks", "ghost"))
            if ghost < blocks:
                factor = T * T * (o + i) / (o * i)
            print(f"o={o:<6}i={i:<6}T={T:<5}blocks {1e3 * blocks:8.3f}   ghost {1e3 * ghost:8.3f}", flush=True)
            if ghost > 2 * blocks:
                break
        print(f"o={o:<6}i={i:<6}ghost pays up to T^2 (o + i) = {factor:.2f} o i")


def fastest(form: str, y: Tensor, x: Tensor, layout: RowLayout, workspace: Workspace, repeats: int) -> float:
    """Seconds of the fastest of `repeats` formations of Gram, weighted sum and its norm, after one to warm up."""
    weight = torch.empty(y.shape[2], x.shape[2], dtype=y.dtype, device=y.device)
    best = float("inf")
    for repeat in range(repeats + 1):
        sums = WeightSums(layout, weight, block_bytes_for(y.device), workspace)
        start = time.perf_counter()
        if form == "ghost":
            sums.add_ghost(y, x)
        else:
            sums.add(y, x)
        float(sums.sq_norm)  # waits for the device
        if repeat:
            best = min(best, time.perf_counter() - start)
    return best
