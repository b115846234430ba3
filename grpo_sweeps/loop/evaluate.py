"""Held-out problems, sampled as in training and greedy: the run's own reward, and where the task has verdicts the
accuracy, by the strict and the flexible reading."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from grpo_sweeps.engine.checkpoint import random_states, restore_random_states
from grpo_sweeps.engine.rollouts import Rollout, row_seed
from grpo_sweeps.loop.rewarding import Key
from grpo_sweeps.loop.rollouts import rewards_of
from grpo_sweeps.loop.setup import Setup
from grpo_sweeps.types import EvalRecord, Problem, Verdict

BATCHES_TO_FILL = 4  # the last rows of a call run alone; and a run that was asked to stop waits for a call's end


def evaluate(
    setup: Setup, step: int, check: Callable[[], None] = lambda: None
) -> tuple[dict[str, float], list[EvalRecord]]:
    """Evaluate the policy after `step` updates. `check` is called before each batch and may raise, to end it there.

    The problems and the random numbers are the same at every evaluation (common random numbers), so differences between
    two evaluations are paired. What the reward draws from the global generators does not move the training.

    Returns:
        Metrics `eval/reward` (sampled), `eval/reward_greedy` and, where the task has verdicts, `eval/accuracy`
        (sampled, strict), `eval/accuracy_flexible`, `eval/accuracy_greedy`, `eval/accuracy_greedy_flexible`; and one
        record a problem.
    """
    trainer = setup.config.trainer
    problems = list(setup.data.held_out[: trainer.eval_problems])
    prompts = setup.policy.encode([setup.prompt(p) for p in problems])
    S = trainer.eval_samples
    keys: list[Key] = [(setup.config.seed, "eval", p.id, s) for p in problems for s in range(S)]
    sampled = _in_batches(setup, check, [ids for ids in prompts for _ in range(S)], [row_seed(*key) for key in keys])
    greedy = _in_batches(setup, check, prompts, [0] * len(prompts), greedy=True)
    owners = [problem for problem in problems for _ in range(S)]
    states = random_states()
    try:
        of_sampled = _judged(setup, sampled, owners, keys, S)
        greedy_keys: list[Key] = [(setup.config.seed, "eval greedy", p.id) for p in problems]
        of_greedy = _judged(setup, greedy, problems, greedy_keys, 1)
    finally:
        restore_random_states(states)
    records = []
    for i, problem in enumerate(problems):
        drawn, (best, best_reward) = of_sampled[i * S : (i + 1) * S], of_greedy[i]
        strict, flexible = sum(v.strict for v, _ in drawn), sum(v.flexible for v, _ in drawn)
        reward = sum(r for _, r in drawn) / S if S else math.nan
        records.append(
            EvalRecord(step, problem.id, S, strict, flexible, best.strict, best.flexible, reward, best_reward)
        )
    return _metrics(setup, records, S), records


def _judged(
    setup: Setup, rollouts: Sequence[Rollout], problems: Sequence[Problem], keys: Sequence[Key], size: int
) -> list[tuple[Verdict, float]]:
    """The verdict on each rollout and its reward; `size` after one another are a group."""
    texts = [o.text for o in rollouts]
    rewards = rewards_of(setup, texts, problems, keys, size).values
    return list(zip(setup.judge.all(texts, problems), rewards, strict=True))


def _metrics(setup: Setup, records: Sequence[EvalRecord], S: int) -> dict[str, float]:
    n = len(records)
    metrics = {"eval/reward_greedy": sum(r.greedy_reward for r in records) / n}
    if S:
        metrics["eval/reward"] = sum(r.reward for r in records) / n
    if not setup.config.task.judged:
        return metrics
    metrics["eval/accuracy_greedy"] = sum(r.greedy_strict for r in records) / n
    metrics["eval/accuracy_greedy_flexible"] = sum(r.greedy_flexible for r in records) / n
    if S:
        metrics["eval/accuracy"] = sum(r.strict for r in records) / (n * S)
        metrics["eval/accuracy_flexible"] = sum(r.flexible for r in records) / (n * S)
    return metrics


def _in_batches(
    setup: Setup,
    check: Callable[[], None],
    prompts: Sequence[Sequence[int]],
    seeds: Sequence[int],
    greedy: bool = False,
) -> list[Rollout]:
    """Between two batches a run that was asked to stop can. They are those that the sampler would form itself, several
    at once where it fills the places of rows that have ended."""
    rollout, out = setup.config.rollout, list[Rollout]()
    size = rollout.batch * (BATCHES_TO_FILL if getattr(setup.sampler, "refills", False) else 1)
    for start in range(0, len(prompts), size):
        check()
        rows = slice(start, start + size)
        out += setup.sampler.sample(prompts[rows], seeds[rows], rollout, setup.config.task.stop, greedy=greedy)
    return out
