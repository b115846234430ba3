"""The spectra of group records: which rows are equal, how exactly K is known, and what a step logs of them.

Records that say which rollouts have the same tokens (`same_as`) say in `floor` how exactly their K is the Gram of the
gradients that were applied. Older records do neither: rows of theirs count as equal by their cosine, and the `floor`
that they hold, the training dtype against a wider copy of the model, says nothing about K's own sums. Every run checks
w'Kw while it trains, within a tolerance of its dtype (`floor.tolerance`), which stands in for the precision of K.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from grpo_sweeps.spectra.equal import Labels, same_as_by_cosine, same_rows_of_the_loss
from grpo_sweeps.spectra.floor import coarsest, tolerance
from grpo_sweeps.spectra.ranks import null_measured_norms, summary
from grpo_sweeps.types import GroupRecord


def is_older(group: GroupRecord) -> bool:
    """Was the measured group recorded before records said which rollouts have the same tokens?"""
    return group.gram is not None and not group.same_as


def same_texts(group: GroupRecord) -> Labels:
    """(R,) for each rollout of a measured group the first with the same tokens; by cosine in older records."""
    return same_as_by_cosine(group.gram) if group.gram is not None and not group.same_as else np.array(group.same_as)


def same_rows(group: GroupRecord) -> Labels:
    """(R,) for each row of a measured group's Gram the first that is equal, rounding aside."""
    texts = same_texts(group)
    return texts if group.rows == "scores" else same_rows_of_the_loss(texts, group.weights)


def own_precision(group: GroupRecord, dtype: str | None) -> float:
    """How exactly the group's K is the Gram of the gradients that were applied. dtype: of the run's model."""
    if not is_older(group):
        return group.floor
    return tolerance(dtype) if dtype else coarsest()


def spectral_metrics(groups: Sequence[GroupRecord], scores: bool = True, dtype: str | None = None) -> dict[str, float]:
    """`spectral/...` of the weighted matrix, means over the step's mixed groups, and unless `scores` is False
    `scores/...` of the unweighted one, means over all that were measured.

    Rows of the loss have their weights in them: they are taken as they stand, and there are no scores. dtype: of the
    run's model, for older records.

    A step without a measured mixed group gives the counts alone: no value stands for "not measured".
    """
    measured = [(g, g.gram) for g in groups if g.gram is not None]
    mixed = [(g, gram) for g, gram in measured if g.mixed]
    metrics = {"spectral/groups": float(len(mixed))}
    metrics |= _mean_of([_weighted_summary(g, gram, dtype) for g, gram in mixed], "spectral/")
    of_scores = [(g, gram) for g, gram in measured if g.rows == "scores"]
    if scores and len(of_scores) == len(measured):
        metrics["scores/groups"] = float(len(measured))
        alone = [summary(gram, None, own_precision(g, dtype), same_rows(g)) for g, gram in measured]
        metrics |= _mean_of(alone, "scores/")
    return metrics


def _weighted_summary(group: GroupRecord, gram: np.ndarray, dtype: str | None) -> dict[str, float]:
    weights, floor, same = np.array(group.weights), own_precision(group, dtype), same_rows(group)
    if group.rows == "scores":
        return summary(gram, weights, floor, same)
    return summary(gram, None, floor, same) | {"null_effective_rank": null_measured_norms(gram)}


def _mean_of(summaries: Sequence[Mapping[str, float]], prefix: str) -> dict[str, float]:
    if not summaries:
        return {}
    return {f"{prefix}{name}": float(np.mean([s[name] for s in summaries])) for name in summaries[0]}
