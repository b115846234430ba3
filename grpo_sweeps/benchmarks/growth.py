"""How the cost of the Gram grows with R and T: time of a measured step over a plain one at every pair of the two
lists, or along two lines of them, on one model. The JSON file is written after every point, so that a sweep that is
cut short loses nothing; the figure can be drawn again from it with from=path.

The figure shows the extra cost, ratio - 1, against R at fixed T and against T at fixed R, beside the floors. Floors,
relative to a plain forward and backward: arithmetic R/(3T) for the R x R products of every layer, half of it by their
symmetry; memory traffic 100/T to 200/T when every block of per-row gradients is written and read once (the card's
clock decides). A kernel that keeps the blocks in registers is bound by neither.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import seaborn as sns
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
from torch import nn

from grpo_sweeps.benchmarks.gram import makers
from grpo_sweeps.benchmarks.options import GrowthOptions
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

PANEL = (2.5, 2.1)  # inches; three make the width of a page
COLUMNS = 3
DPI = 200
RC: dict[Any, Any] = {
    "font.size": 8, "axes.labelsize": 8, "axes.titlesize": 9, "xtick.labelsize": 7, "ytick.labelsize": 7,
    "pdf.fonttype": 42, "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": "0.3",
    "lines.linewidth": 1.4, "lines.markersize": 4, "font.family": "DejaVu Sans",
}  # fmt: skip
BLUE = sns.color_palette("colorblind")[0]
LINEAR = 0.01  # below this the axis is linear: a range may reach below 0
TICKS = [sign * tick for tick in (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0) for sign in (1, -1)] + [0.0]
Label = tuple[float, str, Any]  # height, text, colour


def run(options: GrowthOptions, command: str) -> None:
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


def check(options: GrowthOptions) -> None:
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
    """The contents of a file that an earlier `growth` wrote."""
    try:
        result = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"bench: from={path}: a JSON file of an earlier bench growth is needed ({error})") from None
    if not isinstance(result, dict) or result.get("benchmark") != "growth":
        raise ConfigError(f"bench: from={path}: a JSON file of an earlier bench growth is needed, this is another")
    return result


def measure(options: GrowthOptions, command: str) -> dict[str, Any]:
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


def pairs_of(options: GrowthOptions) -> list[tuple[int, int]]:
    """The pairs (R, T) to measure, in order; none where `through` names no pair."""
    pairs = list(itertools.product(sorted(set(options.R)), sorted(set(options.T))))
    if options.through == (0, 0):
        return pairs
    if options.through not in pairs:
        return []
    R0, T0 = options.through
    return [(R, T) for R, T in pairs if R0 == R or T0 == T]


def measured_point(options: GrowthOptions, model: nn.Module, device: torch.device, R: int, T: int) -> dict[str, Any]:
    """R, T, plain and ours as in `gram`, or R, T and failed, the error of the first subject that failed."""

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


def draw(result: dict[str, Any], path: str) -> list[Path]:
    """Write path.png and path.pdf from what `growth` measured: one panel per T, then, on new lines, one per R; two
    panels where only two lines through the pairs were measured."""
    points = [point for point in result["points"] if "failed" not in point]
    Rs, Ts = (sorted({point[key] for point in points}) for key in ("R", "T"))
    if any(through := result["options"].get("through", ())):
        Rs, Ts = (sorted({kept} & set(found)) for kept, found in zip(through, (Rs, Ts), strict=True))
    panels: list[tuple[str, str, int] | None] = [("R", "T", T) for T in Ts]
    columns = 2 if len(Ts) == len(Rs) == 1 else COLUMNS  # these two stand side by side
    panels += [None] * (-len(panels) % columns if columns == COLUMNS else 0)
    panels += [("T", "R", R) for R in Rs]
    lines = max(1, -(-len(panels) // columns))
    size = (COLUMNS * PANEL[0], lines * PANEL[1] * COLUMNS / columns + 0.7)
    with plt.rc_context(RC):
        figure, axes = plt.subplots(lines, columns, figsize=size, sharey=True, squeeze=False)
        for ax, panel in zip(axes.flat, panels + [None] * (lines * columns - len(panels)), strict=True):
            if panel is None:
                ax.set_axis_off()
            else:
                draw_panel(ax, points, *panel)
        for ax in axes[:, 0]:
            ax.set_ylabel("extra time, of a plain step")
        foot = write_texts(figure, result)
        figure.tight_layout(rect=(0, foot / size[1], 1, 1))
        paths = [Path(f"{path}.{suffix}") for suffix in ("png", "pdf")]
        paths[0].parent.mkdir(parents=True, exist_ok=True)
        for target in paths:
            figure.savefig(target, dpi=DPI)
        plt.close(figure)
    return paths


def draw_panel(ax: Axes, points: list[dict[str, Any]], x_key: str, fixed_key: str, fixed: int) -> None:
    """Measured medians with their range, and the floors, each named at its right end."""
    xs = np.array(sorted({p[x_key] for p in points}), dtype=float)
    R, T = (xs, np.full_like(xs, fixed)) if x_key == "R" else (np.full_like(xs, fixed), xs)
    bottom, top = limits(points)
    ax.set_xscale("log")
    ax.set_yscale("symlog", linthresh=LINEAR, linscale=0.6)
    ax.set(ylim=(bottom, top), yticks=[tick for tick in TICKS if bottom <= tick <= top])
    ax.yaxis.set_major_formatter(PercentFormatter(1))
    ax.axhline(0, color="0.8", linewidth=0.6)
    ax.fill_between(xs, 100 / T, 200 / T, color="0.86", linewidth=0)
    ax.plot(xs, R / (3 * T), color="0.35", linestyle="--", linewidth=1)
    ax.plot(xs, R / (6 * T), color="0.35", linestyle=":", linewidth=1)
    labels: list[Label] = [(141 / T[-1], "100/T–200/T", "0.3")]
    labels += [(R[-1] / (n * T[-1]), f"R/{n}T", "0.3") for n in (3, 6)]
    shown = [p for p in points if p[fixed_key] == fixed]
    if shown:
        shown.sort(key=lambda p: p[x_key])
        median, low, high = (np.array([p["ours"]["ratio"][key] - 1 for p in shown]) for key in ("median", "min", "max"))
        x = np.array([p[x_key] for p in shown], dtype=float)
        ax.errorbar(x, median, [median - low, high - median], color=BLUE, marker="o", capsize=2)
        labels.append((median[-1], "measured", BLUE))
    ax.set_xticks(xs, [f"{int(x)}" for x in xs])
    ax.minorticks_off()
    ax.set_xlabel({"R": "rows of the group, R", "T": "tokens of a row, T"}[x_key])
    ax.set_title(f"{fixed_key} = {fixed}", loc="left")
    name_lines(ax, labels)


def limits(points: list[dict[str, Any]]) -> tuple[float, float]:
    """Lower and upper limit of the extra cost for all panels: every floor and every range lies inside."""
    extra = [200 / p["T"] for p in points] + [p["ours"]["ratio"][key] - 1 for p in points for key in ("min", "max")]
    return (1.3 * min(extra) if min(extra) < 0 else 0.0), 1.5 * max(extra)


def name_lines(ax: Axes, labels: list[Label]) -> None:
    """Write texts to the right of the axes at the ends of their lines, moved up where they would overlap."""
    free_from = -1.0
    for y, text, colour in sorted(labels, key=lambda label: label[0]):
        height = ax.transAxes.inverted().transform(ax.transData.transform((1.0, y)))[1]
        at = max(float(height), free_from)
        ax.text(1.0, at, text, transform=ax.transAxes, color=colour, size=6.5, va="center", ha="left")
        free_from = at + 0.085


def missing(result: dict[str, Any]) -> list[str]:
    """The points that no panel shows, each with the reason."""
    names = []
    for point in result["points"]:
        where = f"R={point['R']} T={point['T']}"
        if "failed" in point:
            memory = "out of memory" if "OutOfMemoryError" in point["failed"] else "failed"
            names.append(f"{where} {memory}")
    return names


def write_texts(figure: Figure, result: dict[str, Any]) -> float:
    """Write what was measured above the panels and the points that are not shown below; return the latter's inches."""
    o = result["options"]
    text = (
        f"{o['model']}, {o['dtype']}, checkpointing {'on' if o['checkpointing'] else 'off'}, {result['device']}; "
        f"medians of {o['repeats']} with their range.\nFloors: arithmetic R/3T, by symmetry R/6T; memory traffic "
        "100/T–200/T (band) where blocks are written and read once."
    )
    figure.suptitle(text, size=8, x=0.01, ha="left")
    names = missing(result)
    if not names:
        return 0.0
    rows = [", ".join(names[i : i + 3]) for i in range(0, len(names), 3)]
    figure.text(0.01, 0.005, "Not shown: " + ",\n".join(rows), size=7, va="bottom")
    return 0.15 * len(rows) + 0.05
