"""Claims about group-relative policy gradients, tested on exact policies."""
