"""One model: policy, sampler, blockwise head, optimiser, checkpoints, and the Gram of its rollouts' gradients."""
