"""The learned value: its advantages against a loop over tokens, its fit against least squares."""

from __future__ import annotations

import pytest
import torch

from grpo_sweeps.engine.critic import Critic, credit


def slow_credit(reward: float, values: list[float], gamma: float, lam: float) -> list[float]:
    """A_t = sum_l (gamma lam)^l delta_{t+l}, delta_t = r_t + gamma V_{t+1} - V_t, V = 0 after the end."""
    T = len(values)
    delta = [
        (reward if t == T - 1 else 0.0) + gamma * (values[t + 1] if t + 1 < T else 0.0) - values[t] for t in range(T)
    ]
    return [sum((gamma * lam) ** (s - t) * delta[s] for s in range(t, T)) for t in range(T)]


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (1.0, 1.0), (0.9, 0.5), (1.0, 0.0)])
def test_credit_is_gae_with_the_reward_on_the_last_token(gamma: float, lam: float) -> None:
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(T, generator=generator, dtype=torch.float64) for T in (1, 4, 2, 7)]
    rewards = torch.tensor([1.0, 0.0, -0.5, 2.0])
    found = credit(rewards, values, gamma, lam)
    for A_T, reward, v_T in zip(found, rewards.tolist(), values, strict=True):
        assert A_T.tolist() == pytest.approx(slow_credit(reward, v_T.tolist(), gamma, lam), abs=1e-12)
        if (gamma, lam) == (1.0, 1.0):
            assert torch.allclose(A_T, reward - v_T, atol=1e-12)


def test_without_a_fit_the_values_are_zero_and_credit_is_the_reward() -> None:
    critic = Critic(5, torch.device("cpu"), lr=1e-2, updates=1)
    values = critic.values([torch.randn(3, 5), torch.randn(2, 5)])
    assert [v.tolist() for v in values] == [[0.0] * 3, [0.0] * 2]
    assert [A.tolist() for A in credit(torch.tensor([1.0, 0.0]), values, 1.0, 1.0)] == [[1.0] * 3, [0.0] * 2]


def test_fits_go_to_least_squares() -> None:
    generator = torch.Generator().manual_seed(1)
    h = torch.randn(200, 4, generator=generator)
    targets = h @ torch.tensor([1.0, -2.0, 0.5, 0.0]) + 3.0 + 0.1 * torch.randn(200, generator=generator)
    critic = Critic(4, torch.device("cpu"), lr=5e-2, updates=600)
    before = critic.fit(list(h.split(50)), [t.double() for t in targets.split(50)])
    assert before["critic/loss"] == pytest.approx(float(targets.square().mean()), rel=1e-5), "that of V = 0"
    assert before["critic/explained_variance"] == pytest.approx(0.0, abs=1e-6)
    design = torch.cat([h, torch.ones(200, 1)], dim=1)
    best = torch.linalg.lstsq(design, targets[:, None]).solution[:, 0]
    assert torch.allclose(torch.cat([critic.head.weight[0], critic.head.bias]), best, atol=1e-3)
    after = critic.fit([h], [targets.double()])
    errors = targets - design @ best
    assert after["critic/explained_variance"] == pytest.approx(1 - float(errors.var() / targets.var()), abs=1e-4)


def test_returns_that_do_not_vary_have_no_explained_variance() -> None:
    critic = Critic(2, torch.device("cpu"), lr=1e-2, updates=1)
    assert set(critic.fit([torch.randn(3, 2)], [torch.ones(3, dtype=torch.float64)])) == {"critic/loss"}


def test_state_goes_on_where_it_was() -> None:
    h, targets = [torch.randn(6, 3)], [torch.randn(6, dtype=torch.float64)]
    whole, cut, again = (Critic(3, torch.device("cpu"), lr=1e-2, updates=3) for _ in range(3))
    for _ in range(2):
        whole.fit(h, targets)
    cut.fit(h, targets)
    again.load_state_dict(cut.state_dict())
    again.fit(h, targets)
    assert torch.equal(whole.head.weight, again.head.weight) and torch.equal(whole.head.bias, again.head.bias)
