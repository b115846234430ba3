"""What the report says of the design of a sweep: the best group size, pools of a fixed policy, how many prompts."""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd

from grpo_sweeps.publish.drawing import Plot
from grpo_sweeps.report.design.best_size import best_size_table, best_sizes
from grpo_sweeps.report.design.pool import pool_studies, pool_table
from grpo_sweeps.report.design.power import needs, power_section, power_table
from grpo_sweeps.report.figures.group_size import best_size_figure, best_size_section
from grpo_sweeps.report.pool_page import pool_figure, pool_section
from grpo_sweeps.report.read.query import Sweep
from grpo_sweeps.report.section import Section


@dataclass(frozen=True)
class Design:
    """tables: by file name, without .csv. Pools and prompts are there where the sweep has what they need."""

    tables: dict[str, pd.DataFrame]
    sections: list[Section]
    plots: list[Plot]


def design(sweep: Sweep) -> Design:
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
