"""Checks of the objective's keys, as those of `config_checks`."""

from __future__ import annotations

from grpo_sweeps.config import RunConfig
from grpo_sweeps.config_ranges import at_least, at_most, fail, one_of

RATIOS = ("none", "token", "sequence")
KL_ESTIMATORS = ("k1", "k2", "k3")
KL_PLACES = ("loss", "reward")
NO_BASELINE = "grpo_sweeps.estimators.reinforce.reinforce"
MOST_UPDATES = 1024  # in a step, each going over all of its rollouts


def check_objective(config: RunConfig) -> None:
    """Raise ConfigError for the first key of `objective` that is out of range or does not fit the rest."""
    objective = config.objective
    one_of("objective.ratio", objective.ratio, RATIOS)
    one_of("objective.kl_estimator", objective.kl_estimator, KL_ESTIMATORS)
    one_of("objective.kl_place", objective.kl_place, KL_PLACES)
    if not 0 < objective.clip_low <= 1:
        fail("objective.clip_low", objective.clip_low, "a number above 0 and at most 1 is needed")
    if objective.clip_high <= 0:
        fail("objective.clip_high", objective.clip_high, "a number above 0 is needed")
    for key, least in (("inner_updates", 1), ("minibatches", 1), ("kl_beta", 0), ("resample_rounds", 1),
                       ("critic_lr", 0), ("critic_updates", 1)):  # fmt: skip
        at_least(f"objective.{key}", getattr(objective, key), least)
    for key in ("inner_updates", "resample_rounds", "critic_updates"):
        at_most(f"objective.{key}", getattr(objective, key), MOST_UPDATES)
    if config.groups % objective.minibatches:
        fail(
            "objective.minibatches",
            objective.minibatches,
            f"minibatches hold whole groups, as many each: a divisor of the step's {config.groups} groups is needed",
        )
    for key in ("gae_gamma", "gae_lambda"):
        if not 0 <= getattr(objective, key) <= 1:
            fail(f"objective.{key}", getattr(objective, key), "a number from 0 to 1 is needed")
    if objective.critic and config.estimator.target != NO_BASELINE:
        fail("objective.critic", True, "the learned value is the baseline, so that estimator=reinforce is needed")
    if objective.resample and config.R == 1:
        fail(
            "objective.resample",
            True,
            "the one rollout of a group (R=1) cannot differ in reward; R=2 or more is needed",
        )
