"""The rules of the report's verdicts, fixed before looking at any run. Changing one is a change of method."""

from __future__ import annotations

from collections.abc import Iterable

from grpo_sweeps.maths.intervals import MIN_CLUSTERS, Interval
from grpo_sweeps.paper import ABOUT_TWO, MARGIN, SPARSE, TABLE1

HOLDS = "holds in these runs"
CONTRADICTED = "contradicted by these runs"
UNDECIDED = "cannot be decided from these runs"
UNDEFINED = "undefined in the paper"
ASKED = "a question: shown, not judged"
COMPARED = "compared, not judged"
NOT_ABOUT = "not about this arm"
SAYS_NOTHING = "says nothing here"
"""Of a bound that is not below what is possible at all: it cannot fail, and holds nothing."""

CORRECTED = "holds, corrected: not in proportion"
"""C5: the norm grows with sigma_r, between noise and signal, and a norm in proportion to it is excluded."""

LONGER, SHORTER = "null rejected: longer than chance", "null rejected: shorter than chance"
"""Shuffled: chance alone is excluded, to which side. Not of the paper, which says nothing of it."""

NOT_FOR_RUNS = "not a question for runs"
BY_THEORY = {
    "C12": "does not hold", "C14": "holds, corrected", "C18": "does not hold", "C23": "does not hold", "C24": "holds"
}  # fmt: skip
"""Claims that arithmetic or a theorem decides, with the verdict of the theory report."""

ALPHA = 0.05
"""Chance, at most, that any verdict of one report is wrong by the draw of its data (Bonferroni over its tests)."""

TESTS_PER_CELL = 13
"""Decisive intervals for each arm and R: C5's slope, C6's fall of rho (at each eps with its part of one), C7's share of
groups, C8's effective rank and the four other definitions of rank beside it, the score-mean null of C9, C10's top-1
fraction, C20's rank of the stack (of its two ends one side each), C21's difference from the R of Figure 2, the mean
mid-p of shuffled rewards."""

MIN_GROUPS = 30
"""Measured mixed groups below which an R is not decided, since Student's t is off for few and skewed values. C8 alone
can fall to fewer: the effective rank lies in [1, R], and Hoeffding's interval holds for any number of such values."""

TOLERATED_SHARE = 0.05
"""C7: a bound that more than one group in twenty breaks does not hold."""

WITNESSES = 5
"""C7: an 'at most' falls to counterexamples; so many groups, each beyond the precision of its K, are asked for."""

RESOLUTION = 1e-3
"""C7: a group whose eigenvalues are known no better than this part of the largest cannot testify to a low rank."""

CONTROL_TOLERANCE = 1e-6
ROUNDING = 1e-12  # a relative change of a float64 value that is written as rounding
"""C8: largest relative change of the effective rank that still counts as rounding in the exact negative controls."""

SUM_TOLERANCE = 1e-6
"""C2 to C5: largest relative error of an identity of the advantages that still counts as rounding."""

SLOPES = {
    "group mean": (1.0, 2.0), "leave-one-out": (1.0, 2.0), "std of the step": (1.0, 2.0), "std": (0.0, 1.0),
}  # fmt: skip
"""C5: slope of log norm on log sqrt(k(R-k))/R where noise and where signal rules, by kind of advantage."""

IN_PROPORTION = (1.0, 2.0)
"""C5: the range of the kinds that the claim is about, r - mean up to a factor for the step."""

NO_SLOPE = ("Beta density",)
"""C5 says nothing of these kinds: a density fitted to each step divides every k by a number of its own."""

SLOPE_MARGIN = 0.25
"""C5: how far beyond these ends the slope's interval may reach; noise alone sits on an end."""

LIKE = 0.9
"""A part's Gram is like the whole one where correlation and cosine with it are above this."""

MIN_PER_K = 5
"""C5: groups below which a k takes no part in the slope."""

RISE = MARGIN
"""C16: credit by token raises the rank where the change of the effective rank and that of the effective rank less the
null of the rows' own norms, equal texts made one, both lie above 0; it does not where one of them lies below this."""

SAME = MARGIN
"""C19: the structure is not affected where the change of the effective rank lies within so much of 0."""

WITHIN = f"holds within {SAME:g} in these runs"
"""C19's verdict where it holds: of the effective rank, up to the margin."""

MIN_STEPS = 30
"""C20: steps with a mixed measured group below which an R is not decided."""

MIN_THIRD_STEPS = 3
"""C6, Q3: measured steps in the first and in the last third of training below which no change between them is told."""

MIDDLE = (0.25, 0.75)
"""C18: prompts of middling difficulty are those of groups whose share of right rollouts lies in this range."""

GAIN_MARGIN = 0.01
"""C11: a larger R learns faster when its gain in accuracy is larger at equal rollouts, the whole interval above 0; it
does not when the whole interval is below this."""

