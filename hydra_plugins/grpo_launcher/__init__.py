"""Hydra plugins of grpo_sweeps: its launchers and its sweeper. Hydra finds them because this package is in
`hydra_plugins`."""
