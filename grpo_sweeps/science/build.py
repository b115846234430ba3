"""The theory report: claims on exact policies, figures, tables and a page."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from grpo_sweeps.estimators.declared import DISTINCT
from grpo_sweeps.exact import Enumeration, SoftmaxPolicy, TokenReward, binary, several_prompts
from grpo_sweeps.paper import ABOUT_TWO, ARXIV, BEST_SIZE_ARXIV, MARGIN, MODEL, TABLE1
from grpo_sweeps.publish.drawing import Plot, rendered
from grpo_sweeps.publish.formats import csv, markdown
from grpo_sweeps.publish.page import files_of, from_template, inlined, write
from grpo_sweeps.science import advantages, budget, credit, figures, gradient, scores, structure
from grpo_sweeps.science.budget import Ascent, Budget, drawn, gradient_of, oracle_step
from grpo_sweeps.science.claim import EXACT, ExactClaim, Prompt, Z
from grpo_sweeps.science.figures import Curves

if TYPE_CHECKING:
    from grpo_sweeps.theory import TheoryOptions

RS = tuple(TABLE1)  # the paper's
BUDGET_RS = (2, 4, 8, 16, 32)
ROLLOUTS = 64  # per step, where the budget is fixed
BY_GROUP = tuple(one for one in DISTINCT if one.by_group)  # exact
BY_STEP = tuple(sorted((one for one in DISTINCT if not one.by_group), key=lambda one: one.needs_lengths))  # drawn
STEP_LENGTH = 0.3  # of the steps whose gain is shown, in parameter space
TONES = {
    "holds": ("yes", "✓"),
    "holds, corrected": ("yes", "✓"),
    credit.NOT_LINEAR: ("yes", "✓"),
    "does not hold": ("no", "✗"),
    "possible": ("open", "?"),
    "undefined": ("open", "?"),
    "undecided": ("open", "?"),
}
RULES = (
    f"Fixed before anything was computed. An identity holds when its largest relative error is below {EXACT:g}; one "
    "exact case that contradicts a statement made without exception refutes it (C7: one possible group of rank R). "
    f"C8 and C20 fall where the interval of a mean lies outside {ABOUT_TWO:g} +- {MARGIN:g} at some R; C16 where that "
    f"of a rise lies below {MARGIN:g}. All other drawn "
    f"figures are a check and decide nothing: their intervals are {Z:g} standard errors to either side, so that one "
    f"report of a thousand has a miss by chance. A claim about {MODEL} is not decided by another policy: what is "
    "shown here is what follows from the definitions, and what does not."
)


def rewards_of(prompts: int) -> list[TokenReward]:
    return [binary(3, index % 3) for index in range(prompts)]


def policy_of(options: TheoryOptions, seed: int) -> SoftmaxPolicy:
    return SoftmaxPolicy(options.prompts, tokens=4, max_length=4, seed=seed)


def enumerate_all(options: TheoryOptions) -> dict[str, Budget]:
    """The prompts of each policy, with every sequence listed."""
    seeds = range(options.seed, options.seed + options.policies)
    found = {s: several_prompts(policy_of(options, s), rewards_of(options.prompts)) for s in seeds}
    return {f"policy {s}": Budget(tuple(map(Prompt, enumerations))) for s, enumerations in found.items()}


def judge(options: TheoryOptions, budgets: dict[str, Budget], turns: Sequence[Enumeration]) -> list[ExactClaim]:
    """Every claim, in the order of `paper.STATEMENTS`, judged on the first policy or, where one is too few, on all."""
    rng = np.random.default_rng(options.seed)
    first = next(iter(budgets.values()))
    prompts = [o for one in budgets.values() for o in one.prompts]
    path = gradient.ascend(policy_of(options, options.seed), rewards_of(options.prompts), 60, 1.0, max(RS))
    return [
        credit.one_advantage([o.e for o in prompts]),
        advantages.zero_sum(first.prompts, (2, 3, 4)),
        advantages.variances(prompts, RS, rng, options.draws),
        advantages.concentration((0.05, 0.3, 0.5), (*RS, 16), (0.05, 0.1, 0.3)),
        gradient.norms(prompts, RS, rng, options.draws),
        gradient.sparsity(path, max(RS)),
        scores.ranks(prompts, RS, rng, 200),
        scores.about_two(prompts, RS, rng, 300),
        scores.clusters(prompts, rng, options.draws),
        scores.feasible(),
        budget.two_budgets(first, (*RS, 16), 8, ROLLOUTS),
        advantages.hoeffding_table(),
        credit.growing_bias(turns, [o.e for o in first.prompts]),
        gradient.own_reward(prompts, (*RS, 16), rng, options.draws),
        gradient.baselines(prompts),
        *remaining(options, first.prompts, turns, rng),
        budget.best_R(budgets, (2, 3, *RS[1:], 16), ROLLOUTS),
    ]


def remaining(
    options: TheoryOptions, prompts: Sequence[Prompt], turns: Sequence[Enumeration], rng: np.random.Generator
) -> list[ExactClaim]:
    """C16 and those after it, on the prompts of the first policy."""
    one_turn = [o.e for o in prompts]
    after = structure.moved(policy_of(options, options.seed), rewards_of(options.prompts))
    return [
        structure.credit_by_token(prompts, RS, rng, 300),
        credit.in_expectation(one_turn),
        gradient.curriculum(prompts, RS),
        structure.clipping_and_kl(prompts, after, max(RS), rng, 200),
        structure.directions_of_a_step(prompts, RS, rng, 8, 100),
        structure.order_of_sizes(prompts, RS, rng, 300),
        credit.single_turn(one_turn),
        advantages.every_rollout((0.1, 0.25, 0.5)),
        credit.stage_bound([*turns, *one_turn]),
    ]


def budget_plot(options: TheoryOptions, one: Budget) -> Plot:
    """The figure of exact and drawn curves by estimator and R, and of what a step of each gains."""
    rng = np.random.default_rng(options.seed + 1)
    exact: Curves = {known.name: {R: one.of(known.function, R, ROLLOUTS) for R in BUDGET_RS} for known in BY_GROUP}
    exact["oracle value"] = {R: one.oracle(R, ROLLOUTS) for R in BUDGET_RS}
    steps = {known.name: gradient_of(known) for known in (*BY_GROUP, *BY_STEP)} | {"oracle value": oracle_step}
    curves: Curves = {
        known.name: {R: drawn(one, steps[known.name], R, ROLLOUTS, options.steps, rng) for R in BUDGET_RS}
        for known in BY_STEP
    }
    ascent = Ascent(policy_of(options, options.seed), one, STEP_LENGTH)
    gains = {
        name: {R: ascent.share(step, R, ROLLOUTS, options.steps, rng) for R in BUDGET_RS}
        for name, step in steps.items()
    }
    return figures.by_group_size(exact, curves, gains, one, ROLLOUTS)


def plots_of(options: TheoryOptions, one: Budget, turns: Sequence[Enumeration]) -> list[Plot]:
    baselines = {known.name: known.function for known in BY_GROUP if known.kind != "none"}
    return [
        budget_plot(options, one),
        figures.to_oracle(one, (*RS, 16, 32, 64), baselines),
        figures.norm_and_k(one.prompts, max(RS)),
        figures.problem_weights(),
        figures.stages(turns),
    ]


def build(options: TheoryOptions, command: str) -> list[ExactClaim]:
    """Write the report to `options.out` and return the claims."""
    start, out = time.perf_counter(), Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    budgets, turns = enumerate_all(options), credit.multi_turn(range(60))
    claims = judge(options, budgets, turns)
    first = next(iter(budgets.values()))
    plots = plots_of(options, first, turns)
    images = rendered(plots)
    seconds = time.perf_counter() - start
    sequences = len(first.prompts[0].p_N)
    setting = f"{options.policies} policies of {options.prompts} prompts each, {sequences} sequences a prompt."
    texts = {
        "claims.csv": csv(pd.DataFrame([asdict(c) for c in claims])),
        "claims.md": as_markdown(claims),
        "index.html": page(setting, claims, plots, images, command, seconds),
    }
    write(out, files_of(texts, images))
    return claims


def as_markdown(claims: Sequence[ExactClaim]) -> str:
    header = [
        "claim",
        "where",
        "the paper, in our words",
        "what holds",
        "exact",
        "measured",
        "verdict",
        "largest error",
    ]
    rows = [
        [
            c.id,
            c.where,
            c.says,
            c.holds,
            c.exact,
            c.measured or "–",
            c.judgement,
            "–" if np.isnan(c.error) else f"{c.error:.1e}",
        ]
        for c in claims
    ]
    return markdown(header, rows)


def page(
    setting: str, claims: Sequence[ExactClaim], plots: Sequence[Plot], images: dict[str, bytes], command: str,
    seconds: float,
) -> str:  # fmt: skip
    rows = [
        {k: f"{v:.2f}" if k not in ("R", "eps") else f"{v:g}" for k, v in row.items()}
        for row in advantages.hoeffding_rows()
    ]
    return from_template(
        "grpo_sweeps.science",
        "theory.html.j2",
        arxiv=ARXIV,
        best_size_arxiv=BEST_SIZE_ARXIV,
        claims=claims,
        plots=[inlined(plot, images) for plot in plots],
        hoeffding=rows,
        rules=RULES,
        command=command,
        seconds=f"{seconds:.0f}",
        setting=setting,
        tone=lambda judgement: TONES[judgement][0],
        sign=lambda judgement: TONES[judgement][1],
    )
