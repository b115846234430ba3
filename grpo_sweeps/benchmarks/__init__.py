"""What the measurement costs: one file a benchmark, each a function from command-line values to a printed table."""
