"""The page and its tables on made-up values: text stays text, colours follow the credit, nothing is lost."""

from __future__ import annotations

import re

import matplotlib.pyplot as plt
import numpy as np
import pytest

from grpo_sweeps.credit import page
from grpo_sweeps.credit.page import (
    COLOURS,
    STEPS,
    credit_frame,
    legend,
    profile_frame,
    profile_plot,
    quantities,
    render_page,
    scale_limit,
    segments,
    shares_frame,
    step_of,
)
from grpo_sweeps.credit.sampling import Sampled
from grpo_sweeps.credit.shares import Starts, Values, shares
from grpo_sweeps.engine.rollouts import Rollout
from grpo_sweeps.publish.drawing import render
from grpo_sweeps.types import Problem

HOSTILE = ["<script>alert(1)</script>", '"><b>', "a\u202eb", "=1+1\n", "{{ 7 * 7 }}"]
HEAD = dict.fromkeys(("title", "subtitle", "unit", "setting", "remark", "command", "made"), "words")


class Words:
    """A tokenizer whose tokens are the hostile texts."""

    def decode(self, ids, **_):
        return "".join(HOSTILE[i] for i in ids)


def sampled_of(values_NE: list[list[float]]) -> Sampled:
    """Two problems with one completion each, of three and two tokens."""
    edges_NE = np.array([[0, 1, 2, 3], [0, 1, 2, 2]])
    noise_NE = np.where(edges_NE < edges_NE[:, -1:], 0.01, 0.0)
    rollouts = [Rollout((1,), ids, "", np.zeros(len(ids)), False) for ids in ((0, 1, 2), (3, 4))]
    rewards = np.array([[0.0, 1.0, 1.0], [1.0, 0.0, 0.0]])
    return Sampled(
        problems=[Problem("<p0>", "?", "<1>"), Problem("p1", "?", "2")],
        rollouts=rollouts,
        values=Values(np.array([0, 1]), edges_NE, np.array(values_NE), noise_NE),
        starts=Starts(rewards, np.array([[3, 2, 3], [2, 2, 1]])),
        prefixes=5,
        drawn=15,
    )


USUAL = [[0.5, 0.25, 0.75, 1.0], [0.5, 0.45, 0.0, 0.0]]


def test_bars_end_where_the_intervals_do() -> None:
    """They are longer on the side of the long tail."""
    rng = np.random.default_rng(0)
    credits = rng.gamma(0.3, size=(12, 1))
    values = Values(np.arange(12), np.tile([0, 1], (12, 1)), np.hstack([np.zeros((12, 1)), credits]), np.zeros((12, 2)))
    found = shares(values, Starts(np.tile([0.0, 1.0, 1.0], (12, 1)), np.ones((12, 3), dtype=int)))
    figure, ax = plt.subplots()
    profile_plot(found, 1, "words").panels[1].draw(ax)
    (bar,) = ax.collections[0].get_segments()
    (one,) = found.by_segment.shares
    plt.close(figure)
    assert (bar[0, 1], bar[1, 1]) == pytest.approx((one.low, one.high))
    assert one.high - one.mean > 1.2 * (one.mean - one.low)


def page_of(sampled: Sampled) -> str:
    found, rows = shares(sampled.values, sampled.starts), segments(sampled, Words())
    plot = profile_plot(found, 1, "")
    return render_page(HEAD, found, sampled, rows, quantities(found, 1), ["Q<i>", "Q"], plot, render(plot))


@pytest.fixture(scope="module")
def usual() -> str:
    """The page of what is usual. To be read only."""
    return page_of(sampled_of(USUAL))


def test_text_of_a_model_stays_text(usual: str) -> None:
    assert "<script" not in usual and "<b>" not in usual.split("<main>")[1].split('id="completions"')[1]
    assert "&lt;script&gt;alert(1)" in usual and "{{ 7 * 7 }}" in usual
    assert "\u202e" not in usual and "a[U+202E]b" in usual
    assert "Q&lt;i&gt;" in usual and "&lt;p0&gt;" in usual and "Answer: &lt;1&gt;" in usual


def test_a_token_has_its_numbers_and_its_colour(usual: str) -> None:
    spans = re.findall(r'<span class="c(\d)( far)?" title="token (\d+) [^"]*: value ([^"]*)">', usual)
    assert [(int(step), bool(far), int(t)) for step, far, t, _ in spans] == [
        (2, False, 0), (8, True, 1), (6, True, 2), (4, False, 0), (0, True, 1),
    ]  # fmt: skip
    assert spans[1][3] == "0.25 ± 0.10 → 0.75, credit +0.50 ± 0.14"
    assert spans[4][3] == "0.45 ± 0.10 → 0.00, credit -0.45 ± 0.10"


def test_colours_are_symmetric_and_their_limits_meet() -> None:
    assert len(COLOURS) == 2 * STEPS + 1 and COLOURS[STEPS] == "#ffffff"
    for limit in (1.0, 0.3):
        x = np.linspace(-limit, limit, 1001)
        found = [step_of(float(v), limit) for v in x]
        assert (np.diff(found) >= 0).all() and set(found) == set(range(2 * STEPS + 1))
        assert [8 - step_of(float(v), limit) for v in -x] == found
        for step, words in legend(limit):
            low, high = map(float, words.split(" to "))
            inside = [f for v, f in zip(x, found, strict=True) if low + 0.01 < v < high - 0.01]
            assert set(inside) <= {step}
    assert step_of(7.0, 1.0) == 8 and step_of(-7.0, 1.0) == 0


def test_the_scale_ends_at_the_largest_credit() -> None:
    assert scale_limit(segments(sampled_of(USUAL), Words())) == pytest.approx(0.5)
    assert scale_limit(segments(sampled_of([[1.0] * 4, [0.0] * 4]), Words())) == 1.0 == scale_limit([])


def test_tables_have_every_segment_position_and_quantity() -> None:
    sampled = sampled_of(USUAL)
    found, rows = shares(sampled.values, sampled.starts), segments(sampled, Words())
    table = credit_frame(sampled, rows)
    assert table["text"].tolist() == HOSTILE
    assert table["t"].tolist() == [0, 1, 2, 0, 1] and table["prompt"].tolist() == ["<p0>"] * 3 + ["p1"] * 2
    assert table["reward"].tolist() == [1.0] * 3 + [0.0] * 2
    profile = profile_frame(found, 2)
    assert profile["by"].tolist() == ["tenth"] * 10 + ["token"] * 3
    assert profile["position"].tolist() == [*range(1, 11), 0, 2, 4]
    table = shares_frame(found, 1).set_index("quantity")
    assert table.loc["total_with_noise", "mean"] > table.loc["total", "mean"]
    assert quantities(found, 1)[2][1] == "Tokens of a completion, K" != quantities(found, 2)[2][1]


def test_a_long_page_is_cut_and_says_so(usual: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "The first" not in usual
    monkeypatch.setattr(page, "SHOWN", 1)
    text = page_of(sampled_of(USUAL))
    assert "The first 1 of 2; the others are in credit.csv." in text
    assert len(re.findall(r'title="token', text)) == 3


def test_a_page_without_variance_says_so() -> None:
    sampled = sampled_of([[1.0] * 4, [0.0] * 4])
    flat = Sampled(**vars(sampled) | {"starts": Starts(np.ones((2, 3)), np.ones((2, 3), dtype=int))})
    text = re.sub(r"base64,[^\"]*", "", page_of(flat))
    assert not re.search(r"\bnan\b", text) and "the rewards of every prompt are equal" in text
