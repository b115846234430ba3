"""How the cost of the Gram grows with R and T: time of a measured step over a plain one at every pair of the two
lists, or along two lines of them, on one model. The JSON file is written after every point, so that a sweep that is
cut short loses nothing; the figure (see `growth_figure`) can be drawn again from it with from=path.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from grpo_sweeps.benchmarks.gram import makers
from grpo_sweeps.benchmarks.growth_figure import draw
from grpo_sweeps.benchmarks.options import GrowthOptions as Options
from grpo_sweeps.benchmarks.setup import (
    check_lengths,
    check_model,
    check_positive,
    environment,
    free_memory,
    model_config,
    prepare,
    random_batch,
    random_model,
    write_json,
)
from grpo_sweeps.benchmarks.timing import attempt, time_subjects
from grpo_sweeps.types import ConfigError


def run(options: Options, command: str) -> None:
    """Measure every point, or read them from=path; print them and draw them."""
    check(options)
    if options.from_:
        result = read(options.from_)
        for point in result["points"]:
            print_point(point)
    else:
        result = measure(options, command)
    if options.figure:
        draw(result, options.figure)


def check(options: Options) -> None:
    check_model(options)
    check_positive(repeats=options.repeats)
    for R in options.R:
        check_positive(R=R)
    check_lengths(options.prompt, options.T)
    if options.through != (0, 0) and not pairs_of(options):
        words = ",".join(map(str, options.through))
        raise ConfigError(f"bench: through={words}: two numbers are needed, one of R= and one of T=, or 0,0")
    if options.from_ and options.json:
        raise ConfigError(f"bench: json={options.json}: with from={options.from_} nothing is measured, leave it out")


def read(path: str) -> dict[str, Any]:
    """A file that an earlier `growth` wrote."""
    try:
        result = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"bench: from={path}: a JSON file of an earlier bench growth is needed ({error})") from None
    if not isinstance(result, dict) or result.get("benchmark") != "growth":
        raise ConfigError(f"bench: from={path}: a JSON file of an earlier bench growth is needed, this is another")
    return result


def measure(options: Options, command: str) -> dict[str, Any]:
    device = prepare(options)
    model = random_model(model_config(options.model), options.dtype, device, options.checkpointing)
    result = environment("growth", command, options, device)
    result |= {"parameters": sum(p.numel() for p in model.parameters()), "points": []}
    for R, T in pairs_of(options):
        result["points"].append(measured_point(options, model, device, R, T))
        print_point(result["points"][-1])
        write_json(options.json, result)
        free_memory()
    return result


def pairs_of(options: Options) -> list[tuple[int, int]]:
    """The pairs (R, T) to measure, in order; none where `through` goes through no pair."""
    pairs = list(itertools.product(sorted(set(options.R)), sorted(set(options.T))))
    if options.through == (0, 0):
        return pairs
    if options.through not in pairs:
        return []
    R0, T0 = options.through
    return [(R, T) for R, T in pairs if R0 == R or T0 == T]


def measured_point(options: Options, model: nn.Module, device: torch.device, R: int, T: int) -> dict[str, Any]:
    """R, T, plain and ours as in `gram`, or R, T and failed: the error that the first subject to fail gave."""

    def both() -> dict[str, Any]:
        batch = random_batch(model, R, 1, T, options.prompt)
        rows = time_subjects(makers(["plain", "ours"], model, batch, options), model, device, options.repeats)
        return {name: row.as_json() for name, row in rows.items()}

    found, failed = attempt(both, model)
    found = found or {}
    failed = failed or next((f"{name}: {row['failed']}" for name, row in found.items() if "failed" in row), "")
    return {"R": R, "T": T} | ({"failed": failed} if failed else found)


def print_point(point: dict[str, Any]) -> None:
    start = f"R={point['R']:<4}T={point['T']:<6}"
    if "failed" in point:
        print(f"{start}{point['failed']}", flush=True)
        return
    ours, plain = point["ours"], point["plain"]
    peaks = "" if ours["peak_mb"] is None else f"   peak MB {plain['peak_mb']:.0f} -> {ours['peak_mb']:.0f}"
    ratio = "{median:.3f} [{min:.3f}, {max:.3f}]".format(**ours["ratio"])
    print(f"{start}plain {plain['ms']['median']:9.1f} ms   ours/plain {ratio}{peaks}", flush=True)
