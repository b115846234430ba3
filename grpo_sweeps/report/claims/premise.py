"""Is the Gram of the head alone like that of all parameters? A method that reads the head's takes that for granted.

SALT (arXiv 2606.05800) reweighs a group by the leading directions of a Gram; the head's is the cheapest to have. For
each layer of the runs that kept Grams of parts, from layers.csv: the correlation of the entries off the diagonal, the
cosine of the leading eigenvectors, and the effective ranks side by side.
"""

from __future__ import annotations

import math

import pandas as pd

from grpo_sweeps.publish.formats import number, with_interval
from grpo_sweeps.publish.page import Section
from grpo_sweeps.report.claims import rules
from grpo_sweeps.report.measure.parts import HEAD, TIED

NAME = "premise"
HEADS = (HEAD, TIED)
ALIKE, NOT_ALIKE = "alike", "not alike"
WORDS = (
    "Methods that weigh rollouts by the directions that a group's gradients share (SALT, arXiv 2606.05800) need a "
    "Gram, and that of the head alone is the cheapest. Is a layer's Gram like that of all parameters?",
    f"Fixed before looking: {ALIKE} where the intervals of both the correlation and the cosine lie above "
    f"{rules.LIKE:g}, {NOT_ALIKE} where one of them lies below, else {rules.UNDECIDED}; nothing is said of fewer than "
    f"{rules.MIN_GROUPS} groups. A layer is part of the whole: the more of the energy it holds, the more alike they "
    "are for that reason alone.",
)
NOTES = (
    "Correlation: of K_ij between different texts, i < j, within a group. Cosine: of the leading eigenvectors of the "
    "two Grams. Effective rank: of diag(w) K diag(w). Means over mixed groups, 95% intervals clustered by prompt and "
    f"seed. {TIED} is one tied weight, whose gradient as an embedding cannot be told from that as a head.",
)


def verdict(row: dict) -> str:
    """ALIKE, NOT_ALIKE or undecided, by the rule of WORDS.

    >>> row = {"groups": 30, "correlation_low": 0.95, "correlation_high": 0.97, "cosine_low": 0.8, "cosine_high": 0.85}
    >>> verdict(row), verdict(row | {"cosine_high": 0.95}), verdict(row | {"cosine_low": 0.92, "cosine_high": 0.96})
    ('not alike', 'cannot be decided from these runs', 'alike')
    """
    lows, highs = ([float(row[f"{name}_{end}"]) for name in ("correlation", "cosine")] for end in ("low", "high"))
    if row["groups"] < rules.MIN_GROUPS or any(map(math.isnan, (*lows, *highs))):
        return rules.UNDECIDED
    if min(highs) < rules.LIKE:
        return NOT_ALIKE
    return ALIKE if min(lows) > rules.LIKE else rules.UNDECIDED


def premise_section(layers: pd.DataFrame) -> list[Section]:
    """The section from `tables.layers.layer_table`; none where no run kept the Gram of a head."""
    if not len(layers) or not layers.loc[layers["level"] == "layer", "layer"].isin(HEADS).any():
        return []
    arms = layers["arm"].nunique() > 1
    rows, said = [], []
    for (arm, R), part in layers.groupby(["arm", "R"], sort=False):
        whole = part[part["level"] == "whole"].iloc[0]
        for row in part[part["level"] == "layer"].to_dict("records"):
            correlation, cosine = (
                with_interval(row[name], row[f"{name}_low"], row[f"{name}_high"]) for name in ("correlation", "cosine")
            )
            ranks = number(row["effective_rank"]), number(float(whole["effective_rank"]))
            cells = (str(R), str(row["layer"]), number(row["energy_share"]), correlation, cosine, *ranks, verdict(row))
            rows.append((str(arm), *cells) if arms else cells)
            if row["layer"] in HEADS:
                where = f"{arm}, R = {R}" if arms else f"R = {R}"
                said.append(
                    f"{where}: the Gram of the {row['layer']} and the whole one: {verdict(row)}. Correlation "
                    f"{correlation}, cosine {cosine}, effective rank {ranks[0]} beside {ranks[1]}, with "
                    f"{row['energy_share']:.0%} of the energy."
                )
    header = (
        "R", "layer", "energy share", "correlation", "cosine of eigenvectors", "effective rank", "of the whole",
        "verdict",
    )  # fmt: skip
    lead = ("arm",) if arms else ()
    title = "Is the Gram of one layer like the whole one?"
    return [Section(NAME, title, WORDS, (*lead, *header), tuple(rows), (*said, *NOTES), ("layers.csv",))]
