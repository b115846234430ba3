"""What arXiv 2606.29238 says, once: its claims in our words, where they stand, and its numbers.

Pure data. The sweep report (`report.claims`) and the theory report (`science`) judge these statements; `docs/claims/`
has a page for each.
"""

from __future__ import annotations

from dataclasses import dataclass

ARXIV = "2606.29238"
BEST_SIZE_ARXIV = "2603.01162"  # the paper on the best group size
MODEL = "Nemotron-4B"
"""The model that the paper's figures are about."""

MODEL_SHAPES = ("nemotron_mini_4b", "llama_nemotron_nano_4b")
"""The public architectures of that name and size, by their names in `models.shapes`; the paper does not say which."""

TASK = "grpo_sweeps.tasks.gsm8k.gsm8k"
REWARDS = ("grpo_sweeps.rewards.exact_match.strict", "grpo_sweeps.rewards.exact_match.flexible")
"""The paper's task, and rewards of 0 and 1 for the right answer to it."""


@dataclass(frozen=True)
class Statement:
    """One claim of the paper.

    title: what it is about. place: where it stands, or its subject where it has no number. words: what the paper says,
    in our words. in_brief: the same for the sweep report, where that says it shorter.
    """

    title: str
    place: str
    words: str
    in_brief: str = ""

    @property
    def brief(self) -> str:
        """`in_brief`, or `words` where these are brief enough."""
        return self.in_brief or self.words


STATEMENTS = {
    "C1": Statement(
        "one advantage for all tokens",
        "Theorem 3.1",
        "With a reward for the outcome alone every token of a rollout has the same advantage.",
        "Under outcome reward every token of a rollout has the same advantage.",
    ),
    "C2": Statement("zero sum", "4.1(i)", "The advantages of a group sum to zero."),
    "C3": Statement(
        "variance and covariance of advantages",
        "4.1(ii), (iii)",
        "Var A = (R-1)/R sigma^2, and two advantages of a group have the covariance -sigma^2/R.",
        "Var A = (R-1)/R sigma^2 and Cov(A_i, A_j) = -sigma^2/R.",
    ),
    "C4": Statement(
        "the tail of an advantage",
        "4.1(iv)",
        "The chance of an advantage above eps is at most (R-1) sigma^2 / (R eps^2).",
        "P(|A| > eps) is at most (R-1) sigma^2 / (R eps^2).",
    ),
    "C5": Statement(
        "the norm of the gradient and the spread of rewards",
        "Corollary 4.2",
        "The norm of the gradient scales with sigma_r and vanishes as the number k of right rollouts nears 0 or R.",
    ),
    "C6": Statement(
        "sparsity of the gradient",
        "4.1(iv), A.1, 5.1",
        "Few rollouts have an advantage beyond eps, and fewer during training: the gradient becomes sparser.",
        "The sparsity of the gradient grows over training: fewer and fewer advantages beyond eps.",
    ),
    "C7": Statement(
        "rank at most R - 1",
        "rank bound",
        "The zero sum of the advantages leaves the gradient matrix a rank of at most R - 1.",
        "The zero-sum advantages bound the rank of the gradient matrix by R - 1.",
    ),
    "C8": Statement(
        "effective rank of about 2",
        "rank of about 2",
        "The effective rank is about 2 for every R, a consequence of the zero-sum constraint.",
    ),
    "C9": Statement(
        "scores cluster in few directions",
        "clustered scores",
        "The scores of a group cluster in few directions.",
    ),
    "C10": Statement(
        "Table 1",
        "Table 1",
        "Top-1 fractions 0.6-0.7, 0.7-0.8, 0.5-0.6 with an effective rank of about 2 at R = 2, 4, 8.",
        "Table 1: top-1 fraction 0.6-0.7, 0.7-0.8, 0.5-0.6 with effective rank about 2 at R = 2, 4, 8.",
    ),
    "C11": Statement(
        "larger groups and learning",
        "Figure 3",
        "A larger group only refines the same two directions, and yet learns faster.",
        "A larger R only refines the same two directions, and yet learns faster.",
    ),
    "C12": Statement(
        "Hoeffding's table",
        "A.2",
        "A table of Hoeffding's bound on the error of the group mean for R = 2 to 16 and eps = 0.3, 0.2, 0.1, with "
        "R = 4, eps = 0.3 called vacuous.",
        "The table of Hoeffding bounds in A.2.",
    ),
    "C13": Statement(
        "bias over many turns",
        "Equation 23",
        "In many turns the group baseline leaves each stage a bias, past rewards + v(s_h) - v(s_0), that grows "
        "linearly with the stage; a single turn is exact.",
        "In several turns the bias grows linearly with the stage.",
    ),
    "C14": Statement(
        "the rollout's own reward in the baseline",
        "Section 9",
        "The group mean contains the rollout's own reward, which makes a bias of order 1/R.",
        "The group mean contains the rollout's own reward, a bias of order 1/R.",
    ),
    "C15": Statement(
        "the baseline of least variance",
        "best baseline",
        "The value is the baseline of least variance.",
    ),
    "C16": Statement(
        "credit by token and the rank",
        "Section 3.1",
        "Advantages by token, in place of one for the whole rollout, would raise the rank of the gradient matrix.",
    ),
    "C17": Statement(
        "what is sampled and what is expected",
        "Equations 8-9",
        "What a rollout received stands, as an equality, for the action value of each of its tokens.",
    ),
    "C18": Statement(
        "a curriculum by the group's baseline",
        "Section 4",
        "The group's baseline makes a curriculum: prompts of middling difficulty weigh most in the gradient.",
    ),
    "C19": Statement(
        "clipping, KL and the structure",
        "clipping and KL",
        "Clipping and a KL term do not affect the structure of the gradient matrix.",
    ),
    "C20": Statement(
        "directions of a step",
        "directions of a step",
        "Each step moves the policy along about 2 directions.",
    ),
    "C21": Statement(
        "the order of the group sizes",
        "Figure 2",
        "The top-1 fraction is not monotonic in R: it is largest at R = 4, above R = 2 and R = 8.",
    ),
    "C22": Statement(
        "a single turn at every position",
        "Section 6",
        "With a single turn the group's baseline is exact at every position.",
    ),
    "C23": Statement(
        "every rollout within eps",
        "A.2",
        "With the chance that Hoeffding's bound leaves, every rollout of a group has an advantage within eps.",
    ),
    "C24": Statement(
        "the bound on the bias of a stage",
        "A.3",
        "The bias of stage h is at most (h-1) r_max + 2 V_max.",
    ),
    "U1": Statement(
        "the gradient as a U-statistic, and the best group size",
        f"arXiv {BEST_SIZE_ARXIV}",
        "The group-mean gradient is a U-statistic; at a fixed number of rollouts its error has a best group size, "
        "set by the policy alone.",
    ),
}
"""The claims by number; U1 is one of another paper."""

