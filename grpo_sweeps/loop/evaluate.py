"""Accuracy on held-out problems: sampled as in training and greedy, strict and flexible parsing."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from grpo_sweeps.engine.rollouts import Rollout, row_seed
from grpo_sweeps.loop.setup import Setup
from grpo_sweeps.rewards.parsing import verdict
from grpo_sweeps.types import EvalRecord

BATCHES_TO_FILL = 4  # the last rows of a call run alone; and a run that was asked to stop waits for a call's end


def evaluate(
    setup: Setup, step: int, check: Callable[[], None] = lambda: None
) -> tuple[dict[str, float], list[EvalRecord]]:
    """Evaluate the policy after `step` updates. `check` is called before each batch and may raise, to end it there.

    The problems and the random numbers are the same at every evaluation (common random numbers), so differences between
    two evaluations are paired.

    Returns:
        Metrics `eval/accuracy` (sampled, strict), `eval/accuracy_flexible`, `eval/accuracy_greedy`,
        `eval/accuracy_greedy_flexible`, and one record a problem.
    """
    trainer = setup.config.trainer
    problems = list(setup.data.held_out[: trainer.eval_problems])
    prompts = setup.policy.encode([setup.prompt(p) for p in problems])
    S = trainer.eval_samples
    seeds = [row_seed(setup.config.seed, "eval", p.id, s) for p in problems for s in range(S)]
    sampled = _in_batches(setup, check, [ids for ids in prompts for _ in range(S)], seeds)
    greedy = _in_batches(setup, check, prompts, [0] * len(prompts), greedy=True)
    records = []
    for i, problem in enumerate(problems):
        drawn = [verdict(o.text, problem.answer) for o in sampled[i * S : (i + 1) * S]]
        best = verdict(greedy[i].text, problem.answer)
        strict, flexible = sum(v.strict for v in drawn), sum(v.flexible for v in drawn)
        records.append(EvalRecord(step, problem.id, S, strict, flexible, best.strict, best.flexible))
    n = len(records)
    metrics = {
        "eval/accuracy_greedy": sum(r.greedy_strict for r in records) / n,
        "eval/accuracy_greedy_flexible": sum(r.greedy_flexible for r in records) / n,
    }
    if S:
        metrics["eval/accuracy"] = sum(r.strict for r in records) / (n * S)
        metrics["eval/accuracy_flexible"] = sum(r.flexible for r in records) / (n * S)
    return metrics, records


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
