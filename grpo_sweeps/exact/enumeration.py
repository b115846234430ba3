"""Every sequence of one prompt, with its probability, score, rewards and values: expectations become finite sums.

N  sequences of the prompt    T  longest length    D  parameters, in the order of policy.parameters()

Notation of arXiv 2606.29238: r is the sum of a sequence's rewards, psi = sum_t grad log pi(x_t | s_t) its score, s_t
the prefix before token t, J = E r, F = E psi psi' the Fisher matrix of the scores. Units: r that of the reward, psi
one over that of a parameter. Nothing is sampled; "exact" means up to float64 rounding.

C  classes of sequences that an estimator cannot tell apart, by reward or by reward and length. Within a class a group's
weights are the same whichever sequence was drawn, so that a class enters the first two moments of sum_i w_i psi_i with
the mean of its scores and their mean squared norm, nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product

import torch
from torch import Tensor
from torch.func import functional_call, jacrev, vmap

from grpo_sweeps.exact.policy import SoftmaxPolicy, token_log_probs
from grpo_sweeps.exact.rewards import TokenReward


@dataclass(frozen=True, eq=False)
class Classes:
    """Classes of sequences: rewards_C, lengths_C (the expected length where classes go by reward alone), probabilities
    p_C, and of the scores mean_CD = E[psi | c] and second_C = E[|psi|^2 | c]."""

    rewards_C: Tensor
    lengths_C: Tensor
    p_C: Tensor
    mean_CD: Tensor
    second_C: Tensor

    @property
    def variance_C(self) -> Tensor:
        """tr Var(psi | c): V+ and V- of claim C5 for a binary reward. Shape (C,)."""
        return (self.second_C - self.mean_CD.square().sum(dim=1)).clamp(min=0.0)


def classes_of(rewards_N: Tensor, lengths_N: Tensor, p_N: Tensor, psi_ND: Tensor, by_length: bool) -> Classes:
    """Classes of equal reward, and of equal length too where `by_length`, in ascending order. Rewards count as
    equal only to the bit."""
    lengths_N = lengths_N.to(torch.float64)
    key_NK = torch.stack([rewards_N, lengths_N] if by_length else [rewards_N], dim=1)
    key_CK, class_N = key_NK.unique(dim=0, return_inverse=True)
    C = len(key_CK)
    p_C = p_N.new_zeros(C).index_add_(0, class_N, p_N)
    share_N = p_N / p_C[class_N]
    mean_CD = psi_ND.new_zeros(C, psi_ND.shape[1]).index_add_(0, class_N, share_N[:, None] * psi_ND)
    second_C = p_N.new_zeros(C).index_add_(0, class_N, share_N * psi_ND.square().sum(dim=1))
    expected_C = p_N.new_zeros(C).index_add_(0, class_N, share_N * lengths_N)
    lengths_C = key_CK[:, 1] if by_length else expected_C
    return Classes(key_CK[:, 0], lengths_C, p_C, mean_CD, second_C)


MAX_SCORE_BYTES = 2**31
"""Most memory of the token scores (N, T, D) before an enumeration is refused."""
SCORE_CHUNK = 1024  # sequences differentiated at once


@dataclass(frozen=True, eq=False)
class Enumeration:
    """All N sequences of one prompt. At padding (mask False) tokens, rewards, values and token scores are 0.

    prefixes_NT numbers the states: two entries are equal where s_t is the same prefix; -1 at padding. values_NT is
    v(s_t) = E[rewards of tokens t, t + 1, ... | s_t]: what was received before token t is in `past_rewards_NT` alone.
    action_values_NT is the same given token t as well.
    """

    prompt: int
    tokens_NT: Tensor
    mask_NT: Tensor
    lengths_N: Tensor
    log_probs_NT: Tensor
    p_N: Tensor
    psi_ND: Tensor
    token_psi_NTD: Tensor
    token_rewards_NT: Tensor
    rewards_N: Tensor
    prefixes_NT: Tensor
    values_NT: Tensor
    action_values_NT: Tensor

    @cached_property
    def gram_NN(self) -> Tensor:
        """K_ij = <psi_i, psi_j> for all pairs of sequences, (N, N)."""
        return self.psi_ND @ self.psi_ND.T

    @cached_property
    def J(self) -> float:
        """E r."""
        return float(self.p_N @ self.rewards_N)

    @cached_property
    def grad_J_D(self) -> Tensor:
        """grad J = E[r psi], (D,)."""
        return (self.p_N * self.rewards_N) @ self.psi_ND

    @cached_property
    def sigma2(self) -> float:
        """Var r."""
        return float(self.p_N @ (self.rewards_N - self.J).square())

    @cached_property
    def trace_F(self) -> float:
        """tr F = E |psi|^2."""
        return float(self.p_N @ self.gram_NN.diagonal())

    @cached_property
    def trace_F2(self) -> float:
        """tr F^2 = E <psi_i, psi_j>^2 for two independent sequences."""
        return float(self.p_N @ self.gram_NN.square() @ self.p_N)

    @cached_property
    def largest_eigenvalue_F(self) -> float:
        """Largest eigenvalue of F, from the N x N matrix sqrt(p_i) K_ij sqrt(p_j), which shares F's non-zero ones."""
        root_N = self.p_N.sqrt()
        return float(torch.linalg.eigvalsh(root_N[:, None] * self.gram_NN * root_N)[-1])

    @cached_property
    def V1(self) -> float:
        """tr Var((r - J) psi): R times the error of the estimator that knows J."""
        second = self.p_N @ ((self.rewards_N - self.J).square() * self.gram_NN.diagonal())
        return float(second - self.grad_J_D.square().sum())

    @cached_property
    def V2(self) -> float:
        """sigma^2 tr F + |grad J|^2: what not knowing J costs a leave-one-out baseline (arXiv 2603.01162)."""
        return self.sigma2 * self.trace_F + float(self.grad_J_D.square().sum())

    @cached_property
    def past_rewards_NT(self) -> Tensor:
        """Rewards received before token t, (N, T); at padding, the sequence's whole reward."""
        return self.token_rewards_NT.cumsum(dim=1) - self.token_rewards_NT

    @cached_property
    def returns_NT(self) -> Tensor:
        """Rewards from token t on (reward-to-go), (N, T)."""
        return from_here_on(self.token_rewards_NT)

    @cached_property
    def advantages_NT(self) -> Tensor:
        """A_t = q(s_t, x_t) - v(s_t), (N, T): the sum over a sequence is r - v(s_0)."""
        return self.action_values_NT - self.values_NT

    @cached_property
    def reward_classes(self) -> Classes:
        """Sequences of equal reward."""
        return self.classes(by_length=False)

    def classes(self, by_length: bool) -> Classes:
        """Sequences of equal reward, and of equal length too where `by_length`."""
        return classes_of(self.rewards_N, self.lengths_N, self.p_N, self.psi_ND, by_length)

    def contribution(self, credit_NT: Tensor) -> Tensor:
        """sum_t credit_t grad log pi(x_t | s_t) for each sequence: (N, T) -> (N, D). For `moments.sequence_moments`."""
        return torch.einsum("nt,ntd->nd", credit_NT * self.mask_NT, self.token_psi_NTD)


