"""Three kinds of R rows from the same problems, and the spectra of their scores.

Group g has problems gR .. gR + R - 1 of the run's own order. `one prompt` are R completions of the first of them; `one
each` is one completion of each; `solutions` are their reference solutions, ended as a completion is. Every row has
weight 1: a solution has no reward, and so all three differ in nothing but their texts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pandas as pd
import torch

from grpo_sweeps import spectra
from grpo_sweeps.config import ObjectiveConfig, RunConfig
from grpo_sweeps.engine.rollouts import Rollout, row_seed, same_as
from grpo_sweeps.loop.measured import measured_block
from grpo_sweeps.loop.scoring import row_sums
from grpo_sweeps.loop.setup import Setup, prepare
from grpo_sweeps.spectra.equal import merged
from grpo_sweeps.text import count
from grpo_sweeps.types import Array, ConfigError, Problem

KINDS = ("one prompt", "one each", "solutions")
QUANTITIES = {
    "effective_rank": "effective rank",
    "null_effective_rank": "null: orthogonal, measured norms, equal texts once",
    "beyond_null": "effective rank less its null",
    "top1_fraction": "top-1 fraction",
    "null_top1_fraction": "null of the top-1 fraction",
    "unit_effective_rank": "effective rank of rows of unit norm",
    "mean_cosine": "mean cosine of two different texts",
    "norm_ratio": "largest norm over the smallest",
    "different_texts": "different texts",
    "mean_length": "tokens per row",
}
ROWS_AT_ONCE = 8  # reference solutions may be longer than a run's own completions


def measured(config: RunConfig, groups: int, say: Callable[[str], None]) -> pd.DataFrame:
    """One row per group and kind: `group`, `kind`, `problem` (the first), and each of `QUANTITIES`.

    Raises:
        ConfigError: for a task without solutions, too few problems, and for what `prepare` refuses.
    """
    config = _plain(config)
    setup = prepare(config, say)
    try:
        problems = _problems(setup, groups)
        say(f"{count(groups, 'group')} of {config.R}: sampling")
        rows = _rows(setup, problems)
        found = []
        for g in range(groups):
            for kind in KINDS:
                rollouts = rows[kind][g * config.R : (g + 1) * config.R]
                gram = gram_of(setup, rollouts)
                values = _values(gram, rollouts)
                found.append({"group": g, "kind": kind, "problem": problems[g * config.R].id} | values)
        return pd.DataFrame(found, columns=["group", "kind", "problem", *QUANTITIES])
    finally:
        setup.close()


def _plain(config: RunConfig) -> RunConfig:
    """The same model, task and sampling with everything else of a run switched off but the Gram."""
    return replace(
        config,
        objective=ObjectiveConfig(),
        analysis=replace(config.analysis, every=1, by="whole", check_every=1, stacked_every=0, compare_float32=0),
        trainer=replace(config.trainer, micro_batch=min(config.R, ROWS_AT_ONCE)),
    )


def _problems(setup: Setup, groups: int) -> list[Problem]:
    """groups x R different problems with their solutions, in the order of a run's first steps."""
    config, count = setup.config, groups * setup.config.R
    if count > len(setup.data.train):
        raise ConfigError(
            f"control: groups={groups}: {count} different problems are needed at R={config.R}, the task has "
            f"{len(setup.data.train)}; give fewer groups"
        )
    walk = replace(setup, config=replace(config, budget="prompts", trainer=replace(config.trainer, prompts=count)))
    problems = walk.problems(0)
    if lacking := [problem.id for problem in problems if not problem.solution.strip()]:
        raise ConfigError(
            f"control: task={config.task.name}: problem {lacking[0]} has no worked solution; a task that has them is "
            "needed, such as gsm8k or arithmetic"
        )
    return problems


def _rows(setup: Setup, problems: Sequence[Problem]) -> dict[str, list[Rollout]]:
    """The rows of each kind, group after group."""
    R, seed = setup.config.R, setup.config.seed
    prompts = setup.policy.encode([setup.prompt(problem) for problem in problems])
    firsts = [i // R * R for i in range(len(problems))]
    one = [row_seed(seed, "control one prompt", problems[f].id, i % R) for i, f in enumerate(firsts)]
    each = [row_seed(seed, "control one each", problem.id) for problem in problems]
    rollout, stop = setup.config.rollout, setup.config.task.stop
    return {
        "one prompt": setup.sampler.sample([prompts[f] for f in firsts], one, rollout, stop, share_prompts=True),
        "one each": setup.sampler.sample(prompts, each, rollout, stop),
        "solutions": [_solution(setup, p, ids) for p, ids in zip(problems, prompts, strict=True)],
    }


def _solution(setup: Setup, problem: Problem, prompt_ids: Sequence[int]) -> Rollout:
    """A problem's solution as a completion, which ends as one does; after a plain prompt a space begins it."""
    text = problem.solution if setup.policy.chat_template else f" {problem.solution}"
    tokenizer, eos = setup.policy.tokenizer, setup.policy.eos_ids
    end = tokenizer.eos_token_id if tokenizer.eos_token_id in eos else eos[0]
    ids = (*tokenizer(text, add_special_tokens=False)["input_ids"], int(end))
    return Rollout(tuple(prompt_ids), ids, problem.solution, np.zeros(len(ids), dtype=np.float32), False)


def gram_of(setup: Setup, rollouts: Sequence[Rollout]) -> Array:
    """(R, R) Gram of the rows' scores; the gradient is checked against it and dropped."""
    block = measured_block(setup, torch.ones(len(rollouts)), functools.partial(_scores, setup, rollouts), check=True)
    (found,) = block.read(setup, block.scalars)
    assert found.gram is not None
    for parameter in setup.policy.model.parameters():
        parameter.grad = None
    return np.asarray(found.gram, dtype=np.float64)


def _scores(setup: Setup, rollouts: Sequence[Rollout], rows: slice) -> torch.Tensor:
    return row_sums(setup, rollouts[rows])


def _values(gram_RR: Array, rollouts: Sequence[Rollout]) -> dict[str, float]:
    """`QUANTITIES` of one group."""
    same = np.array(same_as([(*one.prompt_ids, -1, *one.completion_ids) for one in rollouts]))
    K, w = merged(gram_RR, None, same)
    values = spectra.singular_values(K, w)
    unit = spectra.unit_rows(gram_RR)
    different = same[:, None] != same[None, :]
    norms = np.sqrt(gram_RR.diagonal())
    rank, null = float(spectra.effective_rank(values)), float(spectra.null_measured_norms(K, w))
    return {
        "effective_rank": rank,
        "null_effective_rank": null,
        "beyond_null": rank - null,
        "top1_fraction": float(spectra.top1_fraction(values)),
        "null_top1_fraction": float(spectra.null_measured_norms(K, w, spectra.top1_fraction)),
        "unit_effective_rank": float(spectra.effective_rank(spectra.singular_values(unit))),
        "mean_cosine": float(unit[different].mean()) if different.any() else float("nan"),
        "norm_ratio": float(norms.max() / norms.min()) if norms.min() > 0 else float("inf"),
        "different_texts": float((same == np.arange(len(same))).sum()),
        "mean_length": float(np.mean([one.length for one in rollouts])),
    }
