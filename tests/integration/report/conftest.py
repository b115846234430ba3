"""The synthetic sweeps of the unit tests."""

from tests.unit.report.conftest import full_sweep, paper_copy, paper_sweep, write

__all__ = ["full_sweep", "paper_copy", "paper_sweep", "write"]
