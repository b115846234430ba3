"""Statistics and losses as pure functions: intervals of means, unbiased estimates from groups, a step's objective."""
