"""Advantage estimators: pure functions (G, R) rewards -> (G, R) advantages, and the aggregation of tokens into row
weights."""

from grpo_sweeps.estimators.aggregation import AGGREGATIONS, row_weights
from grpo_sweeps.estimators.group import grpo, grpo_std, rloo
from grpo_sweeps.estimators.reinforce import reinforce

__all__ = ["AGGREGATIONS", "grpo", "grpo_std", "reinforce", "rloo", "row_weights"]
