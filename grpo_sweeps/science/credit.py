"""Credit for tokens and stages: C1 (one advantage for all tokens), C13 (the bias of later stages), C17 (what is sampled
and what is expected), C22 (the tokens of a single turn), C24 (the bound on the bias)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from grpo_sweeps.exact import Enumeration, SoftmaxPolicy, by_token, drawn_by_token, enumerate_policy, sequence_moments
from grpo_sweeps.science.claim import EXACT, ExactClaim, Judgement, judged, relative, worst


@dataclass(frozen=True)
class Credit:
    """The true credit of the tokens, A_t = q(s_t, x_t) - v(s_t), beside uniform credit, the same r - v(s_0) for each.

    share: how much of E sum_t A_t^2 uniform credit (r - v(s_0)) / length carries. within: mean standard deviation of
    A_t within a sequence over that of all tokens. by_position_T: Var A_t / Var r, tokens at position t, absent ones 0.
    """

    share: float
    within: float
    by_position_T: np.ndarray
    error: float


def credit(e: Enumeration) -> Credit:
    """The exact credit of a prompt; `error` is that of sum_t A_t = r - v(s_0) and of Var r = sum_t E A_t^2."""
    A, mask, p, lengths = e.advantages_NT, e.mask_NT, e.p_N, e.lengths_N
    total = e.rewards_N - e.J
    true = p @ A.square().sum(dim=1)
    mean_N = A.sum(dim=1) / lengths
    around = (A - mean_N[:, None]).square() * mask
    pooled = float((p @ A.square().sum(dim=1)) / (p @ lengths.double()))
    within = float(p @ (around.sum(dim=1) / lengths).sqrt()) / pooled**0.5
    errors = [relative(A.sum(dim=1).numpy(), total.numpy()), relative(float(true), e.sigma2)]
    by_position_T = (p @ A.square()).numpy() / e.sigma2
    return Credit(float(p @ (total.square() / lengths) / true), within, by_position_T, worst(errors))


def one_advantage(enumerations: Sequence[Enumeration]) -> ExactClaim:
    """C1: all tokens of a rollout share one advantage."""
    found = [credit(e) for e in enumerations]
    error = worst(c.error for c in found)
    positions = np.mean([c.by_position_T for c in found], axis=0)
    return judged(
        "C1",
        "True of the estimator, which takes one baseline v(s_0) for all tokens; the reward does not force it. With "
        "v(s_t) the credit A_t = q(s_t, a_t) - v(s_t) varies within a rollout, sums to r - v(s_0), and its "
        "variances sum to Var r. A KL term in the reward, process rewards or a critic break the uniformity; "
        "clipping varies the weights.",
        f"both sums: {error:.1e}; A_t varies within a rollout by {np.mean([c.within for c in found]):.2f} of its "
        f"size; uniform credit carries {np.mean([c.share for c in found]):.0%} of its square; Var A_t / Var r by "
        "position: " + ", ".join(f"{value:.2f}" for value in positions),
        "",
        "holds, corrected" if error < EXACT else "does not hold",
        error,
    )


def stage_bias(e: Enumeration) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation, (T,), of Bias_h = rewards before stage h + v(s_h) - v(s_0); ended episodes are
    frozen."""
    bias_NT = e.past_rewards_NT + e.values_NT - e.J
    mean_T = e.p_N @ bias_NT
    return mean_T.numpy(), (e.p_N @ (bias_NT - mean_T).square()).sqrt().numpy()


NOT_LINEAR: Judgement = "holds, corrected: not linear"
STRAIGHT = 0.05  # how far linear growth may be off its line, as a share of the last stage's spread
CREDITS = ("whole return", "reward to go", "less v(s_h)")


def stage_errors(e: Enumeration) -> dict[str, float]:
    """tr Var of one rollout's gradient with each credit of a stage; under "error", how far a mean is off grad J."""
    ones_NT = e.mask_NT.double()
    given = {
        "whole return": (e.rewards_N - e.J)[:, None] * ones_NT,
        "reward to go": e.returns_NT - (e.p_N @ e.returns_NT),
        "less v(s_h)": e.returns_NT - e.values_NT,
    }
    found = {name: sequence_moments(e.contribution(credit_NT), e.p_N, 1) for name, credit_NT in given.items()}
    off = worst(relative(m.mean_D.numpy(), e.grad_J_D.numpy()) for m in found.values())
    return {name: m.variance for name, m in found.items()} | {"error": off}


