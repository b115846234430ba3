"""One report from one sweep: every file of reports/<sweep>/, each written whole or not at all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from grpo_sweeps.paper import ARXIV
from grpo_sweeps.publish.drawing import Plot
from grpo_sweeps.publish.formats import csv, latex, markdown, markdown_text
from grpo_sweeps.publish.page import Section, files_of, now, utc, versions, with_manifest, write
from grpo_sweeps.redaction import without_places
from grpo_sweeps.report.claims.premise import premise_section
from grpo_sweeps.report.claims.verdicts import Claim, claims_frame, claims_markdown, judge_claims
from grpo_sweeps.report.design.best_size import best_size_section, best_size_table, best_sizes
from grpo_sweeps.report.design.pool import pool_section, pool_studies, pool_table
from grpo_sweeps.report.design.power import needs, power_section, power_table
from grpo_sweeps.report.figures.by_k import by_k_figure, rank_by_k_plot
from grpo_sweeps.report.figures.by_step import curves_figures, heldout_plot, spectral_plot
from grpo_sweeps.report.figures.group_size import best_size_figure, pool_figure
from grpo_sweeps.report.figures.kept import drawn
from grpo_sweeps.report.figures.layers import layer_figure, update_figure
from grpo_sweeps.report.figures.rank_change import longitudinal_figure
from grpo_sweeps.report.page import render_page
from grpo_sweeps.report.read.query import ReportError, Sweep, load_sweep
from grpo_sweeps.report.remarks import check_commits, missing, wrong
from grpo_sweeps.report.tables import pooled as table
from grpo_sweeps.report.tables.estimators import estimator_markdown, estimator_section, estimator_table
from grpo_sweeps.report.tables.layers import layer_table, update_parts, update_steps
from grpo_sweeps.report.tables.logged import curve_table, float32_by_k, float32_section, float32_table
from grpo_sweeps.report.tables.pooled import headline
from grpo_sweeps.report.tables.sweeps import SIDE, differences, side_by_side, sweeps_sections
from grpo_sweeps.report.tables.trained import models, weights_in_words

CAPTION = (
    "Mean over mixed groups of the per-group value, with 95% intervals clustered by prompt and seed, cut to the values "
    "that a quantity can take (an effective rank from 1 to R): one that is the whole range says nothing. Paper: Table "
    "1 of "
    f"arXiv {ARXIV}. Null: effective rank of orthogonal scores of equal norm; the same with equal texts counted once; "
    "and with the measured norms as well."
)

DIGITS = 9
"""Of a number in a CSV file: what processors round differently stays out of it, so that records give the same bytes."""


def build(
    name: str | None,
    runs_dir: str | Path,
    out: str | Path | None,
    command: Sequence[str],
    commits: str | None = None,
    tell: Callable[[str], None] = lambda sentence: None,
    progress: Callable[[str], None] = lambda sentence: None,
    where: str | None = None,
) -> tuple[Path, list[Claim]]:
    """Write the report of a sweep (the newest when `name` is None) and return its folder and the claims.

    name: several sweeps with commas are reported on together. where: KEY=VALUE,... chooses runs.
    commits: "allow" reports on runs that several commits made together.
    tell: is given what looks wrong, one sentence each, once the report is written.
    progress: is given how far it is, in a few words, again and again.
    Raises ReportError when there is no such sweep, several commits made its runs, or `out` cannot be written to.
    """
    sweep = load_sweep(name, runs_dir, keep_parts=False, progress=progress, where=where)
    check_commits(sweep, commits)
    folder = report_folder(out, sweep.folder_name)
    progress("the claims are judged")
    claims = judge_claims(sweep)
    looks_wrong = wrong(sweep)
    files = contents(sweep, claims, command, looks_wrong, progress)
    try:
        write(folder, files)
    except OSError as error:
        raise ReportError(f"out={folder}: cannot be written to ({error.strerror}).") from error
    for sentence in looks_wrong:
        tell(sentence)
    return folder, claims


def report_folder(out: str | Path | None, sweep: str) -> Path:
    """Where the report of a sweep goes."""
    return Path(out) if out is not None else Path("reports") / sweep


def contents(
    sweep: Sweep,
    claims: list[Claim],
    command: Sequence[str],
    looks_wrong: Sequence[str] = (),
    progress: Callable[[str], None] = lambda sentence: None,
) -> dict[str, bytes]:
    """{file name: content} of the whole report."""
    tables = {"table1": table.table1(sweep), "ranks": table.ranks(sweep), "by_k": table.by_k(sweep)}
    tables["curves"] = curve_table(sweep)
    layers = layer_table(sweep)
    if len(layers):
        tables["layers"] = layers
    steps, parts = update_steps(sweep), update_parts(sweep)
    if len(steps) and len(parts):
        tables |= {"updates": steps, "update_layers": parts}
    about_design = design(sweep)
    tables |= about_design.tables
    estimators = estimator_table(sweep, progress)
    if len(estimators):
        tables["estimators"] = estimators
    in_float32, in_float32_by_k = float32_table(sweep), float32_by_k(sweep)
    if len(in_float32):
        tables["float32"] = in_float32
    if len(in_float32_by_k):
        tables["float32_by_k"] = in_float32_by_k
    sections = [*float32_section(in_float32, in_float32_by_k), *estimator_section(estimators), *premise_section(layers)]
    sections += about_design.sections
    header, rows = headline(tables["table1"], table.unjudged_arms(sweep))
    plots = curves_figures(sweep, tables["curves"])
    plots += [*spectral_plots(sweep, tables["by_k"], layers, steps, parts, tables["curves"]), *about_design.plots]
    progress("the figures are drawn")
    images = drawn(sweep, plots)
    lacking, weights = missing(sweep), weights_in_words(sweep)
    caption = f"{CAPTION} {table.evaluation_in_words(sweep)} {table.GAIN} {weights}".rstrip()
    if len(sweep.paths) > 1:
        differ, tables[SIDE] = differences(sweep), side_by_side(sweep)
        sections = [*sweeps_sections(sweep, differ, tables[SIDE]), *sections]
    texts = {f"{name}.csv": csv(whole_arms(sweep, frame), DIGITS) for name, frame in tables.items()}
    texts |= {
        "table1.md": markdown(header, rows) + f"\n{markdown_text(caption)}\n",
        "table1.tex": latex(header, rows, caption, f"tab:{sweep.folder_name}"),
        **({"estimators.md": estimator_markdown(estimators, weights)} if len(estimators) else {}),
        "claims.csv": csv(whole_arms(sweep, claims_frame(claims)), DIGITS),
        "claims.md": claims_markdown(claims, lacking, weights),
        "index.html": render_page(sweep, tables, claims, plots, images, lacking, sections, looks_wrong, weights),
    }
    return with_manifest(files_of(texts, images), manifest(sweep, command, lacking))


def whole_arms(sweep: Sweep, frame: pd.DataFrame) -> pd.DataFrame:
    """A table for a CSV file, in which the arms have their whole names."""
    if "arm" not in frame or not sweep.arms.whole:
        return frame
    return frame.assign(arm=frame["arm"].replace(dict(sweep.arms.whole)))


def manifest(sweep: Sweep, command: Sequence[str], lacking: Sequence[str]) -> dict[str, Any]:
    """Which runs, which code and which command made the report, in UTC; no host, user or environment is named."""
    runs = []
    for row in sweep.runs.to_dict("records"):
        run = str(row["run"])
        status = sweep.statuses[run]
        runs.append(
            {
                "identity": run, "name": row["name"], "arm": row["arm"], "R": row["R"], "seed": row["seed"],
                "state": row["state"], "step": row["step"], "total": row["total"], "sweep": row["sweep"],
                "error": status.error and without_places(status.error),
                "commit": status.commit, "dirty": status.dirty, "versions": status.versions,
                "command": without_places(status.command), "started": utc(status.started), "ended": utc(status.ended),
            }
        )  # fmt: skip
    return {
        "sweep": sweep.name, "where": sweep.where, "made": now(), "command": without_places(" ".join(command)),
        "versions": versions(), "commits": sorted({str(c) for c in sweep.runs["commit"].dropna()}),
        "arms_differ_in": list(sweep.arms.varies), "follow_R": list(sweep.arms.tied_to_R), "models": models(sweep),
        "runs": runs, "missing": list(lacking),
    }  # fmt: skip


def spectral_plots(
    sweep: Sweep,
    by_k: pd.DataFrame,
    layers: pd.DataFrame,
    steps: pd.DataFrame | None = None,
    parts: pd.DataFrame | None = None,
    curves: pd.DataFrame | None = None,
) -> list[Plot]:
    """The figures of spectra, accuracy, rewards and updates, not yet drawn, fig1 first.

    by_k, layers, steps, parts, curves: the tables of these names; what is drawn of them is there where they have rows.
    """
    return [
        spectral_plot(sweep, "fig1", "Effective rank by training step", "effective_rank", "effective rank"),
        spectral_plot(sweep, "fig2", "Top-1 fraction by training step", "top1_fraction", "top-1 fraction"),
        *heldout_plot(sweep, curves),
        *rank_by_k_plot(sweep, by_k),
        *layer_figure(sweep, layers),
        *by_k_figure(sweep, by_k),
        *longitudinal_figure(sweep),
        *(update_figure(sweep, steps, parts) if steps is not None and parts is not None else ()),
    ]


@dataclass(frozen=True)
class Design:
    """What the report says of the design of a sweep: best group size, pools of a fixed policy, how many prompts.

    tables: by file name, without .csv. Pools and prompts are there where the sweep has what they need.
    """

    tables: dict[str, pd.DataFrame]
    sections: list[Section]
    plots: list[Plot]


def design(sweep: Sweep) -> Design:
    """The tables, sections and figures of `Design`."""
    sizes = best_sizes(sweep)
    made = Design({"best_size": best_size_table(sizes)}, [best_size_section(sizes)], best_size_figure(sweep, sizes))
    if studies := pool_studies(sweep, sizes):
        made.tables["pool"] = pool_table(studies)
        made.sections.append(pool_section(studies))
        made.plots.extend(pool_figure(sweep, studies))
    if found := needs(sweep, sizes):
        made.tables["power"] = power_table(found)
        made.sections.append(power_section(found))
    return made
