"""Forward and backward of one micro-batch with and without the Gram of its rows: time, memory and exactness of
GradientGram beside the other ways to the same numbers (see `subjects`).

Peak memory is that of one step beyond the weights and what was there before: on CUDA the allocator's high-water mark,
on a CPU the resident set's, each subject in a process of its own. The error of a Gram is its relative Frobenius
distance from float64 rows of the same weights, on two small layers of the same architecture in the chosen dtype.
"""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from grpo_sweeps.benchmarks.options import GramOptions, ModelOptions
from grpo_sweeps.benchmarks.setup import (
    Batch,
    check_choice,
    check_lengths,
    check_model,
    check_positive,
    drop_grads,
    environment,
    free_memory,
    model_config,
    prepare,
    random_batch,
    random_model,
    small_config,
    write_json,
)
from grpo_sweeps.benchmarks.subjects import SUBJECTS, Subject, autograd_gram, frobenius_error
from grpo_sweeps.benchmarks.timing import attempt, join_notes, resident_growth, time_subjects
from grpo_sweeps.cli import written

SMALL_T = 128
SMALL_ROW_BYTES = 4 * 2**30


def run(options: GramOptions, command: str) -> None:
    """Print the comparison; with json=path also write it."""
    check(options)
    device = prepare(options)
    if options.peak_of:
        print(json.dumps(child_growth(options, device)))
        return
    names = list(SUBJECTS) if "all" in options.subjects else list(options.subjects)
    errors = small_errors(options, names, device)
    free_memory()
    model = random_model(model_config(options.model), options.dtype, device, options.checkpointing)
    batch = random_batch(model, options.R, options.groups, options.T, options.prompt)
    apart = [name for name in names if SUBJECTS[name].apart]
    rows = time_subjects(makers(names, model, batch, options), model, device, options.repeats, apart)
    parameters = sum(p.numel() for p in model.parameters())
    for name, row in rows.items():
        error, problem = errors[name]
        row.error = error
        if problem and not row.failed:
            row.note = join_notes(row.note, f"small case: {problem}")
        if device.type != "cuda" and not row.failed:
            row.peak_mb, problem = peak_of_child(replace(options, peak_of=name, json=""))
            row.note = join_notes(row.note, problem)
    result = environment("gram", command, options, device) | {"parameters": parameters}
    result["subjects"] = {name: row.as_json() for name, row in rows.items()}
    write_json(options.json, result)
    print_table(result)


def check(options: GramOptions) -> None:
    check_model(options)
    for name in options.subjects:
        check_choice("subjects", name, (*SUBJECTS, "all"))
    if options.peak_of:
        check_choice("peak_of", options.peak_of, tuple(SUBJECTS))
    check_positive(R=options.R, groups=options.groups, repeats=options.repeats)
    check_lengths(options.prompt, [options.T])


def makers(names: list[str], model: nn.Module, batch: Batch, options: ModelOptions) -> dict[str, Callable[[], Subject]]:
    """A function per subject that makes it."""
    return {name: partial(SUBJECTS[name], model, batch, options.form, options.block_bytes) for name in names}


def small_errors(options: GramOptions, names: list[str], device: torch.device) -> dict[str, tuple[float | None, str]]:
    """By subject: (relative Frobenius error of its Gram, ""), or (None, what went wrong); ("" where it makes no
    Gram)."""
    model = random_model(small_config(options.model), options.dtype, device, options.checkpointing)
    T = min(options.T, SMALL_T)
    batch = random_batch(model, options.R, options.groups, T, min(options.prompt, T - 1))
    exact = autograd_gram(copy.deepcopy(model).double(), batch, SMALL_ROW_BYTES)
    errors = {}
    for name, make in makers(names, model, batch, options).items():

        def one(make: Callable[[], Subject] = make) -> float | None:
            subject = make()
            with subject.attached():
                found = subject.step()
            return None if found is None else frobenius_error(found, exact)

        errors[name] = attempt(one, model)
        drop_grads(model)
    return errors


def child_growth(options: GramOptions, device: torch.device) -> float | None:
    model = random_model(model_config(options.model), options.dtype, device, options.checkpointing)
    batch = random_batch(model, options.R, options.groups, options.T, options.prompt)
    return resident_growth(makers([options.peak_of], model, batch, options)[options.peak_of]())


def peak_of_child(options: GramOptions) -> tuple[float | None, str]:
    """The peak of a subject in a process of its own: (MB, ""), or (None, why there is none)."""
    words = [f"{key}={written(value)}" for key, value in asdict(options).items()]
    command = [sys.executable, "-m", "grpo_sweeps.bench", "gram", *words]
    # Blocks above 64 KB go back to the system when freed: what is resident is what tensors hold, not what malloc kept.
    environ = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(2**16)}
    done = subprocess.run(command, capture_output=True, text=True, env=environ)
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or [""]
        return None, f"peak not measured: exit code {done.returncode} {last[0]}".rstrip()
    return json.loads(done.stdout.splitlines()[-1]), ""


def print_table(result: dict[str, Any]) -> None:
    o = result["options"]
    print(
        f"{o['model']} ({result['parameters'] / 1e6:.1f} M parameters, {o['dtype']}), {o['groups']} x R={o['R']}, "
        f"T={o['T']}, checkpointing {'on' if o['checkpointing'] else 'off'}, {result['device']}, "
        f"torch {result['torch']}; median [min, max] of {o['repeats']}"
    )
    header = (
        f"{'subject':<10}{'ms':>10}{'[min, max]':>24}{'ratio':>9}{'[min, max]':>18}{'peak MB':>10}{'error of K':>12}"
    )
    print(f"{header}  note")
    for name, row in result["subjects"].items():
        print(f"{name:<10}{row['failed']}" if "failed" in row else table_row(name, row))


def table_row(name: str, row: dict[str, Any]) -> str:
    ms, ratio = row["ms"], row.get("ratio")
    cells = f"{name:<10}{ms['median']:>10.1f}{'[{min:.1f}, {max:.1f}]'.format(**ms):>24}"
    if ratio is None:
        cells += f"{'-':>9}{'':>18}"
    else:
        cells += f"{ratio['median']:>9.3f}{'[{min:.3f}, {max:.3f}]'.format(**ratio):>18}"
    cells += f"{'-' if row['peak_mb'] is None else round(row['peak_mb']):>10}"
    cells += f"{'-' if row['error'] is None else '{:.1e}'.format(row['error']):>12}"
    return f"{cells}  {row['note']}".rstrip()
