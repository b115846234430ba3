"""The stand-in for the training loop of the unit tests."""

from tests.unit.sweep.conftest import run, statuses, workplace

__all__ = ["run", "statuses", "workplace"]
