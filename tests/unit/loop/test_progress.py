"""What a person sees while a run trains."""

from __future__ import annotations

import io

from grpo_sweeps.loop.progress import LONGEST_NAME, RunProgress


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


def test_a_step_without_a_mixed_group_shows_no_rank() -> None:
    out = io.StringIO()
    RunProgress("run", total=1, stream=out).step(1, {"reward": 0.0, "step_time": 1.0})
    assert "effective rank -" in out.getvalue()


def test_a_terminal_gets_a_bar_and_a_long_name_is_cut() -> None:
    out = Terminal()
    with RunProgress("x" * 200 + "[bold]", total=2, stream=out) as progress:
        progress.step(1, {"reward": 0.5, "spectral/effective_rank": 1.5, "step_time": 1.0})
    assert "1/2" in out.getvalue() and "x" * LONGEST_NAME not in out.getvalue()
