"""How long a run goes on: `trainer.steps` steps, or fewer where `trainer.tokens` tokens have been sampled before."""

from __future__ import annotations

import math
from dataclasses import dataclass

from grpo_sweeps.config import TrainerConfig
from grpo_sweeps.loop.results import StepResult
from grpo_sweeps.loop.setup import Tally
from grpo_sweeps.tracking.lines import TOKENS

BESIDE = ("resample/discarded_tokens", "value/tokens")  # what a step draws beside its own rollouts


@dataclass(frozen=True)
class Budget:
    """The steps and tokens that a run may take. The tokens so far are in `tally`, which checkpoints keep."""

    trainer: TrainerConfig
    tally: Tally

    def take(self, result: StepResult) -> dict[str, float]:
        """Count a step's completion tokens: of its rollouts, and of what was discarded or continued. The metric that
        says how many there are so far; none without a budget of tokens."""
        if self.trainer.tokens is None:
            return {}
        own = sum(sum(group.lengths) for group in result.groups)
        self.tally.tokens += own + sum(int(result.metrics.get(name, 0)) for name in BESIDE)
        return {TOKENS: float(self.tally.tokens)}

    @property
    def spent(self) -> bool:
        """True once all tokens of the budget are sampled."""
        return self.trainer.tokens is not None and self.tally.tokens >= self.trainer.tokens

    def over(self, done: int) -> bool:
        """True for a run that takes no further step after `done` of them."""
        return self.spent or done >= self.trainer.steps

    def steps(self, done: int) -> int:
        """Steps in all, by what is known after `done` of them: at the pace so far; exact once the run is over."""
        if self.spent:
            return done
        if self.trainer.tokens is None or not self.tally.tokens:
            return self.trainer.steps
        return min(self.trainer.steps, math.ceil(done * self.trainer.tokens / self.tally.tokens))

    def sentence(self, done: int) -> str:
        return f"finished by trainer.tokens={self.trainer.tokens} after step {done}: {self.tally.tokens} were sampled"
