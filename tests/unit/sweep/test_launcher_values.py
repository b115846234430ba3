"""Values that SLURM would take and mean something else by are refused in one sentence."""

from __future__ import annotations

from typing import Any

import pytest

from grpo_sweeps.sweep.submit import check_values
from grpo_sweeps.types import ConfigError


@pytest.mark.parametrize(
    ("params", "sentence"),
    [
        ({"timeout_min": 0}, "hydra.launcher.timeout_min=0: at least 1 is needed"),
        ({"timeout_min": -5}, "timeout_min=-5: at least 1"),
        ({"mem_gb": 0}, "mem_gb=0: at least 0.001"),
        ({"mem_gb": 0.0001}, "mem_gb=0.0001: at least 0.001"),
        ({"mem_gb": float("nan")}, "mem_gb=nan: a number is needed"),
        ({"gpu_mem_gb": -1}, "gpu_mem_gb=-1"),
        ({"gpus_per_node": -1}, "gpus_per_node=-1: at least 0"),
        ({"max_num_timeout": -1}, "max_num_timeout=-1: at least 0"),
        ({"array_parallelism": 0}, "array_parallelism=0: at least 1"),
        ({"parallel_jobs": 0}, "parallel_jobs=0: at least 1"),
        ({"cpus_per_task": 0}, "cpus_per_task=0: at least 1"),
        ({"timeout_min": 1, "signal_delay_s": 120}, "signal_delay_s=120: the signal would come before"),
        ({"additional_parameters": "foo"}, "additional_parameters=foo: flags with their values"),
        ({"name": "a b"}, "name=a b: letters"),
        ({"name": ""}, "hydra.launcher.name=: letters"),
    ],
)
def test_bounds(params: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_values(params)
    assert sentence in str(caught.value)


def test_what_is_in_bounds_or_null_is_taken() -> None:
    check_values({"timeout_min": 60, "signal_delay_s": 120, "mem_gb": 0.5, "gpus_per_node": 0, "name": "grpo_sweeps"})
    check_values(
        {"timeout_min": None, "mem_gb": None, "array_parallelism": None, "additional_parameters": {"qos": "x"}}
    )