IN_WORDS = (
    f"Any: a verdict needs its whole interval on one side, otherwise it says '{UNDECIDED}'; fewer than {MIN_GROUPS} "
    "measured mixed groups at an R decide nothing there. Intervals behind verdicts are widened so that all verdicts of "
    f"this report together are wrong by chance with probability about {ALPHA:g} (Bonferroni; Student's t over "
    "clusters: more with few or very skewed groups), and by what the precision of the records allows. They are cut to "
    "what a quantity can take: one that is the whole range says nothing. A mean over fewer than "
    f"{MIN_CLUSTERS} runs or prompts has none.",
    f"A claim about an estimator, or what follows from its zero sum, is '{NOT_ABOUT}' where the arm has another one.",
    f"C2, C3, controls: identities hold to {SUM_TOLERANCE:.0e}. C2 to C4 need no Gram: what counts for them is every "
    f"recorded group, {MIN_GROUPS} or more and one of them mixed.",
    f"C4: a bound that is not below what is possible at all '{SAYS_NOTHING}'; an R where none is does not count.",
    "C5: the norm grows with sigma_r when its log-log slope over the groups of these runs is between 1 and 2, give or "
    f"take {SLOPE_MARGIN:g}; where slope 1 is excluded it '{CORRECTED}'. A slope within prompts that says "
    "otherwise leaves it open.",
    f"C6: sparsity grows when the shares of advantages beyond {' and '.join(f'{eps:g}' for eps in SPARSE)} both fall "
    f"from the first to the last third of the steps, {MIN_THIRD_STEPS} measured steps or more in each.",
    f"C7: 'at most' is about every group, and false with a counterexample: {WITNESSES} groups of a rank above R - 1 "
    f"beyond the precision of K contradict it, however few they are among all. With fewer it holds when the share of "
    f"such groups is below {TOLERATED_SHARE:.0%} with its whole interval.",
    f"C8: judged is 'for every R, because of the zero sum', so that arms without a zero sum are none of its. 'About 2' "
    f"means a mean effective rank within {MARGIN:g} of {ABOUT_TWO:g}. With fewer than {MIN_GROUPS} "
    "groups it is still not 'about 2' where Hoeffding's interval, which asks for independent prompts and seeds and for "
    f"no distribution, excludes it. 'For every R' holds from R = {', '.join(map(str, sorted(TABLE1)))} together, and "
    "at no R where repeated texts and norms alone bring the null to 'about 2'.",
    f"C10, C21: numbers measured on one model are judged on that model, task and reward, and '{COMPARED}' elsewhere. "
    "Figure 2's order holds when the top-1 fraction at its R is above that at each other R of the table.",
    "C11: a larger R learns faster when its gain in held-out accuracy, at equal rollouts a step and with "
    "estimator=rloo, is larger than at the least R, paired by problem and seed, the whole interval above 0; it does "
    f"not when the whole interval is below {GAIN_MARGIN:g}.",
    "C16: credit by token raises the rank when, in the same groups, the effective rank and what it has beyond the null "
    f"of the rows' own norms with equal texts made one both rise, and does not when one rises by less than {RISE:g}.",
    f"C19: clipping and KL leave the structure as it is, '{WITHIN}', when the effective rank of the same groups, after "
    f"a first update, changes by less than {SAME:g}.",
    f"Shuffled: the null is rejected to one side or not at all, with {MIN_GROUPS} groups or more. That contradicts "
    "nothing the paper says.",
    f"C20: a step has about 2 directions when the effective rank of its stacked groups is about 2 in {MIN_STEPS} steps "
    "or more, and has not when nothing that the groups' own spectra allow is about 2.",
)
"""A sentence or two for each rule, the claim's name first."""


CELLS_OF_C11 = 6
"""C11's intervals that count as the tests of one cell; they are there where both budgets are. C16 and C19 have one for
each two arms that are compared and R, and as many of them count as a cell's."""


def simultaneous_alpha(cells: int) -> float:
    """Error rate of one interval so that all decisive intervals of a report hold together with 1 - ALPHA.

    >>> simultaneous_alpha(3) == 0.05 / 39
    True
    """
    return ALPHA / (TESTS_PER_CELL * max(1, cells))


def judge(interval: Interval, low: float, high: float, groups: int) -> str:
    """HOLDS when the whole interval is in [low, high], CONTRADICTED when none of it is, UNDECIDED otherwise or with too
    few groups.

    >>> judge(Interval(2.0, 1.9, 2.1, 40), 1.75, 2.25, 40)
    'holds in these runs'
    """
    if groups < MIN_GROUPS:
        return UNDECIDED
    if interval.inside(low, high):
        return HOLDS
    return CONTRADICTED if interval.outside(low, high) else UNDECIDED


def for_every_R(verdict: str, measured: Iterable[int]) -> str:
    """A claim about every R, or about Table 1, holds when each R of the table was measured and none contradicts it.

    >>> for_every_R(HOLDS, [4]), for_every_R(CONTRADICTED, [4])
    ('cannot be decided from these runs', 'contradicted by these runs')
    """
    return UNDECIDED if verdict == HOLDS and set(TABLE1) - set(measured) else verdict


def by_theory(claim: str) -> str:
    """The verdict of a runs' report on a claim of `BY_THEORY`.

    >>> by_theory("C12")
    'not a question for runs; theory: does not hold'
    """
    return f"{NOT_FOR_RUNS}; theory: {BY_THEORY[claim]}"


def all_of(verdicts: list[str]) -> str:
    """A claim about every R: one contradiction is enough; it holds when it does at each R where it says anything, with
    a correction where one of them needs it.

    >>> all_of([HOLDS, SAYS_NOTHING]), all_of([SAYS_NOTHING]), all_of([HOLDS, UNDECIDED])
    ('holds in these runs', 'says nothing here', 'cannot be decided from these runs')
    """
    if CONTRADICTED in verdicts:
        return CONTRADICTED
    said = {verdict for verdict in verdicts if verdict != SAYS_NOTHING} or set(verdicts)
    if said == {HOLDS, CORRECTED}:
        return CORRECTED
    return said.pop() if len(said) == 1 else UNDECIDED
