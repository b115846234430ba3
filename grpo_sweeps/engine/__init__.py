"""The engine: policy, sampler, per-rollout gradients (`gram`), blockwise head (`head`) and checkpoints."""
