"""TRL's GRPOTrainer with the spectrum of every step in its log; bf16=False, since the model trains in its own dtype."""

from contextlib import ExitStack

from trl import GRPOTrainer

from grpo_sweeps import GradientGram
from grpo_sweeps.spectra import effective_rank, singular_values


class MeasuredGRPOTrainer(GRPOTrainer):
    def _get_per_token_logps_and_entropies(self, model, ids, mask, keep, *_, **__):  # TRL's go around lm_head
        logps = (model(input_ids=ids, attention_mask=mask).logits[:, -keep - 1 : -1] / self.temperature).log_softmax(-1)
        return logps.gather(-1, ids[:, -keep:, None])[..., 0], -(logps.exp() * logps).sum(-1).detach(), None

    def _prepare_inputs(self, batch):
        inputs = super()._prepare_inputs(batch)
        if self.model.training:  # TRL mixes the rows of several prompts: one block of all, its groups by prompt
            self.gram = getattr(self, "gram", None) or GradientGram(self.model)
            self.groups = inputs["prompt_ids"].unique(dim=0, return_inverse=True)[1].cpu()
            self.measured = self.stack.enter_context(self.gram.measure([len(self.groups)]))
        return inputs

    def training_step(self, *args, **kwargs):
        with ExitStack() as self.stack:
            loss = super().training_step(*args, **kwargs)
        for group in self.groups.unique():
            K = self.measured.matrix()[self.groups == group][:, self.groups == group]  # of the rows of the loss
            self._metrics["train"]["spectral/effective_rank"].append(effective_rank(singular_values(K)))
        return loss
