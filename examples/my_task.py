"""A task of your own, used by its dotted path: remainders of a division.

    cd examples
    python -m grpo_sweeps.run --config-dir conf R=4 task=remainders

A task is a function that returns problems to train on and held-out problems, disjoint, the same ones for the same seed.
How a problem becomes a prompt stands in the YAML file beside the function's arguments, conf/task/remainders.yaml.
"""

from __future__ import annotations

import random

from grpo_sweeps.types import Problem, TaskData


def remainders(seed: int = 0, n_train: int = 2000, n_held_out: int = 256, largest: int = 99) -> TaskData:
    """Problems "a mod b" with 1 < b <= a <= `largest`, each pair once.

    Raises ValueError where `largest` gives fewer pairs than n_train + n_held_out.
    """
    pairs = [(a, b) for a in range(2, largest + 1) for b in range(2, a + 1)]
    if len(pairs) < n_train + n_held_out:
        raise ValueError(f"largest={largest} gives {len(pairs)} problems, fewer than {n_train} + {n_held_out}")
    random.Random(seed).shuffle(pairs)
    problems = [problem(a, b) for a, b in pairs[: n_train + n_held_out]]
    return TaskData(train=problems[n_held_out:], held_out=problems[:n_held_out])


def problem(a: int, b: int) -> Problem:
    """One problem with its worked solution, which ends in `#### answer` as GSM8K's do."""
    whole, rest = divmod(a, b)
    return Problem(
        id=f"remainder-{a}-{b}",
        question=f"{a} apples are packed into boxes of {b}. How many are left over?",
        answer=str(rest),
        solution=f"{whole} x {b} = {whole * b}. {a} - {whole * b} = {rest}. #### {rest}",
    )
