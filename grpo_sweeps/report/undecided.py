"""Claims of arXiv 2606.29238 that no record of a sweep of this kind can decide, and what would be needed."""

from __future__ import annotations

from grpo_sweeps.report.claims.finding import EVERY_ARM, Claim
from grpo_sweeps.report.claims.rules import UNDECIDED

THEORY = "The theory report (python -m grpo_sweeps.theory) has it on policies where everything is exact."

NEEDS = {
    "C1": (
        "Under outcome reward every token of a rollout has the same advantage.",
        "a record keeps one advantage and one weight a rollout. Needed: the spread of advantages and of token weights "
        "within rollouts, which clipping, process rewards, a KL term in the reward or a critic can make. "
        "What the tokens of one run deserved: python -m grpo_sweeps.credit.",
    ),
    "C11": (
        "A larger R only refines the same two directions, and yet learns faster.",
        "needed for the second half are runs of estimator=rloo, which is the group mean rescaled by R/(R-1), with "
        "budget=prompts and with budget=rollouts (+sweeps=group_size), evaluated, with two seeds or more; for the "
        "first half gradient directions that can be compared between groups: a record keeps inner products within one "
        "group.",
    ),
    "C12": (
        "The table of Hoeffding bounds in A.2.",
        "it is arithmetic, 2 exp(-2 R eps^2), which no run bears on.",
    ),
    "C13": (
        "In several turns the bias grows linearly with the stage.",
        "the runs have one turn. Needed: an environment of several turns with known values of its states.",
    ),
    "C14": (
        "The group mean contains the rollout's own reward, a bias of order 1/R.",
        "needed is the exact gradient, or many groups of one prompt at the same weights with their scores in one Gram.",
    ),
    "C15": (
        "The value is the baseline of least variance.",
        "the best constant of a prompt, E[||psi||^2 r] / E[||psi||^2], needs scores of all its rollouts; all-equal "
        "groups have no Gram, and most prompts come once. Needed: every group of repeated prompts measured.",
    ),
}  # fmt: skip


def undecided() -> list[Claim]:
    """One claim each for the whole report: it says nothing about one arm or R."""
    return [
        Claim(name, EVERY_ARM, says, UNDECIDED, (), (f"It {UNDECIDED}: {needs}", THEORY))
        for name, (says, needs) in NEEDS.items()
    ]
