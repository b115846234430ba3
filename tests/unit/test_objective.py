"""The loss's pure functions: against the textbook under autograd, and exactly on policies that are listed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from grpo_sweeps.estimators import row_weights
from grpo_sweeps.exact import SoftmaxPolicy, binary, enumerate_policy
from grpo_sweeps.exact.enumeration import from_here_on
from grpo_sweeps.maths.objective import KL_ESTIMATORS, RATIOS, kl, kl_in_reward, kl_slope, surrogate

EXACT = 1e-10
B, T = 40, 5
LOW, HIGH = 0.2, 0.3


def batch(seed: int, spread: float = 0.5, by_token: bool = False) -> tuple[Tensor, ...]:
    """Random log-probabilities now and at sampling, advantages, weights and mask; some padding, some A = 0."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    logp = normal(B, T) - 2
    old = logp + spread * normal(B, T)
    advantages = normal(B, T) if by_token else normal(B)
    advantages[1] = 0.0
    lengths = torch.randint(1, T + 1, (B,), generator=generator)
    mask = torch.arange(T) < lengths[:, None]
    return logp, old, advantages, normal(B).abs() + 0.1, mask


def textbook(logp: Tensor, old: Tensor, advantages: Tensor, weights: Tensor, mask: Tensor, ratio: str) -> Tensor:
    """-sum_bt a_b min(rho A, clip(rho) A), row by row as the papers write it; none: -sum a A log pi."""
    total = logp.new_zeros(())
    for b in range(len(logp)):
        n = int(mask[b].sum())
        A = advantages[b] if advantages.ndim == 1 else advantages[b, :n]
        log_ratio = logp[b, :n] - old[b, :n]
        if ratio == "none":
            total = total - weights[b] * (A * logp[b, :n]).sum()
            continue
        rho = log_ratio.exp() if ratio == "token" else log_ratio.mean().exp().expand(n)
        total = total - weights[b] * torch.minimum(rho * A, rho.clamp(1 - LOW, 1 + HIGH) * A).sum()
    return total


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("ratio", "by_token"),  # one ratio for a sequence and one advantage a token is GSPO-token, tested below
    [("none", False), ("none", True), ("token", False), ("token", True), ("sequence", False)],
)
def test_coefficients_are_the_gradient_of_the_textbook_s_loss(ratio: str, by_token: bool, seed: int) -> None:
    logp, old, advantages, weights, mask = batch(seed, by_token=by_token)
    now = logp.clone().requires_grad_()
    expected = textbook(now, old, advantages, weights, mask, ratio)
    (gradient,) = torch.autograd.grad(expected, now)
    again = logp.clone().requires_grad_()
    found = surrogate(again, old, advantages, weights, mask, ratio, LOW, HIGH)
    assert torch.allclose(found.loss_BT.sum(), expected, rtol=0, atol=EXACT)
    (own,) = torch.autograd.grad(found.loss_BT.sum(), again)
    assert torch.allclose(own, gradient, rtol=0, atol=EXACT)
    assert torch.allclose(-found.coefficients_BT, gradient, rtol=0, atol=EXACT)
    assert not found.coefficients_BT.requires_grad and not found.coefficients_BT[~mask].any()
    if ratio != "none":
        assert found.low_BT.any() and found.high_BT.any(), "nothing was clipped: the case says little"


def test_one_advantage_for_each_token_of_a_sequence_ratio() -> None:
    """GSPO-token: s = sg[s_b] pi / sg[pi], one minimum a token."""
    logp, old, advantages, weights, mask = batch(4, by_token=True)
    now = logp.clone().requires_grad_()
    s = ((logp - old) * mask).sum(1, keepdim=True).div(mask.sum(1, keepdim=True)).exp() * (now - logp).exp()
    terms = torch.minimum(s * advantages, s.clamp(1 - LOW, 1 + HIGH) * advantages)
    (gradient,) = torch.autograd.grad(-(weights[:, None] * terms * mask).sum(), now)
    found = surrogate(logp, old, advantages, weights, mask, "sequence", LOW, HIGH)
    assert torch.allclose(-found.coefficients_BT, gradient, rtol=0, atol=EXACT)


