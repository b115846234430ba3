"""From a command to runs: what it asks for, what exists already, and how the rest is started."""
