"""What a person sees while a run trains."""

from __future__ import annotations

import io
import re

import pytest

from grpo_sweeps.config import TrainerConfig
from grpo_sweeps.loop.budget import Budget
from grpo_sweeps.loop.progress import LONGEST_NAME, Ahead, RunProgress, ahead
from grpo_sweeps.loop.setup import Tally


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_plain_lines_name_step_reward_rank_and_time_left() -> None:
    out = io.StringIO()
    with RunProgress("R=4 seed=0", total=3, stream=out) as progress:
        for done in (1, 2, 3):
            progress.step(done, {"reward": 0.25, "spectral/effective_rank": 2.5, "step_time": 2.0})
        progress.evaluated(3, {"eval/accuracy": 0.5})
    first, last, evaluation = out.getvalue().splitlines()  # the second step came within the pause between lines
    assert first == "R=4 seed=0  step 1/3  reward 0.250  effective rank 2.50  4 s left"
    assert last == "R=4 seed=0  step 3/3  reward 0.250  effective rank 2.50  0 s left"
    assert evaluation == "R=4 seed=0  evaluation after 3 updates: accuracy 0.500"


def test_a_budget_of_tokens_tells_how_many_steps_there_will_be() -> None:
    """At the pace so far, 30 tokens a step; the bar and the lines count steps."""
    tally = Tally()
    budget = Budget(TrainerConfig(steps=50, tokens=100), tally)
    assert [budget.steps(0), budget.over(0)] == [50, False]
    expected = {1: (30, 4, False), 2: (60, 4, False), 3: (99, 4, False), 4: (129, 4, True)}
    for done, (tokens, steps, over) in expected.items():
        tally.tokens = tokens
        assert (budget.steps(done), budget.over(done)) == (steps, over)
    tally.tokens = 10
    assert budget.steps(49) == 50 and budget.over(50) and not budget.spent
    for out in (io.StringIO(), Terminal()):
        with RunProgress("run", total=50, stream=out) as progress:
            progress.total = 4
            progress.step(4, {"reward": 0.0, "step_time": 1.0})
        assert "4/4" in out.getvalue()


def test_a_step_without_a_mixed_group_shows_no_rank() -> None:
    out = io.StringIO()
    RunProgress("run", total=1, stream=out).step(1, {"reward": 0.0, "step_time": 1.0})
    assert "effective rank -" in out.getvalue()


def test_a_terminal_gets_a_bar_and_a_long_name_is_cut() -> None:
    out = Terminal()
    with RunProgress("x" * 200 + "[bold]", total=2, stream=out) as progress:
        progress.step(1, {"reward": 0.5, "spectral/effective_rank": 1.5, "step_time": 1.0})
    assert "1/2" in out.getvalue() and "x" * LONGEST_NAME not in out.getvalue()


def test_a_run_of_a_sweep_says_which_it_is_and_how_long_all_will_take() -> None:
    out = io.StringIO()
    metrics = {"reward": 0.25, "step_time": 2.0, "sampling/tokens_per_second": 1234.4}
    with ahead(Ahead(run=2, runs=3, rows=8, rows_later=8 * 300)), RunProgress("R=8", total=4, stream=out) as progress:
        progress.step(1, metrics)
    expected = "R=8  step 1/4  reward 0.250  effective rank -  1,234 tok/s  6 s left  (run 2 of 3, 10 min left)\n"
    assert out.getvalue() == expected, "3 steps of 2 s, and later runs with as many rollouts as 300 such steps"
    RunProgress("R=8", total=4, stream=out).step(1, metrics)
    assert "run 2" not in out.getvalue().splitlines()[-1], "the context has ended"
    with ahead(Ahead(1, 1, 8, 0)), RunProgress("R=8", total=4, stream=out) as progress:
        progress.step(1, metrics)
    assert "(run" not in out.getvalue().splitlines()[-1]


def test_a_terminal_gets_a_bar_of_the_sweep_too() -> None:
    out = Terminal()
    with ahead(Ahead(run=2, runs=3, rows=8, rows_later=8 * 300)), RunProgress("R=8", total=4, stream=out) as progress:
        progress.step(1, {"reward": 0.25, "step_time": 2.0, "sampling/tokens_per_second": 1234.4})
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", out.getvalue())
    assert re.search(r"R=8 .*1/4  reward 0\.250  rank -  1,234 tok/s  6 s left", text)
    assert re.search(r"run 2 of 3 .*10 min left", text)


def test_names_that_differ_at_their_ends_are_told_apart() -> None:
    names = [RunProgress(f"R=8 seed=0 estimator=reinforce_plus_plus{end}", 1).name for end in ("", "_baseline")]
    assert len(set(names)) == 2 and all(len(name) == LONGEST_NAME and name.startswith("R=8 seed=0 ") for name in names)


def test_no_color_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    for no_color, there in (("1", False), ("", True)):
        monkeypatch.setenv("NO_COLOR", no_color)
        out = Terminal()
        with RunProgress("R=4", total=2, stream=out) as progress:
            progress.step(1, {"reward": 0.5, "step_time": 1.0})
        assert bool(re.search(r"\x1b\[[0-9;]*[39][0-9]", out.getvalue())) == there
