"""Every way to form one weight's Gram, over shapes and T: the measurements behind the rule in engine/gram/linear.py."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from grpo_sweeps.benchmarks.options import FormsOptions
from grpo_sweeps.benchmarks.setup import (
    DTYPES,
    check_choice,
    check_positive,
    device_name,
    device_of,
    environment,
    synchronize,
    write_json,
)
from grpo_sweeps.engine.gram.layout import RowLayout, SlotPlan
from grpo_sweeps.engine.gram.linear import FORMS, WeightSums, block_bytes_for, choose_form, why_not
from grpo_sweeps.engine.gram.recorder import Workspace

SHAPES = {
    "cpu": ((512, 512), (1408, 512), (2048, 2048)),
    "cuda": ((128, 896), (896, 896), (4864, 896), (1024, 3072), (3072, 3072), (9216, 3072)),
}


def run(options: FormsOptions, command: str) -> None:
    """Print one line per shape and T: ms of the ordinary weight-gradient product ("plain") and of every form, and the
    form that the rule takes."""
    check_choice("dtype", options.dtype, list(DTYPES))
    check_positive(R=options.R, repeats=options.repeats, T=min(options.T))
    device = device_of(options.device)
    layout = RowLayout.build([options.R], None, False, device)
    names = ["plain", *(form for form in FORMS if form != "auto")]
    print(f"{device_name(device)}, {options.dtype}, R={options.R}; ms, medians of {options.repeats}")
    print(f"{'o':>6}{'i':>6}{'T':>6}" + "".join(f"{name:>10}" for name in names) + "   the rule takes")
    rows = []
    for o, i in SHAPES[device.type]:
        for T in options.T:
            row = measure(o, i, T, layout, DTYPES[options.dtype], options.repeats)
            rows.append(row)
            cells = "".join(f"{row[name]:>10.3f}" if name in row else f"{'-':>10}" for name in names)
            print(f"{o:>6}{i:>6}{T:>6}{cells}   {row['rule']}", flush=True)
    write_json(options.json, environment("forms", command, options, device) | {"rows": rows})


def measure(o: int, i: int, T: int, layout: RowLayout, dtype: torch.dtype, repeats: int) -> dict[str, Any]:
    """Median ms of each form that can run, and the form that the rule takes."""
    device, R = layout.weights_B.device, layout.rows
    y, x = (torch.randn(R, T, n, device=device).to(dtype) for n in (o, i))
    weight = torch.empty(o, i, dtype=dtype, device=device)
    plan, workspace = SlotPlan.of(layout), Workspace()
    flat_y, flat_x = y.flatten(0, 1), x.flatten(0, 1)
    row: dict[str, Any] = {"o": o, "i": i, "T": T, "rule": choose_form("auto", T, o, i, R, dtype, device)}
    row["plain"] = median_ms(lambda: torch.mm(flat_y.T, flat_x), device, repeats)
    for form in FORMS:
        if form == "auto" or why_not(form, o, i, R, dtype, device) or (form == "ghost" and T > 256):
            continue

        def once(form: str = form) -> Tensor:
            sums = WeightSums(layout, plan, weight, form, block_bytes_for(device), workspace)
            sums.add(y, x)
            return sums.partial().values

        row[form] = median_ms(once, device, repeats)
    return row


def median_ms(step: Callable[[], Tensor], device: torch.device, repeats: int) -> float:
    """Median time from an idle device to an idle device: launches count where they take longer than the work."""
    times = []
    for repeat in range(repeats + 2):
        synchronize(device)
        begun = time.perf_counter()
        step()
        synchronize(device)
        if repeat >= 2:
            times.append(1e3 * (time.perf_counter() - begun))
    return statistics.median(times)