def multi_turn(seeds: Sequence[int]) -> list[Enumeration]:
    """One problem per seed, in turn: four turns of three actions with a reward of 0 or 1 at each, and three turns of
    two actions with rewards drawn at random. Episodes never end early."""
    found = []
    for seed in seeds:
        drawn = bool(seed % 2)
        policy = SoftmaxPolicy(1, 2 if drawn else 3, 3 if drawn else 4, ends=False, seed=seed)
        found.append(enumerate_policy(policy, 0, drawn_by_token(seed) if drawn else by_token(4, seed % 4)))
    return found


def identity_error(e: Enumeration) -> float:
    """Equation 23: E[G - v(s_0) given s_h and the action] = A_h + Bias_h, largest difference over the spread of G.

    The left side is averaged over whole sequences that share what has happened, without any value of a state.
    """
    tokens = int(e.tokens_NT.max()) + 1
    bias_NT = e.past_rewards_NT + e.values_NT - e.J
    found = []
    for t in range(e.mask_NT.shape[1]):
        on_N = e.mask_NT[:, t]
        p_N, G_N = e.p_N[on_N].numpy(), e.rewards_N[on_N].numpy()
        _, state_N = np.unique((e.prefixes_NT * tokens + e.tokens_NT)[on_N, t].numpy(), return_inverse=True)
        mean_N = (np.bincount(state_N, p_N * G_N) / np.bincount(state_N, p_N))[state_N]
        found.append(np.abs(mean_N - e.J - (e.advantages_NT + bias_NT)[on_N, t].numpy()).max())
    return float(max(found)) / e.sigma2**0.5


def bound_share(e: Enumeration) -> float:
    """The largest |Bias_h| over the appendix's bound (h - 1) r_max + 2 V_max."""
    bias_NT = (e.past_rewards_NT + e.values_NT - e.J).abs() * e.mask_NT
    stage_T = np.arange(bias_NT.shape[1])  # h - 1
    bound_T = stage_T * float(e.token_rewards_NT.abs().max()) + 2 * float(e.values_NT.abs().max())
    return float((bias_NT.numpy() / bound_T).max())


def in_one_turn(e: Enumeration) -> float:
    """Section 6 calls one turn exact at every position: the largest spread of v(s_t) - v(s_0) over the tokens of a turn
    whose reward comes at its end, as a part of the spread of the reward."""
    return float(stage_bias(e)[1].max()) / e.sigma2**0.5


def growing_bias(enumerations: Sequence[Enumeration], single: Sequence[Enumeration] = ()) -> ExactClaim:
    """C13: Equation 23 and its bound; that the bias grows linearly. `single`: prompts of one turn, for section 6."""
    means, spreads = zip(*(stage_bias(e) for e in enumerations), strict=True)
    errors = [stage_errors(e) for e in enumerations]
    largest = max(float(np.abs(mean).max()) for mean in means)
    falls = max(float((-np.diff(spread)).max()) for spread in spreads)
    less = sum(error["whole return"] < error["less v(s_h)"] for error in errors)
    ratio = [error["whole return"] / error["less v(s_h)"] for error in errors]
    identity = worst(identity_error(e) for e in (*enumerations, *single))
    off = worst([identity, largest, *(error["error"] for error in errors)])
    bound = max(bound_share(e) for e in enumerations)
    longest = [spread / spread[-1] for spread in spreads if len(spread) == max(map(len, spreads))]
    share = np.mean(longest, axis=0)
    bent = max(float(np.abs(spread - np.linspace(0, 1, len(spread))).max()) for spread in longest)
    judgement: Judgement = "does not hold"
    if off < EXACT and falls < EXACT and bound <= 1 + EXACT:
        judgement = NOT_LINEAR if bent > STRAIGHT else "holds"
    turn = f"; one turn: v(s_t) - v(s_0) spreads up to {max(map(in_one_turn, single)):.2f} of r" if single else ""
    return judged(
        "C13",
        "Equation 23 is an identity for the baseline v(s_0) or a leave-one-out mean (the group mean multiplies it by "
        "(R-1)/R, as in C14), and the appendix's bound (h-1) r_max + 2 V_max is right; linear growth is not. Bias_h = "
        "past rewards + v(s_h) - v(s_0) is a martingale: mean zero at every stage, a spread that never falls and need "
        "not be linear. It depends on s_h alone, so the gradient keeps its mean; its variance usually grows, not "
        "always. A single turn is not exact at every position: v(s_t) - v(s_0) is there at each of its tokens.",
        f"{len(enumerations)} problems: identity off by {identity:.1e}, largest |Bias_h| {bound:.2f} of its bound; "
        f"largest mean {largest:.1e}, largest fall of the spread {max(falls, 0.0):.1e}, mean gradient off by "
        f"{worst(error['error'] for error in errors):.1e}; spread by stage over the last: "
        f"{', '.join(f'{x:.2f}' for x in share)} (off a straight line by up to "
        f"{bent:.2f}); variance with the whole return over that with v(s_h): {min(ratio):.2f} to {max(ratio):.2f}, "
        f"below 1 in {less}{turn}",
        "",
        judgement,
        off,
    )


