"""The control as tables and a page: means over groups with 95% intervals, and the differences between kinds, paired by
the problems that they share."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from grpo_sweeps.config import RunConfig
from grpo_sweeps.control.measure import KINDS, QUANTITIES
from grpo_sweeps.maths.intervals import ANY, POSITIVE, mean_interval
from grpo_sweeps.publish.formats import csv, markdown, markdown_text, with_interval
from grpo_sweeps.publish.page import files_of, from_template, now, versions, with_manifest, write
from grpo_sweeps.redaction import without_places
from grpo_sweeps.tracking import provenance
from grpo_sweeps.tracking.weights import came_from, in_words

RANKS = ("effective_rank", "null_effective_rank", "unit_effective_rank", "different_texts")
DIGITS = 9  # as in a report's CSV files
PAIRS = (("one prompt", "one each"), ("solutions", "one each"))
COLUMNS = ("kind", "quantity", "mean", "low", "high", "groups")
WORDS = (
    "Each kind has R rows of weight 1 from the same problems: R completions of one problem, one completion of each of "
    "R problems, and the reference solutions of these. Values are means over groups with 95% intervals (Student's t "
    "over groups, cut to the values that a quantity can take); a difference is paired by group. An effective rank is "
    "never above its null; how far it lies below says how much the rows overlap, as independent directions do as well."
)


def table_of(frame: pd.DataFrame, R: int) -> pd.DataFrame:
    """control.csv: kind, quantity, mean, low, high, groups; a kind `a - b` is the paired difference of two."""
    by_kind = {kind: frame[frame["kind"] == kind].set_index("group").sort_index() for kind in KINDS}
    ranges = {name: (1.0, float(R)) for name in RANKS}
    ranges |= dict.fromkeys(("top1_fraction", "null_top1_fraction"), (1.0 / R, 1.0))
    ranges |= {"mean_cosine": (-1.0, 1.0), "norm_ratio": (1.0, float("inf")), "mean_length": POSITIVE}
    rows = []
    for quantity in QUANTITIES:
        sets = {kind: (part[quantity], ranges.get(quantity, ANY)) for kind, part in by_kind.items()}
        sets |= {f"{a} - {b}": (by_kind[a][quantity] - by_kind[b][quantity], ANY) for a, b in PAIRS}
        for kind, (values, allowed) in sets.items():
            found = mean_interval(values.to_numpy(dtype=float)).within(allowed)
            rows.append((kind, quantity, found.mean, found.low, found.high, found.n))
    return pd.DataFrame(rows, columns=list(COLUMNS))


def shown(table: pd.DataFrame) -> tuple[list[str], list[list[str]]]:
    """The table for a reader: one row per quantity, one column per kind and difference."""
    kinds = list(dict.fromkeys(table["kind"]))
    cells = {
        (row["kind"], row["quantity"]): with_interval(float(row["mean"]), float(row["low"]), float(row["high"]))
        for row in table.to_dict("records")
    }
    rows = [[words, *(cells[kind, name] for kind in kinds)] for name, words in QUANTITIES.items()]
    return ["quantity", *kinds], rows


def write_page(frame: pd.DataFrame, config: RunConfig, out: str, command: str) -> tuple[Path, pd.DataFrame]:
    """Write index.html, control.csv, control.md, groups.csv and manifest.json; the page's path and the table.

    Raises OSError where the folder cannot be written to.
    """
    table = table_of(frame, config.R)
    header, rows = shown(table)
    head = _head(frame, config)
    values: dict[str, Any] = {**head, "words": WORDS, "header": header, "rows": rows}
    below = markdown_text(f"{head['subtitle']}. {head['weights']} {WORDS}")
    texts = {
        "index.html": from_template(
            "grpo_sweeps.control", "control.html.j2", **values, command=without_places(command)
        ),
        "control.csv": csv(table, DIGITS),
        "control.md": f"{markdown(header, rows)}\n{below}\n",
        "groups.csv": csv(frame, DIGITS),
    }
    folder = Path(out or Path("reports") / f"control_{config.model.name}")
    write(folder, with_manifest(files_of(texts, {}), _manifest(config, command, head)))
    return folder / "index.html", table


def _head(frame: pd.DataFrame, config: RunConfig) -> Mapping[str, str]:
    source = {} if config.model.random else came_from(config.model.path, config.model.dtype)
    parts = [
        f"model {config.model.name}", f"task {config.task.name}", f"R = {config.R}",
        f"{frame['group'].nunique()} groups", f"temperature {config.rollout.temperature:g}",
        f"at most {config.rollout.max_new_tokens} tokens",
        f"seed {config.seed}",
    ]  # fmt: skip
    weights = f"Weights: {in_words(source)}." if source else ""
    return {"title": "A supervised control", "subtitle": " · ".join(parts), "weights": weights}


def _manifest(config: RunConfig, command: str, head: Mapping[str, str]) -> dict[str, Any]:
    """Which code, command, model and random numbers. It names no host and no user."""
    source = {} if config.model.random else came_from(config.model.path, config.model.dtype)
    return {
        "command": without_places(command), "commit": provenance.commit(), "dirty": provenance.dirty(),
        "versions": versions() | provenance.versions(), "made": now(), "setting": head["subtitle"],
        "model": {"name": config.model.name, "path": without_places(config.model.path), "dtype": config.model.dtype,
                  "came_from": source},
        "seeds": "row_seed(seed, 'control one prompt' or 'control one each', problem, ...) of engine/rollouts.py",
    }  # fmt: skip
