"""The synthetic sweeps of the unit tests, and figures left blank."""

from tests.unit.report.conftest import full_sweep, paper_copy, paper_sweep, undrawn, write

__all__ = ["full_sweep", "paper_copy", "paper_sweep", "undrawn", "write"]