def left_to_chance(e: Enumeration) -> np.ndarray:
    """Spread of what is received from token t on about q(s_t, x_t), by position, over the spread of the reward, (T,).
    0 at tokens after which nothing is left to chance, and at padding."""
    off_NT = (e.returns_NT - e.action_values_NT) * e.mask_NT
    return (e.p_N @ off_NT.square()).clamp(min=0.0).sqrt().numpy() / e.sigma2**0.5


def in_expectation(enumerations: Sequence[Enumeration]) -> ExactClaim:
    """C17: what a rollout received against the action values of its tokens, in each sequence and on average."""
    errors = [identity_error(e) for e in enumerations]
    spreads = [left_to_chance(e) for e in enumerations]
    largest = max(float(spread.max()) for spread in spreads)
    positions = np.mean(spreads, axis=0)
    judgement: Judgement = "does not hold"
    if worst(errors) < EXACT:
        judgement = "holds" if largest < EXACT else "holds, corrected"
    return judged(
        "C17",
        "In expectation only: E[r given s_t, x_t] = q(s_t, x_t), while the r of one rollout differs from it by all "
        "that is still left to chance after the token. It is an equality at the last token, and where nothing is "
        "drawn after it.",
        f"{len(errors)} prompts: the mean is off by {worst(errors):.1e}; spread of r about q by position, over that of "
        "r: " + ", ".join(f"{value:.2f}" for value in positions),
        "",
        judgement,
        worst(errors),
    )


def mean_of_the_rest(e: Enumeration) -> float:
    """|E sum_t (v(s_t) - v(s_0)) grad log pi(x_t | s_t)|, over the root of its second moment; 0 where that is 0."""
    rest_ND = e.contribution(e.values_NT - e.J)
    second = float(e.p_N @ rest_ND.square().sum(dim=1))
    return float((e.p_N @ rest_ND).norm()) / second**0.5 if second > 0 else 0.0


def single_turn(enumerations: Sequence[Enumeration]) -> ExactClaim:
    """C22: what the group's baseline leaves at the tokens of one turn, and what of it the mean gradient keeps."""
    errors = [max(identity_error(e), mean_of_the_rest(e)) for e in enumerations]
    by_position = [stage_bias(e)[1] / e.sigma2**0.5 for e in enumerations]
    first = max(float((e.values_NT[:, 0] - e.J).abs().max()) / e.sigma2**0.5 for e in enumerations)
    largest = max(map(in_one_turn, enumerations))
    said = ", ".join(f"{value:.2f}" for value in np.mean(by_position, axis=0))
    judgement: Judgement = "undecided"
    if max(worst(errors), first) < EXACT:
        judgement = "holds" if largest < EXACT else "does not hold"
    return judged(
        "C22",
        "Exact at the first token. At each later one the credit of the group's baseline holds v(s_t) - v(s_0) beside "
        "the token's own: what the baseline does not know of the tokens before it. What is exact at every position is "
        "the mean gradient, since that rest depends on s_t alone.",
        f"{len(errors)} prompts of one turn: identity and mean of the rest off by {worst(errors):.1e}; spread of "
        f"v(s_t) - v(s_0) by position, over that of r: {said}",
        "",
        judgement,
        worst(errors),
    )


def stage_bound(enumerations: Sequence[Enumeration]) -> ExactClaim:
    """C24: the largest |Bias_h| of every state against the appendix's bound."""
    shares = [bound_share(e) for e in enumerations]
    return judged(
        "C24",
        "True: at most h - 1 rewards have been received, and each of v(s_h) and v(s_0) is at most V_max. A bound that "
        "grows with h, not a bias that does (C13).",
        f"{len(shares)} problems of several turns and of one, every state: the largest |Bias_h| is "
        f"{max(shares):.2f} of its bound, in the middle problem {float(np.median(shares)):.2f}",
        "",
        "holds" if max(shares) <= 1 + EXACT else "does not hold",
    )
