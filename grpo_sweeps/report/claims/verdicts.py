"""The verdicts on all claims of arXiv 2606.29238, from a sweep's records by the rules of `claims.rules`; as tables.

C2 to C4 are judged in `advantages`, C5, C9 and shuffled rewards in `gradient`, C6 in `sparsity`, the open question Q3
in `training`, C7, C8 and the exact assertions in `ranks`, C10 in `printed`, C11 in `budget` where a sweep has both
budgets, C16 and C19 in `paired` where it has two objectives, C18, C20 and C21 in `sizes`; here stand the claims that
no such record decides. Whose model the runs are about is told in `subject`.

Every claim says what the paper says, what was measured with its interval, what the null gives, and the verdict in
words.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pandas as pd

from grpo_sweeps.paper import ARXIV, STATEMENTS
from grpo_sweeps.publish.formats import markdown, markdown_text
from grpo_sweeps.report.claims import budget, paired, rules
from grpo_sweeps.report.claims.advantages import c2, c3, c4
from grpo_sweeps.report.claims.budget import budget_pairs, c11
from grpo_sweeps.report.claims.finding import EVERY_ARM, Claim, by_length, estimator_of
from grpo_sweeps.report.claims.gradient import c5, c9, shuffled
from grpo_sweeps.report.claims.printed import c10
from grpo_sweeps.report.claims.ranks import c7, c8, controls
from grpo_sweeps.report.claims.rules import UNDECIDED
from grpo_sweeps.report.claims.sizes import c18, c20, c21
from grpo_sweeps.report.claims.sparsity import c6
from grpo_sweeps.report.claims.subject import differences, scope
from grpo_sweeps.report.claims.training import q3
from grpo_sweeps.report.read.query import Sweep
from grpo_sweeps.report.tables.pooled import (
    records_of,
    usable_groups,
)

CLAIM_COLUMNS = [
    "claim", "arm", "R", "groups", "paper", "measured", "decisive", "decisive_low", "decisive_high", "null", "verdict",
    "remarks",
]  # fmt: skip
DEFINED = (
    "Effective rank: (sum s)^2 / sum s^2 of the singular values s of a group's gradient matrix, whose R rows are the "
    "rollouts' scores times their weights in the loss; it lies between 1 and R. Top-1 fraction: s_1^2 / sum s^2. Mixed "
    "groups have rewards that differ; k is the number of right rollouts of a group, sigma_r the standard deviation of "
    "its rewards."
)
THEORY = "The theory report (python -m grpo_sweeps.theory) has it on policies where everything is exact."
NEEDS = {
    "C1": (
        "a record keeps one advantage and one weight a rollout. Needed: the spread of advantages and of token weights "
        "within rollouts, which clipping, process rewards, a KL term in the reward or a critic can make. "
        "What the tokens of one run deserved: python -m grpo_sweeps.credit."
    ),
    "C11": (
        "needed for the second half are runs of estimator=rloo, which is the group mean rescaled by R/(R-1), with "
        "budget=prompts and with budget=rollouts (+sweeps=group_size), evaluated, with two seeds or more; for the "
        "first half gradient directions that can be compared between groups: a record keeps inner products within one "
        "group."
    ),
    "C12": (
        "arithmetic, 2 exp(-2 R eps^2), on which no run bears."
    ),
    "C13": (
        "the runs have one turn. Needed: an environment of several turns with known values of its states."
    ),
    "C14": (
        "E g = (R-1)/R grad J is exact for every policy and reward, a factor and no change of direction."
    ),
    "C15": (
        "the best constant of a prompt, E[||psi||^2 r] / E[||psi||^2], needs scores of all its rollouts; all-equal "
        "groups have no Gram, and most prompts come once. Needed: every group of repeated prompts measured."
    ),
    "C16": (
        "needed are runs that differ in the objective alone, of the same R and seeds: "
        "objective=reinforce,ppo,vine,oracle, best with trainer.lr=0, where every step's groups can be compared."
    ),
    "C17": (
        "the action values of tokens are not in a record. Values from fresh continuations: python -m "
        "grpo_sweeps.credit."
    ),
    "C19": (
        "needed are runs that differ in the objective alone, of the same R and seeds: objective=reinforce,ppo_clip, "
        "with objective.minibatches above 1, so that groups of the first step are differentiated after an update."
    ),
    "C22": (
        "the values of prefixes are not in a record. Values from fresh continuations: python -m grpo_sweeps.credit."
    ),
    "C23": (
        "arithmetic, a bound on a mean read as one on each rollout. C4 has the shares of advantages beyond eps."
    ),
    "C24": (
        "a theorem, and the runs have one turn."
    ),
}  # fmt: skip


def judge_claims(sweep: Sweep, alpha: float | None = None) -> list[Claim]:
    """All claims for all arms, by number, exact controls and the null last. An arm's findings are for the R values that
    its runs have, measured or not. alpha: error rate of each decisive interval; None for what lets all of them hold
    together (`rules.simultaneous_alpha`), as in a report."""
    pairs = budget_pairs(sweep)
    if alpha is None:
        alpha = rules.simultaneous_alpha(len(sweep.cells) + budget.extra_cells(pairs) + paired.extra_cells(sweep))
    claims: list[Claim] = [c11(sweep, pair, alpha) for pair in pairs]
    claims += [paired.c16(sweep, pair, alpha) for pair in paired.token_pairs(sweep)]
    claims += [paired.c19(sweep, pair, alpha) for pair in paired.clipping_pairs(sweep)]
    for arm in sweep.arm_names:
        groups = {R: usable_groups(sweep, arm, R) for a, R in sweep.cells if a == arm}
        records = {R: records_of(sweep, arm, R) for R in groups}
        about, kind = scope(differences(sweep, arm)), estimator_of(sweep, arm)
        claims += [judge_one(arm, kind, records) for judge_one in (c2, c3, c4)]
        measured = [c5(arm, kind, groups, records, alpha), c6(arm, kind, records, sweep, alpha), c9(arm, groups, alpha)]
        claims += [replace(claim, remarks=(*about, *claim.remarks)) for claim in measured]
        claims += [c7(arm, kind, groups, alpha), c8(arm, kind, groups, alpha, about), c10(arm, groups, alpha, about)]
        metrics = sweep.metrics[sweep.metrics["arm"] == arm]
        claims += [c18(arm, groups, records), c20(arm, groups, records, metrics, alpha), c21(arm, groups, alpha, about)]
        claims += [controls(arm, groups), shuffled(arm, groups, alpha, by_length(sweep, arm)), q3(arm, groups)]
    judged = {claim.id for claim in claims}
    return sorted([*claims, *(claim for claim in undecided() if claim.id not in judged)], key=_order)


def _order(claim: Claim) -> tuple[int, str]:
    number = claim.id.removeprefix("C")
    return (int(number) if number.isdigit() else 100), claim.id


def error_lines(claims: list[Claim]) -> list[str]:
    """One line for each exact assertion that failed."""
    return [f"{claim.id}: {error}" for claim in claims for error in claim.errors]


def undecided() -> list[Claim]:
    """One claim each for the whole report: it says nothing about one arm or R."""
    found = []
    for name, needs in NEEDS.items():
        exact = name in rules.BY_THEORY
        verdict = rules.by_theory(name) if exact else UNDECIDED
        lead = f"It is {rules.NOT_FOR_RUNS}" if exact else f"It {UNDECIDED}"
        found.append(Claim(name, EVERY_ARM, STATEMENTS[name].brief, verdict, (), (f"{lead}: {needs}", THEORY)))
    return found


def claims_frame(claims: list[Claim]) -> pd.DataFrame:
    """One row per claim, arm and R, and one with no R for the claim as a whole."""
    rows: list[tuple[object, ...]] = []
    none = float("nan")
    for c in claims:
        total = sum(f.groups for f in c.findings)
        rows.append((c.id, c.arm, None, total, c.paper, "", none, none, none, "", c.verdict, " ".join(c.remarks)))
        for f in c.findings:
            decisive = f.interval.mean, f.interval.low, f.interval.high
            rows.append((c.id, c.arm, f.R, f.groups, f.paper, f.measured, *decisive, f.null, f.verdict, ""))
    frame = pd.DataFrame(rows, columns=CLAIM_COLUMNS)
    return frame.astype({"R": "Int64"})


def claims_markdown(claims: list[Claim], missing: Sequence[str] = (), weights: str = "") -> str:
    """The claims for a reader: what is meant and what is missing, a heading and verdict each, a table by R, the
    remarks, and the rules at the end.

    missing: sentences on what the sweep lacks, runs above all. weights: one on where the model's weights came from.
    """
    several = len({c.arm for c in claims} - {EVERY_ARM}) > 1
    text = [f"# Claims of arXiv {ARXIV}\n", f"{DEFINED}\n"]
    if weights:
        text.append(f"{markdown_text(weights)}\n")
    if missing:
        text += ["## What is missing\n", "\n".join(f"- {markdown_text(sentence)}" for sentence in missing) + "\n"]
    for claim in claims:
        arm = f" ({claim.arm})" if several or claim.arm == EVERY_ARM else ""
        text.append(f"## {markdown_text(f'{claim.id}{arm}: {claim.verdict}')}\n")
        text.append(markdown_text(f"{claim.lead}: {claim.paper}") + "\n")
        rows = [[str(f.R), str(f.groups), f.paper, f.measured, f.null, f.verdict] for f in claim.findings]
        if rows:
            text.append(markdown(claim.header, rows))
        text.append("\n".join(f"- {markdown_text(remark)}" for remark in claim.remarks) + "\n")
    text += ["## The rules, fixed before looking\n", *(f"- {rule}" for rule in rules.IN_WORDS), ""]
    return "\n".join(text)
