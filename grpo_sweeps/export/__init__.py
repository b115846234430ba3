"""From a run's checkpoint to a model that transformers and vLLM load."""
