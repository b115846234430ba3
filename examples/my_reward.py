"""A reward of your own, used by its dotted path: half a point for the right answer, half for being brief about it.

    cd examples
    python -m grpo_sweeps.run R=4 reward=custom reward._target_=my_reward.brief +reward.limit=80

`custom` is an empty choice of the group, to which `+reward.KEY=VALUE` adds arguments of the function. To keep it
as a file instead, see conf/reward/brief.yaml beside this module: `--config-dir conf reward=brief`.
"""

from __future__ import annotations

from grpo_sweeps.rewards import parsing
from grpo_sweeps.types import Problem


def brief(completion: str, problem: Problem, seed: int, limit: int = 120) -> float:
    """Reward 0 for a wrong answer, 1/2 for a right one, and up to 1/2 more the shorter the right one is.

    `limit` is the length in characters from which no bonus is given; `seed` belongs to the rollout and is for rewards
    that draw random numbers, which this one does not.
    """
    if limit <= 0:
        raise ValueError(f"limit={limit}: it must be a positive number of characters")
    if not parsing.verdict(completion, problem.answer).strict:
        return 0.0
    return 0.5 + 0.5 * max(0.0, 1.0 - len(completion) / limit)
