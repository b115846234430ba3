"""One report from one sweep: every file of reports/<sweep>/, each written whole or not at all."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from grpo_sweeps.files import write_bytes
from grpo_sweeps.publish.drawing import render
from grpo_sweeps.publish.formats import csv, headline, latex, markdown
from grpo_sweeps.report.about_design import design
from grpo_sweeps.report.claims.verdicts import Claim, claims_frame, claims_markdown, judge_claims
from grpo_sweeps.report.commits import check_commits
from grpo_sweeps.report.figures.by_step import curves_figures
from grpo_sweeps.report.figures.listed import figures
from grpo_sweeps.report.float32 import float32_section, float32_table
from grpo_sweeps.report.manifest import manifest
from grpo_sweeps.report.page import render_page
from grpo_sweeps.report.read.query import ReportError, Sweep, load_sweep
from grpo_sweeps.report.remarks import missing
from grpo_sweeps.report.tables import pooled as table
from grpo_sweeps.report.tables.layers import layer_table
from grpo_sweeps.report.tables.logged import curve_table
from grpo_sweeps.report.updates import update_parts, update_steps
from grpo_sweeps.report.wrong import wrong

CAPTION = (
    "Mean over mixed groups of the per-group value, with 95% intervals clustered by prompt and seed. Paper: Table 1 of "
    "arXiv 2606.29238. Null: effective rank of orthogonal scores of equal norm. Accuracy: held-out problems, sampled "
    "as in training; gain: last less first evaluation, paired by problem."
)


def build(
    name: str | None,
    runs_dir: str | Path,
    out: str | Path | None,
    command: Sequence[str],
    commits: str | None = None,
    tell: Callable[[str], None] = lambda sentence: None,
) -> tuple[Path, list[Claim]]:
    """Write the report of a sweep (the newest when `name` is None) and return its folder and the claims.

    commits: "allow" reports on runs that several commits made together.
    tell: is given what looks wrong, a sentence each, once the report is written.
    Raises ReportError when there is no such sweep, several commits made its runs, or `out` cannot be written to.
    """
    sweep = load_sweep(name, runs_dir, keep_parts=False)
    check_commits(sweep, commits)
    folder = Path(out) if out is not None else Path("reports") / sweep.name
    claims = judge_claims(sweep)
    looks_wrong = wrong(sweep)
    files = contents(sweep, claims, command, looks_wrong)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file_name, content in files.items():
            write_bytes(folder / file_name, content)
    except OSError as error:
        raise ReportError(f"out={folder}: cannot be written to ({error.strerror}).") from error
    for sentence in looks_wrong:
        tell(sentence)
    return folder, claims


def contents(
    sweep: Sweep, claims: list[Claim], command: Sequence[str], looks_wrong: Sequence[str] = ()
) -> dict[str, bytes]:
    """{file name: bytes} of the whole report."""
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
    in_float32 = float32_table(sweep)
    if len(in_float32):
        tables["float32"] = in_float32
    sections = [*float32_section(in_float32), *about_design.sections]
    header, rows = headline(tables["table1"])
    plots = curves_figures(sweep, tables["curves"])
    plots += [*figures(sweep, tables["by_k"], layers, steps, parts), *about_design.plots]
    images = {name: data for plot in plots for name, data in render(plot).items()}
    lacking = missing(sweep)
    texts = {f"{name}.csv": csv(frame) for name, frame in tables.items()}
    texts |= {
        "table1.md": markdown(header, rows) + f"\n{CAPTION}\n",
        "table1.tex": latex(header, rows, CAPTION, f"tab:{sweep.name}"),
        "claims.csv": csv(claims_frame(claims)),
        "claims.md": claims_markdown(claims),
        "index.html": render_page(sweep, tables, claims, plots, images, lacking, sections, looks_wrong),
    }
    files = {name: data for name, data in images.items() if not name.endswith(".svg")}
    files |= {name: text.encode("utf-8") for name, text in texts.items()}
    names = [*files, "manifest.json"]
    record = manifest(sweep, command, names, lacking)
    return files | {"manifest.json": (json.dumps(record, indent=1, ensure_ascii=False) + "\n").encode("utf-8")}
