"""The small runs of the unit tests."""

from tests.unit.loop.conftest import loop_functions, make_config

__all__ = ["loop_functions", "make_config"]