def enumerate_policy(policy: SoftmaxPolicy, prompt: int, token_reward: TokenReward) -> Enumeration:
    """Every sequence of `prompt`: those that token 0 ends before `max_length` and those of `max_length` tokens; all of
    `max_length` where the policy never ends.

    Raises:
        ValueError: for a prompt that the policy does not have, token scores beyond `MAX_SCORE_BYTES`, or a reward that
            is not (N, T), not finite, paid at padding, or dependent on later tokens.
    """
    if not 0 <= prompt < policy.prompts:
        raise ValueError(f"prompt={prompt}: the policy has prompts 0 to {policy.prompts - 1}")
    _refuse_size(policy)
    tokens_NT, mask_NT = all_sequences(policy.tokens, policy.max_length, policy.ends)
    prompt_N = torch.full((len(tokens_NT),), prompt)
    with torch.no_grad():
        log_probs_NT = token_log_probs(policy, prompt_N, tokens_NT, mask_NT)
    token_psi_NTD = token_scores(policy, prompt_N, tokens_NT, mask_NT)
    prefixes_NT, after_NT = prefix_index(tokens_NT, mask_NT)
    rewards_NT = _checked_rewards(token_reward(tokens_NT, mask_NT), mask_NT, after_NT)
    returns_NT = from_here_on(rewards_NT)
    # Given a prefix, its continuations have probabilities that sum to 1: no division, nothing that can underflow.
    rest_NT = from_here_on(log_probs_NT)
    return Enumeration(
        prompt=prompt,
        tokens_NT=tokens_NT,
        mask_NT=mask_NT,
        lengths_N=mask_NT.sum(dim=1),
        log_probs_NT=log_probs_NT,
        p_N=rest_NT[:, 0].exp(),
        psi_ND=token_psi_NTD.sum(dim=1),
        token_psi_NTD=token_psi_NTD,
        token_rewards_NT=rewards_NT,
        rewards_N=returns_NT[:, 0],
        prefixes_NT=prefixes_NT,
        values_NT=_state_sums(prefixes_NT, rest_NT.exp() * returns_NT, mask_NT),
        action_values_NT=_state_sums(after_NT, (rest_NT - log_probs_NT).exp() * returns_NT, mask_NT),
    )


def several_prompts(policy: SoftmaxPolicy, rewards: Sequence[TokenReward]) -> list[Enumeration]:
    """One enumeration per prompt, in order; `rewards` holds one reward for each, or a single one for all."""
    if len(rewards) not in (1, policy.prompts):
        raise ValueError(f"{len(rewards)} rewards for {policy.prompts} prompts: one each, or one for all")
    return [enumerate_policy(policy, i, rewards[i % len(rewards)]) for i in range(policy.prompts)]


