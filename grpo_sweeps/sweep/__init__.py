"""From a command to runs: what is asked for, what is there already, how the rest is started."""
