"""What was sampled as rows: one a segment, one a position, one a quantity; and the text of each segment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from grpo_sweeps.credit.sampling import Sampled
from grpo_sweeps.credit.shares import Profile, Shares
from grpo_sweeps.intervals import Interval

OPEN = "�"  # stands for the bytes of a character that a later token completes


@dataclass(frozen=True)
class Segment:
    """One segment of a rollout: its first token's number, its text, V before it, A and the standard errors of both."""

    t: int
    tokens: int
    text: str
    value: float
    value_error: float
    advantage: float
    advantage_error: float


def segments(sampled: Sampled, tokenizer: Any) -> list[list[Segment]]:
    """The segments of every rollout."""
    values, found = sampled.values, []
    for i, rollout in enumerate(sampled.rollouts):
        edges = sampled.edges(i)
        rows = zip(edges[:-1], edges[1:], pieces(tokenizer, rollout.completion_ids, edges), strict=True)
        found.append(
            [
                Segment(
                    t=t, tokens=end - t, text=text, value=float(values.values_NE[i, k]),
                    value_error=float(np.sqrt(values.noise_NE[i, k])), advantage=float(values.advantages_NK[i, k]),
                    advantage_error=float(np.sqrt(values.noise_NK[i, k])),
                )
                for k, (t, end, text) in enumerate(rows)
            ]
        )  # fmt: skip
    return found


def pieces(tokenizer: Any, ids: Sequence[int], edges: Sequence[int]) -> list[str]:
    """What each segment adds to the text, special tokens shown. A character whose bytes are spread over segments
    belongs to the one that completes it."""
    texts = [str(tokenizer.decode(list(ids[:edge]), skip_special_tokens=False)) for edge in edges]
    texts = [text.rstrip(OPEN) for text in texts[:-1]] + texts[-1:]
    found = []
    for before, after, start, end in zip(texts[:-1], texts[1:], edges[:-1], edges[1:], strict=True):
        grown = after.startswith(before)
        found.append(after[len(before) :] if grown else str(tokenizer.decode(list(ids[start:end]))))
    return found


def credit_frame(sampled: Sampled, rows: Sequence[Sequence[Segment]]) -> pd.DataFrame:
    """credit.csv: one row a segment; `value` is V before it, and the reward is V after the last."""
    owners, N = sampled.values.prompt_N, len(sampled.rollouts) // len(sampled.problems)
    return pd.DataFrame(
        [
            {
                "prompt": sampled.problems[owners[i]].id, "rollout": i % N, "t": one.t, "tokens": one.tokens,
                "text": one.text, "value": one.value, "standard_error": one.value_error, "advantage": one.advantage,
                "advantage_standard_error": one.advantage_error, "reward": float(sampled.values.values_NE[i, -1]),
            }
            for i, part in enumerate(rows)
            for one in part
        ]
    )  # fmt: skip


def profile_frame(found: Shares, every: int) -> pd.DataFrame:
    """profile.csv: E A^2 / Var r by tenth and by the first token of a segment."""
    tenths = _profile_rows("tenth", range(1, len(found.by_tenth.shares) + 1), found.by_tenth)
    return pd.DataFrame(
        tenths + _profile_rows("token", range(0, len(found.by_segment.shares) * every, every), found.by_segment)
    )


def _profile_rows(kind: str, names: Sequence[int], profile: Profile) -> list[dict[str, Any]]:
    return [
        {"by": kind, "position": name, "share": one.mean, "low": one.low, "high": one.high, "with_noise": noisy}
        for name, one, noisy in zip(names, profile.shares, profile.noisy, strict=True)
    ]


def unit_of(every: int) -> str:
    """What a credit belongs to, in words."""
    return "token" if every == 1 else "segment"


def quantities(found: Shares, every: int) -> list[tuple[str, str, Interval]]:
    """Key, what it is in words, value: the rows of shares.csv and of the page's first table."""
    return [
        ("value", "Mean reward, v(s_0)", found.value),
        ("variance", "Var r within a prompt", found.variance),
        ("segments", f"{unit_of(every).capitalize()}s of a completion, K", found.segments),
        ("total", "Sum of E A² over Var r; 1 but for chance", found.total),
        ("uniform", "Share of the credit that uniform credit carries", found.uniform),
        ("correlation", "Correlation of uniform and true credit", found.correlation),
    ]


def shares_frame(found: Shares, every: int) -> pd.DataFrame:
    """shares.csv: one row a quantity with its interval, and the sum without the correction."""
    rows: list[dict[str, Any]] = [
        {"quantity": key, "mean": one.mean, "low": one.low, "high": one.high}
        for key, _, one in quantities(found, every)
    ]
    return pd.DataFrame([*rows, {"quantity": "total_with_noise", "mean": found.total_noisy}])
