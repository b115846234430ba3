"""What the measurement costs: one file per benchmark, each a function from command-line values to a printed table."""