OPEN_QUESTION_3 = "Open question 3: does the effective rank fall as sigma_r falls?"


@dataclass(frozen=True)
class PaperRow:
    """One row of Table 1, as printed there."""

    effective_rank: float
    top1_low: float
    top1_high: float


ABOUT_TWO = 2.0
"""The effective rank that the paper reports at every R."""

MARGIN = 0.25
"""How "about 2" is read, fixed before any run: a mean effective rank in [1.75, 2.25]."""

TABLE1 = {2: PaperRow(ABOUT_TWO, 0.6, 0.7), 4: PaperRow(ABOUT_TWO, 0.7, 0.8), 8: PaperRow(ABOUT_TWO, 0.5, 0.6)}
"""Table 1 by R."""

TAILS = (0.1, 0.2, 0.3)
"""The eps of C4's bound, as in the appendix."""

SPARSE = (0.05, 0.3)
"""The eps of C6, fixed before any run: below 1/R up to R = 16, and the appendix's largest."""

EPSILONS = tuple(sorted({*TAILS, *SPARSE}))
"""Every eps of which the share of advantages beyond it is counted."""

HOEFFDING_R = (2, 4, 8, 16)
HOEFFDING_EPS = (0.3, 0.2, 0.1)
CALLED_VACUOUS = (4, 0.3)
"""A.2's table of Hoeffding's bound, C12: its rows, its columns, and the R and eps whose bound it calls vacuous."""

LARGEST_TOP1 = max(TABLE1, key=lambda R: TABLE1[R].top1_low)
"""The R of the largest top-1 fraction in Table 1 and Figure 2, C21."""
