"""Typed configuration of a run. `schema` holds the dataclasses and their written form, `checks` what types cannot say,
`functions` finds a task, a reward, an estimator or a sampler engine by its dotted path.

The names below come from `schema`, which needs neither Hydra nor torch.
"""

from grpo_sweeps.config.schema import (
    ADHOC,
    IRRELEVANT,
    NOT_OFFERED,
    TASK_KEYS,
    AnalysisConfig,
    FunctionConfig,
    LaunchConfig,
    LoraConfig,
    ModelConfig,
    ObjectiveConfig,
    RolloutConfig,
    RunConfig,
    TaskConfig,
    TrackingConfig,
    TrainerConfig,
    changes_no_result,
    dotted_keys,
    flatten,
    groups_a_step,
    shown,
    to_mapping,
)

__all__ = [
    "ADHOC",
    "IRRELEVANT",
    "NOT_OFFERED",
    "TASK_KEYS",
    "AnalysisConfig",
    "FunctionConfig",
    "LaunchConfig",
    "LoraConfig",
    "ModelConfig",
    "ObjectiveConfig",
    "RolloutConfig",
    "RunConfig",
    "TaskConfig",
    "TrackingConfig",
    "TrainerConfig",
    "changes_no_result",
    "dotted_keys",
    "flatten",
    "groups_a_step",
    "shown",
    "to_mapping",
]
