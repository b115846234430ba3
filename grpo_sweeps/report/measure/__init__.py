"""One group's numbers, from its record alone."""
