"""Sentences made of an exception and what it was raised from."""

from __future__ import annotations

from grpo_sweeps.sweep.errors import explain


def test_errors_that_lead_back_to_each_other_are_read_once() -> None:
    """As Hydra's are where a tracer, of a debugger or of coverage, keeps frames alive."""
    first, second = ValueError("first"), ValueError("second")
    first.__context__, second.__context__ = second, first
    assert explain(first) == "second"


def test_the_innermost_error_speaks_where_no_rule_knows_better() -> None:
    try:
        try:
            raise KeyError("inside")
        except KeyError as inside:
            raise RuntimeError("outside") from inside
    except RuntimeError as error:
        assert explain(error) == "'inside'"
