"""Checks of the objective's keys, as those of `config_checks`."""

from __future__ import annotations

from grpo_sweeps.config import RunConfig
from grpo_sweeps.config_ranges import at_least, at_most, fail, one_of

RATIOS = ("none", "token", "sequence")
KL_ESTIMATORS = ("k1", "k2", "k3")
KL_PLACES = ("loss", "reward")
NO_BASELINE = "grpo_sweeps.estimators.reinforce.reinforce"
MOST_UPDATES = 1024  # in a step, each going over all of its rollouts
MOST_CONTINUATIONS = 4096  # of every valued prefix


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
                       ("critic_lr", 0), ("critic_updates", 1), ("continuations", 0), ("value_every", 0)):  # fmt: skip
        at_least(f"objective.{key}", getattr(objective, key), least)
    for key in ("inner_updates", "resample_rounds", "critic_updates"):
        at_most(f"objective.{key}", getattr(objective, key), MOST_UPDATES)
    at_most("objective.continuations", objective.continuations, MOST_CONTINUATIONS)
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
    _check_continuations(config)
    if objective.resample and config.R == 1:
        fail(
            "objective.resample",
            True,
            "the one rollout of a group (R=1) cannot differ in reward; R=2 or more is needed",
        )


def _check_continuations(config: RunConfig) -> None:
    """Values by fresh continuations: the one source of values, the only baseline, and of the task's reward."""
    objective = config.objective
    key, count = "objective.continuations", objective.continuations
    if not count:
        if objective.value_every:
            fail("objective.value_every", objective.value_every, f"{key}=1 or more is needed, or else 0 here")
        return
    if objective.critic:
        fail(key, count, "values come from continuations or from a critic, so that objective.critic=false is needed")
    if config.estimator.target != NO_BASELINE:
        fail(key, count, "the values are the baseline, so that estimator=reinforce is needed")
    if objective.value_every and objective.kl_in_reward:
        fail(
            "objective.value_every",
            objective.value_every,
            "the values know nothing of a KL in the reward, whose credit would go to the last tokens alone; "
            "objective.kl_place=loss is needed, or 0 here",
        )
