"""A policy whose sequences can all be listed: gradients, values and the moments of estimators without sampling."""

from grpo_sweeps.exact.enumeration import Classes, Enumeration, enumerate_policy, several_prompts
from grpo_sweeps.exact.moments import (
    Moments,
    Weights,
    between_prompts,
    group_moments,
    one_group_weights,
    sequence_moments,
    step_moments,
)
from grpo_sweeps.exact.policy import SoftmaxPolicy, row_log_probs, token_log_probs
from grpo_sweeps.exact.rewards import TokenReward, binary, by_token, drawn_by_token, graded, outcome

__all__ = [
    "Classes",
    "Enumeration",
    "Moments",
    "SoftmaxPolicy",
    "TokenReward",
    "Weights",
    "between_prompts",
    "binary",
    "by_token",
    "drawn_by_token",
    "enumerate_policy",
    "graded",
    "group_moments",
    "one_group_weights",
    "outcome",
    "row_log_probs",
    "sequence_moments",
    "several_prompts",
    "step_moments",
    "token_log_probs",
]
