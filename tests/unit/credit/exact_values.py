"""Values as `credit.sampling` finds them, drawn from a policy whose sequences are listed, and what they estimate."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from grpo_sweeps.credit.shares import Starts, Values, mean_and_noise
from grpo_sweeps.exact import Enumeration


@dataclass(frozen=True)
class Ahead:
    """The rewards of the sequences that begin with a prefix, and their probabilities given it."""

    rewards: np.ndarray
    p: np.ndarray

    @property
    def mean(self) -> float:
        return float(self.p @ self.rewards)

    @property
    def variance(self) -> float:
        return float(self.p @ (self.rewards - self.mean) ** 2)


def tokens_of(e: Enumeration, n: int) -> tuple[int, ...]:
    return tuple(e.tokens_NT[n, : int(e.lengths_N[n])].tolist())


@cache
def ahead_of(e: Enumeration) -> dict[tuple[int, ...], Ahead]:
    """By prefix, from the definition: every sequence is compared with every prefix."""
    rewards, p, words = e.rewards_N.numpy(), e.p_N.numpy(), [tokens_of(e, n) for n in range(len(e.p_N))]
    found = {}
    for prefix in {word[:t] for word in words for t in range(len(word))}:
        rows = [n for n, word in enumerate(words) if word[: len(prefix)] == prefix]
        found[prefix] = Ahead(rewards[rows], p[rows] / p[rows].sum())
    return found


def drawn(e: Enumeration, N: int, M: int, rng: np.random.Generator, prompt: int = 0) -> tuple[Values, Starts]:
    """N rollouts of one prompt, M continuations of each prefix (anew for each rollout), M whole completions."""
    ahead, T = ahead_of(e), e.tokens_NT.shape[1]
    rows_N = rng.choice(len(e.p_N), size=N, p=e.p_N.numpy())
    edges_NE, values_NE, noise_NE = np.zeros((N, T + 1), dtype=int), np.zeros((N, T + 1)), np.zeros((N, T + 1))
    lengths_N, rewards_N = e.lengths_N.numpy()[rows_N], e.rewards_N.numpy()[rows_N]
    for t in range(T + 1):
        edges_NE[:, t], values_NE[:, t] = np.minimum(t, lengths_N), rewards_N
    words = np.array([tokens_of(e, n) for n in rows_N], dtype=object)
    visits: dict[tuple[int, ...], list[int]] = {}
    for i, word in enumerate(words):
        for t in range(len(word)):
            visits.setdefault(tuple(word[:t]), []).append(i)
    for prefix, visitors in visits.items():
        one = ahead[prefix]
        rewards = one.rewards[rng.choice(len(one.p), size=(len(visitors), M), p=one.p)]
        values_NE[visitors, len(prefix)], noise_NE[visitors, len(prefix)] = mean_and_noise(rewards)
    starts = rng.choice(len(e.p_N), size=(1, M), p=e.p_N.numpy())
    values = Values(np.full(N, prompt), edges_NE, values_NE, noise_NE)
    return values, Starts(e.rewards_N.numpy()[starts], e.lengths_N.numpy()[starts])


def together(parts: list[tuple[Values, Starts]]) -> tuple[Values, Starts]:
    """Several prompts as one sample."""
    values, starts = zip(*parts, strict=True)

    def joined(many: tuple[Any, ...], *names: str) -> list[np.ndarray]:
        return [np.concatenate([getattr(one, name) for one in many]) for name in names]

    return (
        Values(*joined(values, "prompt_N", "edges_NE", "values_NE", "noise_NE")),
        Starts(*joined(starts, "rewards_PM", "segments_PM")),
    )


def noise_term(e: Enumeration, M: int) -> np.ndarray:
    """What M continuations add to E A_t^2 at each position: E of Var(r given s_t) / M and Var(r given s_{t+1}) / M."""
    ahead, T = ahead_of(e), e.tokens_NT.shape[1]
    found = np.zeros(T)
    for n, p in enumerate(e.p_N.tolist()):
        word = tokens_of(e, n)
        for t in range(len(word)):
            after = ahead[word[: t + 1]].variance if t + 1 < len(word) else 0.0
            found[t] += p * (ahead[word[:t]].variance + after) / M
    return found