def all_sequences(tokens: int, max_length: int, ends: bool) -> tuple[Tensor, Tensor]:
    """tokens_NT padded with 0 and mask_NT (True on tokens, the end included), shortest first."""
    words: list[tuple[int, ...]] = []
    if ends:
        for length in range(1, max_length + 1):
            words += [(*start, 0) for start in product(range(1, tokens), repeat=length - 1)]
    words += product(range(1 if ends else 0, tokens), repeat=max_length)
    tokens_NT = torch.tensor([(*word, *[0] * (max_length - len(word))) for word in words])
    lengths_N = torch.tensor([len(word) for word in words])
    return tokens_NT, torch.arange(max_length) < lengths_N[:, None]


def count_sequences(tokens: int, max_length: int, ends: bool) -> int:
    """N, the number of rows of `all_sequences`."""
    return sum((tokens - 1) ** t for t in range(max_length + 1)) if ends else tokens**max_length


def token_scores(policy: SoftmaxPolicy, prompt_N: Tensor, tokens_NT: Tensor, mask_NT: Tensor) -> Tensor:
    """grad log pi(x_t | s_t) for every token over all parameters, 0 at padding: (N, T, D)."""
    parameters = {name: parameter.detach() for name, parameter in policy.named_parameters()}

    def of_one(prompt: Tensor, tokens_T: Tensor, mask_T: Tensor) -> Tensor:
        def log_probs(values: dict[str, Tensor]) -> Tensor:
            def model(prompt_B: Tensor, tokens_BT: Tensor) -> Tensor:
                return functional_call(policy, values, (prompt_B, tokens_BT))

            return token_log_probs(model, prompt[None], tokens_T[None], mask_T[None])[0]

        by_name = jacrev(log_probs)(parameters)
        return torch.cat([by_name[name].flatten(start_dim=1) for name in parameters], dim=1)

    scores_NTD: Tensor = vmap(of_one, chunk_size=SCORE_CHUNK)(prompt_N, tokens_NT, mask_NT)
    return scores_NTD


def prefix_index(tokens_NT: Tensor, mask_NT: Tensor) -> tuple[Tensor, Tensor]:
    """Numbers of the prefix before token t and of that with token t, each (N, T) and -1 at padding.

    Within either tensor, equal numbers mean equal prefixes; numbers of the two are unrelated.
    """
    before_NT, after_NT = torch.full_like(tokens_NT, -1), torch.full_like(tokens_NT, -1)
    state_N = torch.zeros_like(tokens_NT[:, 0])
    many = int(tokens_NT.max()) + 1
    first_before = first_after = 0
    for t in range(tokens_NT.shape[1]):
        on_N = mask_NT[:, t]
        _, before = state_N[on_N].unique(return_inverse=True)
        _, after = (before * many + tokens_NT[on_N, t]).unique(return_inverse=True)
        before_NT[on_N, t], after_NT[on_N, t] = before + first_before, after + first_after
        first_before, first_after = first_before + int(before.max()) + 1, first_after + int(after.max()) + 1
        state_N = after_NT[:, t]
    return before_NT, after_NT


def from_here_on(values_NT: Tensor) -> Tensor:
    """sum_{s >= t} values_s, (N, T)."""
    return values_NT.flip(1).cumsum(dim=1).flip(1)


def _state_sums(state_NT: Tensor, values_NT: Tensor, mask_NT: Tensor) -> Tensor:
    """At each entry, the sum of the values over all entries of the same state; 0 at padding."""
    sums = values_NT.new_zeros(int(state_NT.max()) + 1).index_add_(0, state_NT[mask_NT], values_NT[mask_NT])
    return torch.where(mask_NT, sums[state_NT], 0.0)


def _checked_rewards(rewards_NT: Tensor, mask_NT: Tensor, after_NT: Tensor) -> Tensor:
    if rewards_NT.shape != mask_NT.shape or not rewards_NT.isfinite().all():
        raise ValueError(f"rewards of shape {tuple(rewards_NT.shape)}: {tuple(mask_NT.shape)} finite ones are needed")
    rewards_NT = rewards_NT.to(torch.float64)
    if rewards_NT[~mask_NT].any():
        raise ValueError("a reward at padding, after the end of a sequence")
    on, paid = after_NT[mask_NT], rewards_NT[mask_NT]
    least = torch.full((int(on.max()) + 1,), torch.inf, dtype=torch.float64).scatter_reduce(0, on, paid, "amin")
    if not torch.equal(least[on], paid):
        raise ValueError("the reward of a token depends on later tokens, so that it is not known when it is paid")
    return rewards_NT


def _refuse_size(policy: SoftmaxPolicy) -> None:
    N = count_sequences(policy.tokens, policy.max_length, policy.ends)
    D = sum(parameter.numel() for parameter in policy.parameters())
    if N * policy.max_length * D * 8 > MAX_SCORE_BYTES:
        raise ValueError(
            f"{N} sequences of up to {policy.max_length} tokens, {D} parameters: their scores exceed "
            f"{MAX_SCORE_BYTES} bytes; take fewer tokens, a shorter max_length or a smaller width"
        )
