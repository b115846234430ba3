"""Sub-groups of a fixed policy's pools as the report shows them: a section of the page and a figure."""

from __future__ import annotations

import math

import pandas as pd
from matplotlib.axes import Axes

from grpo_sweeps.publish.drawing import LINES, MARKERS, Panel, Plot, arm_title, finish, styles
from grpo_sweeps.publish.formats import number, with_interval
from grpo_sweeps.report.claims.finding import figures
from grpo_sweeps.report.design.pool import PoolStudy
from grpo_sweeps.report.figures.group_size import shown
from grpo_sweeps.report.measure.pool import ESTIMATORS, STD_EPS, SUBSETS
from grpo_sweeps.report.read.query import Sweep
from grpo_sweeps.report.section import Section

NAME = "pool"
WORDS = (
    "Runs of a fixed policy: each group is a pool, and any R' of its rollouts are a group of that size. Shares, "
    "spectra and errors at R' are means over a pool's sub-groups, then over pools, those of equal rewards as zeros.",
    "“Error” is N times the mean squared error of a step of N rollouts in groups of R', against the gradient of the "
    "average objective; its least size is found here without the formula, among the sizes of the table. “Own prompt” "
    "is the mean squared error of one group's gradient against its own prompt's, “cosine” that with it, which no scale "
    "changes.",
)


def pool_section(studies: list[PoolStudy]) -> Section:
    """The table of the page: leave-one-out, and std scaling's cosine beside it; all else is in pool.csv."""
    arms = len({study.arm for study in studies}) > 1
    header = (
        "R", "R'", "mixed", "effective rank", "top-1 fraction", "participation ratio", "error", "own prompt", "cosine",
        "cosine, std",
    )  # fmt: skip
    rows = [((study.arm,) if arms else ()) + row for study in studies for row in _rows(study)]
    after = tuple(found_words(study, arms) for study in studies)
    notes = (
        f"Error, own prompt and cosine: leave-one-out. Std scaling: ddof 1, eps {STD_EPS:g}; against the average "
        "objective its error needs products of different prompts' gradients, which no record has. Sub-groups one by "
        f"one (spectra, std): all where there are at most {SUBSETS}, else {SUBSETS} drawn ones of each pool.",
    )
    lead = ("arm",) if arms else ()
    return Section(
        NAME, "Group sizes at a fixed policy", WORDS, (*lead, *header), tuple(rows), after + notes, ("pool.csv",)
    )


def _rows(study: PoolStudy) -> list[tuple[str, ...]]:
    rows = []
    for size, part in study.table.groupby("size"):
        of = {str(row["estimator"]): row for row in part.to_dict("records")}
        row = of["leave-one-out"]

        def cell(name: str, row: dict = row) -> str:
            return with_interval(row[name], row[f"{name}_low"], row[f"{name}_high"])

        rows.append(
            (
                str(study.R), str(size), cell("mixed"), cell("effective_rank"), cell("top1_fraction"),
                cell("participation_ratio"), *(_figures(row, name) for name in ("error", "error_prompt")),
                number(row["cosine"]), number(of["std"]["cosine"]),
            )
        )  # fmt: skip
    return rows


def _figures(row: dict, name: str) -> str:
    return figures(row[name], row[f"{name}_low"], row[f"{name}_high"])


def found_words(study: PoolStudy, arms: bool) -> str:
    """The size found, its interval, and the predicted one."""
    where = f"{study.arm}, R = {study.R}" if arms else f"R = {study.R}"
    if math.isnan(study.found):
        return (
            f"{where}: the best size cannot be decided from these runs: ||E grad J||² needs estimator=grpo or rloo "
            "with aggregation=sum and steps of two groups or more."
        )
    ends = "" if math.isnan(study.low) else f", 95% interval {study.low:g} to {study.high:g}"
    beyond = " (the whole pool: the best size may be larger)" if study.at_the_end else ""
    formula = shown(study.predicted, "best_R")
    return f"{where}: least error found at R' = {study.found:g}{beyond}{ends}; by the formula R* = {formula}."


def pool_figure(sweep: Sweep, studies: list[PoolStudy]) -> list[Plot]:
    """Two panels an arm and R: error by size with the predicted curve's R*, and effective rank by size."""
    panels = []
    for study in studies:
        title = ", ".join(t for t in (arm_title(sweep, study.arm), f"pools of {study.R}") if t)
        for what, draw in (("error", _draw_error), ("cosine", _draw_cosine)):

            def drawing(ax: Axes, study: PoolStudy = study, draw=draw) -> None:  # type: ignore[no-untyped-def]
                draw(ax, sweep, study)

            panels.append(
                Panel(f"{title}: {what}", f"{what} by size of the sub-group. {found_words(study, True)}", drawing)
            )
    if not panels:
        return []
    caption = (
        "Sub-groups of R' rollouts out of the pools of a fixed policy. Error: N times the mean squared error of the "
        "leave-one-out gradient at N rollouts, with 95% bars by drawing steps with replacement; dashed: R* by the "
        "formula. Cosine of one group's gradient with its prompt's, by estimator."
    )
    return [Plot(NAME, "Group sizes at a fixed policy", caption, tuple(panels))]


def _draw_error(ax: Axes, sweep: Sweep, study: PoolStudy) -> None:
    rows = study.table[study.table["estimator"] == "leave-one-out"].dropna(subset=["error"])
    style = styles(sweep)[study.R]
    if len(rows):
        known = rows[["error_low", "error_high"]].notna().all(axis=1).all()
        bars = [rows["error"] - rows["error_low"], rows["error_high"] - rows["error"]] if known else None
        ax.errorbar(
            rows["size"], rows["error"], yerr=None if bars is None else [b.clip(lower=0) for b in bars],
            color=style.color, marker=style.marker, ls=style.line, capsize=2, elinewidth=1, label=f"R = {study.R}",
        )  # fmt: skip
        best = study.predicted.values.get("best_R", math.inf)
        if best <= study.R:
            ax.axvline(best, color="0.35", lw=0.9, ls="--", label="R* by the formula")
    finish(ax, "size R' of the sub-group", "N × mean squared error", whole=True)


def _draw_cosine(ax: Axes, sweep: Sweep, study: PoolStudy) -> None:
    style = styles(sweep)[study.R]
    for i, estimator in enumerate(e for e in ESTIMATORS if e != "group mean"):  # which is leave-one-out times a factor
        rows: pd.DataFrame = study.table[study.table["estimator"] == estimator].dropna(subset=["cosine"])
        if len(rows):
            label = f"R = {study.R}, {estimator}"
            ax.plot(rows["size"], rows["cosine"], color=style.color, ls=LINES[i], marker=MARKERS[i], label=label)
    finish(ax, "size R' of the sub-group", "cosine", whole=True)
