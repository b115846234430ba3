"""Means over groups and runs with their intervals."""