@pytest.mark.parametrize("ratio", RATIOS)
def test_at_ratio_1_every_objective_is_plain_reinforce(ratio: str) -> None:
    logp, _, advantages, weights, mask = batch(1)
    found = surrogate(logp, logp, advantages, weights, mask, ratio, LOW, HIGH)
    assert torch.equal(found.coefficients_BT, (weights * advantages)[:, None] * mask)
    assert torch.equal(found.ratio_BT, mask.double()) and not (found.low_BT | found.high_BT).any()


@pytest.mark.parametrize("ratio", ["token", "sequence"])
@pytest.mark.parametrize(
    ("log_ratio", "A", "low", "high"),
    [(0.5, 1.0, False, True), (0.5, -1.0, False, False), (-0.5, -1.0, True, False), (-0.5, 1.0, False, False)],
)
def test_only_the_side_that_would_go_on_is_clipped(
    ratio: str, log_ratio: float, A: float, low: bool, high: bool
) -> None:
    mask = torch.ones(1, 3, dtype=torch.bool)
    old = torch.full((1, 3), -1.0, dtype=torch.float64)
    one = torch.ones(1, dtype=torch.float64)
    found = surrogate(old + log_ratio, old, A * one, one, mask, ratio, LOW, HIGH)
    assert bool(found.low_BT.all()) == bool(found.low_BT.any()) == low
    assert bool(found.high_BT.all()) == bool(found.high_BT.any()) == high
    wanted = 0.0 if low or high else A * float(torch.tensor(log_ratio, dtype=torch.float64).exp())
    assert torch.allclose(found.coefficients_BT, torch.full_like(old, wanted), rtol=0, atol=EXACT)


def test_the_two_bounds_are_apart() -> None:
    """DAPO's clip-higher: the same ratio is clipped or not by the upper bound alone."""
    mask = torch.ones(1, 1, dtype=torch.bool)
    old = torch.zeros(1, 1, dtype=torch.float64)
    one = torch.ones(1, dtype=torch.float64)
    for log_ratio, A in ((0.22, 1.0), (-0.25, -1.0)):  # ratios 1.246 and 0.779
        clipped = {
            bounds: bool((found.low_BT | found.high_BT).any())
            for bounds in ((0.2, 0.2), (0.2, 0.28), (0.3, 0.2))
            for found in [surrogate(old + log_ratio, old, A * one, one, mask, "token", *bounds)]
        }
        assert clipped == {(0.2, 0.2): True, (0.2, 0.28): A < 0, (0.3, 0.2): A > 0}


@pytest.mark.parametrize("ratio", RATIOS)
def test_padding_may_hold_anything(ratio: str) -> None:
    logp, old, advantages, weights, mask = batch(2)
    clean = surrogate(logp, old, advantages, weights, mask, ratio, LOW, HIGH)
    dirty = surrogate(
        logp.masked_fill(~mask, torch.nan),
        old.masked_fill(~mask, torch.inf),
        advantages,
        weights,
        mask,
        ratio,
        LOW,
        HIGH,
    )
    for name in ("loss_BT", "coefficients_BT", "ratio_BT", "low_BT", "high_BT"):
        assert torch.equal(getattr(clean, name), getattr(dirty, name)), name
    assert not clean.loss_BT[~mask].any()


@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
def test_kl_slope_is_the_derivative(estimator: str) -> None:
    logp, reference, *_, mask = batch(3)
    now = logp.clone().requires_grad_()
    values = kl(now, reference, mask, estimator)
    (gradient,) = torch.autograd.grad(values.sum(), now)
    assert torch.allclose(kl_slope(logp, reference, mask, estimator), gradient, rtol=0, atol=EXACT)
    d = (logp - reference)[mask]
    by_hand = {"k1": d, "k2": d**2 / 2, "k3": (-d).exp() - 1 + d}[estimator]
    assert torch.allclose(values[mask], by_hand, rtol=0, atol=EXACT) and not values[~mask].any()


