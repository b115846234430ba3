"""transformers' Trainer with the spectrum of every batch's gradients in its log; the model is in the dtype to train."""

from contextlib import ExitStack

from transformers import Trainer

from grpo_sweeps import GradientGram
from grpo_sweeps.spectra import effective_rank, singular_values


class MeasuredTrainer(Trainer):
    def _prepare_inputs(self, inputs):
        inputs = super()._prepare_inputs(inputs)
        if self.model.training:
            self.gram = getattr(self, "gram", None) or GradientGram(self.model)
            self.measured = self.stack.enter_context(self.gram.measure([len(inputs["input_ids"])]))
        return inputs

    def training_step(self, *args, **kwargs):
        with ExitStack() as self.stack:
            loss = super().training_step(*args, **kwargs)
        K = self.measured.matrix()  # of the gradients of each row's share of the loss
        self.log({"spectral/effective_rank": effective_rank(singular_values(K))})
        return loss
