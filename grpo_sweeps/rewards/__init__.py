"""Rewards: functions `reward(completion, problem, seed) -> float`, and the parsing of answers that they share.

    verdicts.correct                            1 when the answer is right by the task's kind of verdict, else 0
    exact_match.strict, exact_match.flexible    1 when the number is right, else 0
    random_control.bernoulli                    a coin toss that ignores the completion

A reward of your own is any function with that signature, named by its dotted path in `reward._target_`.
"""

from grpo_sweeps.rewards.exact_match import flexible, strict
from grpo_sweeps.rewards.parsing import verdict
from grpo_sweeps.rewards.random_control import bernoulli

__all__ = ["bernoulli", "flexible", "strict", "verdict"]
