"""How often the credit's 95% intervals hold the truth, over prompts drawn from exact policies.

    python -m tests.unit.credit.coverage 1000

draws so many samples (default 1000) of 4, 8 and 16 prompts, 2 rollouts each, with 8 and 32 continuations of each
prefix, from three policies of 24 prompts, and prints the share of samples whose interval holds the value that listing
every sequence gives. Minutes on one core.
"""

from __future__ import annotations

import sys

import numpy as np

from grpo_sweeps.credit.shares import shares
from grpo_sweeps.exact import Enumeration, SoftmaxPolicy, binary, several_prompts
from grpo_sweeps.science import credit
from tests.unit.credit.exact_values import drawn, together

NAMES = ("sum", "first token", "last token", "uniform", "correlation", "Var r")


def population(seed: int, tokens: int, size: int = 24) -> list[Enumeration]:
    """The prompts of a policy of sequences of up to 4 tokens, with rewards of 0 and 1."""
    policy = SoftmaxPolicy(prompts=size, tokens=tokens, max_length=4, seed=seed)
    return several_prompts(policy, [binary(3, i % 3) for i in range(size)])


def truths(everyone: list[Enumeration]) -> dict[str, float]:
    """What the intervals of NAMES are about, by enumeration."""
    sigma2 = np.array([e.sigma2 for e in everyone])
    found = [credit.credit(e) for e in everyone]

    def share(values: list[float]) -> float:
        return float((np.array(values) * sigma2).mean() / sigma2.mean())

    times = [float(e.p_N @ (e.lengths_N * (e.rewards_N - e.J) ** 2)) for e in everyone]
    firsts, lasts = ([float(c.by_position_T[t]) for c in found] for t in (0, -1))
    correlation = float(np.sqrt(sigma2.mean() / np.mean(times)))
    values = (1.0, share(firsts), share(lasts), share([c.share for c in found]), correlation, float(sigma2.mean()))
    return dict(zip(NAMES, values, strict=True))


def coverage(
    everyone: list[Enumeration], prompts: int, continuations: int, repeats: int, seed: int
) -> dict[str, float]:
    """{name: share of the samples whose interval holds the truth}; one without an interval is not counted."""
    truth, rng = truths(everyone), np.random.default_rng([seed, prompts, continuations])
    hits: dict[str, list[bool]] = {name: [] for name in NAMES}
    for _ in range(repeats):
        picked = rng.integers(len(everyone), size=prompts)
        found = shares(*together([drawn(everyone[i], 2, continuations, rng, p) for p, i in enumerate(picked)]))
        tokens = found.by_segment.shares
        ones = (found.total, tokens[0], tokens[-1], found.uniform, found.correlation, found.variance)
        for name, one in zip(NAMES, ones, strict=True):
            if one.known:
                hits[name].append(one.low <= truth[name] <= one.high)
    return {name: float(np.mean(held)) for name, held in hits.items()}


def main(repeats: int) -> None:
    """Print one line per policy, number of prompts and of continuations."""
    print("policy prompts continuations", *NAMES, sep=" | ")
    for seed, tokens in ((8, 3), (0, 4), (1, 3)):
        everyone = population(seed, tokens)
        for prompts in (4, 8, 16):
            for continuations in (8, 32):
                held = coverage(everyone, prompts, continuations, repeats, seed)
                print(seed, prompts, continuations, *(f"{100 * held[name]:.1f}" for name in NAMES), sep=" | ")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1000)