class Pair:
    """A policy and a reference, all sequences of one prompt, on-policy expectations as finite sums."""

    def __init__(self) -> None:
        shape = {"prompts": 1, "tokens": 3, "max_length": 3, "width": 4}
        self.e = enumerate_policy(SoftmaxPolicy(**shape, seed=3), 0, binary())
        self.ref = enumerate_policy(SoftmaxPolicy(**shape, seed=8), 0, binary())
        self.rows = torch.ones(len(self.e.p_N), 1, dtype=torch.bool)

    def sums(self, e) -> Tensor:
        return e.log_probs_NT.sum(dim=1, keepdim=True)

    def mean_of_scores(self, coefficient_N: Tensor) -> Tensor:
        """E[c psi]."""
        return (self.e.p_N * coefficient_N) @ self.e.psi_ND

    def gradient(self, of_log_p) -> Tensor:
        """d/d theta of f(log p_N) by the chain rule: sum_n df/dlog p_n psi_n."""
        log_p = self.sums(self.e)[:, 0].clone().requires_grad_()
        (by_sequence,) = torch.autograd.grad(of_log_p(log_p), log_p)
        return by_sequence @ self.e.psi_ND

    @property
    def forward(self) -> Tensor:
        """Gradient of KL(pi, reference) = sum p log(p / q), of whole sequences."""
        log_q = self.sums(self.ref)[:, 0]
        return self.gradient(lambda log_p: (log_p.exp() * (log_p - log_q)).sum())

    @property
    def backward(self) -> Tensor:
        """Gradient of KL(reference, pi) = sum q log(q / p)."""
        log_q = self.sums(self.ref)[:, 0]
        return self.gradient(lambda log_p: (log_q.exp() * (log_q - log_p)).sum())

    def by_token(self, swapped: bool) -> Tensor:
        """Gradient of sum_s d(s) KL of the two distributions of the next token at s, d the policy's, held fixed."""
        e, ref = self.e, self.ref
        log_p = e.log_probs_NT.clone().requires_grad_()
        rest = from_here_on(e.log_probs_NT)
        reach = e.p_N[:, None] / rest.exp()  # of the prefix before token t
        # each state-action pair is listed once for each way to go on from it: the ways' probabilities share it out
        share = (rest - e.log_probs_NT).exp() * e.mask_NT
        p, q = log_p, ref.log_probs_NT
        terms = q.exp() * (q - p) if swapped else p.exp() * (p - q)
        (by_token,) = torch.autograd.grad((reach * share * terms * e.mask_NT).sum(), log_p)
        return torch.einsum("nt,ntd->d", by_token, e.token_psi_NTD)


@pytest.fixture(scope="module")
def pair() -> Pair:
    return Pair()


def close(a: Tensor, b: Tensor) -> bool:
    return float((a - b).norm()) < EXACT


def test_kl_of_sequences_in_the_loss(pair: Pair) -> None:
    """k1 has no expected gradient, k2 that of KL(pi, reference), k3 that of KL(reference, pi)."""
    slopes = {k: kl_slope(pair.sums(pair.e), pair.sums(pair.ref), pair.rows, k)[:, 0] for k in KL_ESTIMATORS}
    assert close(pair.mean_of_scores(slopes["k1"]), torch.zeros_like(pair.forward))
    assert close(pair.mean_of_scores(slopes["k2"]), pair.forward)
    assert close(pair.mean_of_scores(slopes["k3"]), pair.backward)
    assert float(pair.forward.norm()) > 0.01 and float((pair.forward - pair.backward).norm()) > 0.01


def test_kl_by_token_in_the_loss_is_that_of_each_token_with_the_prefixes_held_fixed(pair: Pair) -> None:
    e = pair.e
    found = {}
    for k in KL_ESTIMATORS:
        slope = kl_slope(e.log_probs_NT, pair.ref.log_probs_NT, e.mask_NT, k)
        found[k] = e.p_N @ e.contribution(slope)
    assert close(found["k1"], torch.zeros_like(found["k1"]))
    assert close(found["k2"], pair.by_token(swapped=False))
    assert close(found["k3"], pair.by_token(swapped=True))
    assert float((found["k2"] - pair.forward).norm()) > 0.01, "by token is not the KL of sequences"


