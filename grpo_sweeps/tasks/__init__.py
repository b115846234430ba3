"""Tasks: functions that return a `TaskData`, problems to train on and held-out problems, disjoint.

    from grpo_sweeps.tasks import arithmetic, gsm8k

A task of your own is any function with that return type, named by its dotted path in `task._target_`.
"""

from grpo_sweeps.tasks.arithmetic import arithmetic
from grpo_sweeps.tasks.gsm8k import gsm8k

__all__ = ["arithmetic", "gsm8k"]
