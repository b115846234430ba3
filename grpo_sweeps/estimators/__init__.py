"""Advantage estimators: pure functions (G, R) rewards -> (G, R) advantages, what is declared of each, and the
aggregation of tokens into row weights.

An estimator that names a parameter `lengths_GR` is given the completions' lengths as well.
"""

from grpo_sweeps.estimators.aggregation import AGGREGATIONS, row_weights
from grpo_sweeps.estimators.batch import batch_mean, bnpo, reinforce_plus_plus, reinforce_plus_plus_baseline
from grpo_sweeps.estimators.declared import DECLARATIONS, FROM_GRAM, Declaration, weight_on
from grpo_sweeps.estimators.from_gram import salt, score_norm
from grpo_sweeps.estimators.group import dapo, dr_grpo, grpo, grpo_std, opo, rloo
from grpo_sweeps.estimators.reinforce import reinforce

__all__ = [
    "AGGREGATIONS",
    "DECLARATIONS",
    "FROM_GRAM",
    "Declaration",
    "batch_mean",
    "bnpo",
    "dapo",
    "dr_grpo",
    "grpo",
    "grpo_std",
    "opo",
    "reinforce",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "rloo",
    "row_weights",
    "salt",
    "score_norm",
    "weight_on",
]
