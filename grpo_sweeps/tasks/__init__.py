"""Tasks: functions that return a `TaskData`, problems to train on and held-out problems, disjoint.

    arithmetic, gsm8k    the package's own
    jsonl, hub           data of yours: lines of JSON, a data set of the Hugging Face hub

A task of your own is any function with that return type, named by its dotted path in `task._target_`.
"""

from grpo_sweeps.tasks.arithmetic import arithmetic
from grpo_sweeps.tasks.gsm8k import gsm8k
from grpo_sweeps.tasks.own_data import hub, jsonl

__all__ = ["arithmetic", "gsm8k", "hub", "jsonl"]
