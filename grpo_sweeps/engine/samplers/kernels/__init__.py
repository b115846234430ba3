"""Triton kernels of the graph sampler, imported only where they run."""