def test_kl_in_the_reward(pair: Pair) -> None:
    """The k1 of a sequence taken off its reward: the policy gradient of J - beta KL(pi, reference), exactly."""
    e, beta = pair.e, 0.3
    rewards = kl_in_reward(e.rewards_N, e.log_probs_NT, pair.ref.log_probs_NT, e.mask_NT, "k1", beta)
    assert close(pair.mean_of_scores(rewards), e.grad_J_D - beta * pair.forward)
    kept = kl_in_reward(e.rewards_N, e.log_probs_NT, pair.ref.log_probs_NT, e.mask_NT, "k3", 0.0)
    assert torch.equal(kept, e.rewards_N)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_k1_and_k3_are_unbiased_for_the_kl(pair: Pair, estimator: str) -> None:
    values = kl(pair.sums(pair.e), pair.sums(pair.ref), pair.rows, estimator)[:, 0]
    p, q = pair.e.p_N, pair.ref.p_N
    assert float(p @ values) == pytest.approx(float((p * (p / q).log()).sum()), abs=EXACT)


def test_on_policy_the_surrogates_give_the_policy_gradient(pair: Pair) -> None:
    e = pair.e
    for ratio in RATIOS:
        found = surrogate(
            e.log_probs_NT, e.log_probs_NT, e.rewards_N, torch.ones_like(e.p_N), e.mask_NT, ratio, LOW, HIGH
        )
        assert close(e.p_N @ e.contribution(found.coefficients_BT), e.grad_J_D)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"ratio": "tokens"}, "ratio=tokens: allowed are none, token, sequence"),
        ({"clip_low": 0.0}, "clip_low=0.0"),
        ({"clip_low": 1.5}, "clip_low=1.5"),
        ({"clip_high": 0.0}, "clip_high=0.0"),
        ({"old_BT": torch.zeros(B, T + 1)}, "one shape"),
        ({"mask_BT": torch.ones(B, T)}, "boolean mask"),
        ({"advantages": torch.zeros(T)}, r"\(B,\) or \(B, T\)"),
    ],
)
def test_what_does_not_fit_is_named(changes: dict, words: str) -> None:
    logp, old, advantages, weights, mask = batch(0)
    arguments = {
        "logp_BT": logp, "old_BT": old, "advantages": advantages, "weights": weights, "mask_BT": mask
    }  # fmt: skip
    with pytest.raises(ValueError, match=words):
        surrogate(**{"ratio": "token", **arguments, **changes})
    with pytest.raises(ValueError, match="estimator=k4: allowed are k1, k2, k3"):
        kl(logp, old, mask, "k4")


@pytest.mark.parametrize("seed", range(3))
def test_cispo_and_gmpo_are_plain_and_by_length_at_the_first_update_of_a_batch(seed: int) -> None:
    """CISPO (arXiv 2506.13585): sg[clip(rho)] A log pi, a mean over the tokens of the batch. GMPO (arXiv 2507.20673):
    A times the geometric mean of a rollout's clipped ratios, a mean over rollouts. At ratio 1 no bound is met and their
    gradients are those of `none` with the aggregations token_mean and length; at the second update they are not."""
    logp, old, advantages, _, mask = batch(seed)
    lengths = mask.sum(dim=1)

    def losses(now: Tensor, old: Tensor) -> dict[str, Tensor]:
        log_rho = (now - old) * mask
        cispo = (
            log_rho.exp().clamp(1 - LOW, 1 + HIGH).detach() * advantages[:, None] * now * mask
        ).sum() / lengths.sum()
        sign = advantages.sign()[:, None]
        bounded = torch.minimum(sign * log_rho, sign * log_rho.clamp(-0.4, 0.4)) * sign
        gmpo = ((bounded.sum(dim=1) / lengths).exp() * advantages).mean()
        return {"token_mean": -cispo, "length": -gmpo}

    for aggregation in ("token_mean", "length"):
        weights = torch.from_numpy(row_weights(torch.ones_like(advantages)[None], lengths[None], aggregation, T)[0])
        plain = surrogate(logp, old, advantages, weights, mask).coefficients_BT
        for before, first in ((logp, True), (old, False)):
            now = logp.clone().requires_grad_()
            (gradient,) = torch.autograd.grad(losses(now, before)[aggregation], now)
            assert torch.allclose(-gradient, plain, rtol=0, atol=EXACT) == first, aggregation
