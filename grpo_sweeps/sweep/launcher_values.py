"""Values of the Submitit launchers that SLURM would take and mean something else by: no limit, all of a node's memory.

Bounds only; what the nodes can give is compared in `preflight`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from grpo_sweeps.config import shown
from grpo_sweeps.config.checks import NAME
from grpo_sweeps.types import ConfigError

ABOVE_ZERO = ("timeout_min", "mem_gb", "gpu_mem_gb")  # 0 is "no limit" or "all" to SLURM
LEAST_GB = 0.001
AT_LEAST_ONE = ("cpus_per_task", "array_parallelism", "parallel_jobs")
NOT_NEGATIVE = ("gpus_per_node", "gpus_per_task", "max_num_timeout", "signal_delay_s")


def check_values(params: Mapping[str, Any]) -> None:
    """Raise ConfigError for the first value out of bounds; null is always allowed."""
    for key in (*ABOVE_ZERO, *AT_LEAST_ONE, *NOT_NEGATIVE):
        value = params.get(key)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            _fail(key, value, "a number is needed, or null")
        if key in ABOVE_ZERO and value < (LEAST_GB if key.endswith("_gb") else 1):
            _fail(key, value, f"at least {LEAST_GB if key.endswith('_gb') else 1} is needed, or null")
        if key in AT_LEAST_ONE and value < 1:
            _fail(key, value, "at least 1 is needed, or null")
        if key in NOT_NEGATIVE and value < 0:
            _fail(key, value, "at least 0 is needed, or null")
    extra = params.get("additional_parameters")
    if extra is not None and not isinstance(extra, Mapping):
        _fail("additional_parameters", extra, "flags with their values are needed, such as {qos:high}")
    name = params.get("name")
    if name is not None and not NAME.fullmatch(str(name)):
        _fail("name", name, "letters, digits, '.', '_' and '-' are allowed")
    minutes, delay = params.get("timeout_min"), params.get("signal_delay_s")
    if minutes is not None and delay is not None and delay >= minutes * 60:
        _fail(
            "signal_delay_s", delay, f"the signal would come before the job's start; less than the {minutes:g} minutes "
            "of timeout_min are allowed",
        )  # fmt: skip


def _fail(key: str, value: object, allowed: str) -> None:
    raise ConfigError(f"hydra.launcher.{key}={shown(value)}: {allowed}")
