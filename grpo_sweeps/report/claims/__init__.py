"""The rules, and the verdict on each claim of the paper."""
