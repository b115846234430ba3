"""The enumeration against slow oracles: recursion over prefixes, autograd one sequence at a time, GradientGram."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from grpo_sweeps.engine.gram import GradientGram
from grpo_sweeps.exact import (
    Enumeration,
    SoftmaxPolicy,
    binary,
    by_token,
    enumerate_policy,
    graded,
    outcome,
    row_log_probs,
    several_prompts,
)
from grpo_sweeps.exact.enumeration import count_sequences

TIGHT = {"rtol": 1e-12, "atol": 1e-12}


def grown(policy: SoftmaxPolicy, prompt: int, prefix: tuple[int, ...] = ()) -> Iterator[tuple[tuple[int, ...], float]]:
    """Every sequence that begins with `prefix`, and its probability given the prefix, by recursion."""
    if len(prefix) == policy.max_length or (policy.ends and prefix and prefix[-1] == 0):
        yield prefix, 1.0
        return
    with torch.no_grad():
        logits_V = policy(torch.tensor([prompt]), torch.tensor([[*prefix, 0]]))[0, -1]
    for token, chance in enumerate(logits_V.softmax(dim=0).tolist()):
        for sequence, rest in grown(policy, prompt, (*prefix, token)):
            yield sequence, chance * rest


def gradient(policy: SoftmaxPolicy, scalar: Tensor) -> Tensor:
    return torch.cat([part.flatten() for part in torch.autograd.grad(scalar, list(policy.parameters()))])


def row(policy: SoftmaxPolicy, e: Enumeration, n: int) -> tuple[int, ...]:
    return tuple(e.tokens_NT[n, : int(e.lengths_N[n])].tolist())


@pytest.mark.parametrize("ends", [True, False])
def test_sequences_and_probabilities_are_those_of_recursion(ends: bool) -> None:
    policy = SoftmaxPolicy(prompts=2, tokens=3, max_length=4, ends=ends, seed=3)
    e = enumerate_policy(policy, 1, by_token())
    expected = dict(grown(policy, 1))
    found = {row(policy, e, n): float(p) for n, p in enumerate(e.p_N)}
    assert found == pytest.approx(expected, rel=1e-12)
    assert len(found) == len(e.p_N) == count_sequences(3, 4, ends)
    assert float(e.p_N.sum()) == pytest.approx(1.0, abs=1e-14)


def test_the_default_size(policy: SoftmaxPolicy, enumeration: Enumeration) -> None:
    assert enumeration.token_psi_NTD.shape == (121, 4, sum(p.numel() for p in policy.parameters()))
    assert torch.linalg.matrix_rank(enumeration.psi_ND) > 20, "scores that overlap, but not in a few directions only"


def test_scores_are_those_of_autograd_row_by_row(policy: SoftmaxPolicy, enumeration: Enumeration) -> None:
    e = enumeration
    for n in range(0, len(e.p_N), 7):
        length = int(e.lengths_N[n])
        for t in range(length):
            logits_TV = policy(torch.tensor([e.prompt]), e.tokens_NT[n : n + 1, : t + 1])[0]
            log_prob = logits_TV[t].log_softmax(dim=0)[e.tokens_NT[n, t]]
            torch.testing.assert_close(e.token_psi_NTD[n, t], gradient(policy, log_prob), **TIGHT)
        assert not e.token_psi_NTD[n, length:].any()
        whole = row_log_probs(policy, torch.tensor([e.prompt]), e.tokens_NT[n : n + 1], e.mask_NT[n : n + 1])
        torch.testing.assert_close(e.psi_ND[n], gradient(policy, whole.sum()), **TIGHT)


def test_the_mean_score_is_zero_at_every_state(enumeration: Enumeration) -> None:
    e = enumeration
    assert float((e.p_N @ e.psi_ND).abs().max()) < 1e-14
    at_token_TD = torch.einsum("n,ntd->td", e.p_N, e.token_psi_NTD)
    assert float(at_token_TD.abs().max()) < 1e-14


def test_grad_j_is_that_of_autograd(policy: SoftmaxPolicy, enumeration: Enumeration) -> None:
    e = enumeration
    prompt_N = torch.full_like(e.lengths_N, e.prompt)
    J = (row_log_probs(policy, prompt_N, e.tokens_NT, e.mask_NT).exp() * e.rewards_N).sum()
    assert pytest.approx(J.item(), rel=1e-14) == e.J
    torch.testing.assert_close(e.grad_J_D, gradient(policy, J), **TIGHT)


def test_values_are_those_of_backward_induction(policy: SoftmaxPolicy, enumeration: Enumeration) -> None:
    e = enumeration
    reward = {row(policy, e, n): e.token_rewards_NT[n] for n in range(len(e.p_N))}
    for n in range(0, len(e.p_N), 11):
        sequence = row(policy, e, n)
        for t in range(len(sequence)):
            for known, values_NT in ((t, e.values_NT), (t + 1, e.action_values_NT)):
                ahead = [p * float(reward[s][t:].sum()) for s, p in grown(policy, e.prompt, sequence[:known])]
                assert float(values_NT[n, t]) == pytest.approx(sum(ahead), rel=1e-12, abs=1e-14)


def test_equal_numbers_mean_equal_prefixes(policy: SoftmaxPolicy, enumeration: Enumeration) -> None:
    e = enumeration
    numbers: dict[int, tuple[int, ...]] = {}
    for n in range(len(e.p_N)):
        sequence = row(policy, e, n)
        for t in range(policy.max_length):
            number = int(e.prefixes_NT[n, t])
            assert (number == -1) == (t >= len(sequence))
            if number >= 0:
                assert numbers.setdefault(number, sequence[:t]) == sequence[:t]
    assert len(set(numbers.values())) == len(numbers) == 1 + 3 + 9 + 27


def test_advantages_sum_to_the_reward_less_its_expectation(enumeration: Enumeration) -> None:
    e = enumeration
    torch.testing.assert_close(e.values_NT[:, 0], torch.full_like(e.p_N, e.J), rtol=1e-14, atol=1e-15)
    torch.testing.assert_close(e.advantages_NT.sum(dim=1), e.rewards_N - e.values_NT[:, 0], rtol=0, atol=1e-14)
    torch.testing.assert_close(e.past_rewards_NT + e.returns_NT, e.rewards_N[:, None].expand(-1, 4), rtol=0, atol=1e-14)
    mean_T = e.p_N @ e.advantages_NT
    assert float(mean_T.abs().max()) < 1e-14


def test_the_bias_of_eq_23_is_a_martingale(enumeration: Enumeration) -> None:
    """Claim C13: past rewards + v(s_h) - v(s_0), ended sequences frozen, has mean 0 and a spread that never falls."""
    e = enumeration
    bias_NT = e.past_rewards_NT + e.values_NT - e.J
    assert float((e.p_N @ bias_NT).abs().max()) < 1e-14
    spread_T = e.p_N @ bias_NT.square()
    assert bool((spread_T.diff() > -1e-14).all())
    assert float(spread_T[-1]) <= e.sigma2 + 1e-14


def test_spectrum_of_the_fisher_matrix(enumeration: Enumeration) -> None:
    e = enumeration
    fisher_DD = torch.einsum("n,nd,ne->de", e.p_N, e.psi_ND, e.psi_ND)
    eigenvalues_D = torch.linalg.eigvalsh(fisher_DD)
    assert pytest.approx(float(fisher_DD.trace()), rel=1e-12) == e.trace_F
    assert pytest.approx(float(eigenvalues_D.square().sum()), rel=1e-12) == e.trace_F2
    assert pytest.approx(float(eigenvalues_D[-1]), rel=1e-12) == e.largest_eigenvalue_F
    assert float(e.grad_J_D.norm()) <= (e.sigma2 * e.largest_eigenvalue_F) ** 0.5


def test_classes_of_a_binary_reward(binary_enumeration: Enumeration) -> None:
    """Claim C9: within the correct E<psi_i, psi_j> = |grad J|^2 / p^2, within the wrong / q^2, between -1/(pq)."""
    e = binary_enumeration
    classes, p, norm = e.reward_classes, e.J, float(e.grad_J_D.square().sum())
    assert classes.rewards_C.tolist() == [0.0, 1.0]
    assert classes.p_C.tolist() == pytest.approx([1 - p, p], rel=1e-12)
    products_CC = classes.mean_CD @ classes.mean_CD.T
    expected = [norm / (1 - p) ** 2, -norm / (p * (1 - p)), norm / p**2]
    assert products_CC[[0, 0, 1], [0, 1, 1]].tolist() == pytest.approx(expected, rel=1e-12)
    for c, reward in enumerate([0.0, 1.0]):
        share_N = e.p_N * (e.rewards_N == reward) / classes.p_C[c]
        expected_second = float(share_N @ e.psi_ND.square().sum(dim=1))
        assert float(classes.second_C[c]) == pytest.approx(expected_second, rel=1e-12)
        off_ND = e.psi_ND - classes.mean_CD[c]
        assert float(classes.variance_C[c]) == pytest.approx(float(share_N @ off_ND.square().sum(dim=1)), rel=1e-12)
        assert float(classes.lengths_C[c]) == pytest.approx(float(share_N @ e.lengths_N.double()), rel=1e-12)


def test_the_measured_gram_of_a_sampled_group(policy: SoftmaxPolicy, enumeration: Enumeration) -> None:
    e = enumeration
    group_R = torch.multinomial(e.p_N, 6, replacement=True, generator=torch.Generator().manual_seed(4))
    weights_R = torch.linspace(-1.0, 1.0, 6, dtype=torch.float64)
    policy.zero_grad()
    with GradientGram(policy).measure([6], weights_R) as measured:
        prompt_R = torch.full_like(group_R, e.prompt)
        row_log_probs(policy, prompt_R, e.tokens_NT[group_R], e.mask_NT[group_R]).sum().backward()
    measured.check()
    torch.testing.assert_close(torch.as_tensor(measured.matrices()[0]), e.gram_NN[group_R][:, group_R], **TIGHT)
    grads = [parameter.grad.flatten() for parameter in policy.parameters() if parameter.grad is not None]
    torch.testing.assert_close(torch.cat(grads), weights_R @ e.psi_ND[group_R], **TIGHT)
    policy.zero_grad()


def test_rewards_of_the_helpers() -> None:
    tokens_NT = torch.tensor([[1, 2, 0, 0], [2, 1, 1, 1]])
    mask_NT = torch.tensor([[True, True, True, False], [True] * 4])
    # codes by token: 1, 5, 5 and 2, 4, 7, 11
    assert binary(3, 2)(tokens_NT, mask_NT).tolist() == [[0, 0, 1, 0], [0, 0, 0, 1]]
    assert graded(4)(tokens_NT, mask_NT).tolist() == [[0, 0, pytest.approx(1 / 3), 0], [0, 0, 0, 1]]
    assert by_token(3, 2)(tokens_NT, mask_NT).tolist() == [[0, 1, 1, 0], [1, 0, 0, 1]]
    assert outcome(torch.tensor([3, 4]), mask_NT).tolist() == [[0, 0, 3, 0], [0, 0, 0, 4]]


def test_the_same_seed_gives_the_same_policy_and_leaves_the_generator_alone() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    one, same, other = (SoftmaxPolicy(seed=seed).state_dict() for seed in (5, 5, 6))
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["head.weight"], other["head.weight"])
    assert torch.equal(before, torch.get_rng_state())


def test_what_is_refused(policy: SoftmaxPolicy) -> None:
    with pytest.raises(ValueError, match="tokens=1"):
        SoftmaxPolicy(tokens=1)
    with pytest.raises(ValueError, match="prompts 0 to 2"):
        enumerate_policy(policy, 3, binary())
    with pytest.raises(ValueError, match="later tokens"):
        enumerate_policy(policy, 0, lambda tokens, mask: tokens[:, -1:] * mask)
    with pytest.raises(ValueError, match="padding"):
        enumerate_policy(policy, 0, lambda tokens, mask: torch.ones_like(tokens))
    with pytest.raises(ValueError, match="shape"):
        enumerate_policy(policy, 0, lambda tokens, mask: tokens[:, 0])
    with pytest.raises(ValueError, match="exceed"):
        enumerate_policy(SoftmaxPolicy(tokens=9, max_length=12), 0, binary())
    with pytest.raises(ValueError, match="2 rewards for 3 prompts"):
        several_prompts(policy, [binary(), graded()])
