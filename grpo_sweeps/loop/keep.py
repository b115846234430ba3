"""When a run's state is saved, how it is found again, and that a full disk does not end the run."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch

from grpo_sweeps.config import TrainerConfig
from grpo_sweeps.engine import checkpoint
from grpo_sweeps.engine.policy import not_finite
from grpo_sweeps.loop.setup import Setup, due
from grpo_sweeps.tracking.checkpoints import FOLDER
from grpo_sweeps.tracking.local import LocalRecord

RETRY_S = 60.0  # after a checkpoint that could not be written


class Keeper:
    """Saves checkpoints of one run: every so many steps, every so many minutes, at the end, and when it is stopped.

    identity: the run's, which each checkpoint names; one of another run is not gone on from.
    saved: steps done in the newest checkpoint (0 without one); the same state is not written twice.
    """

    def __init__(self, setup: Setup, run_dir: Path, note: Callable[[str], None], identity: str = "") -> None:
        self.setup, self.folder, self.note, self.identity = setup, run_dir / FOLDER, note, identity
        self.saved, self._at = 0, time.monotonic()
        self._failed: float | None = None  # when the last attempt failed

    @torch.no_grad()
    def resume(self) -> int:
        """Load the newest whole checkpoint; the number of steps it holds (0 without one)."""
        found = checkpoint.latest(self.folder, say=self.note, identity=self.identity)
        self._at = time.monotonic()
        if found is None:
            return 0
        parameters = dict(self.setup.policy.model.named_parameters())
        for name, saved in found.state["model"].items():
            parameters[name].copy_(saved)
        self.setup.optimizer.load_state_dict(found.state["optimizer"])
        self.setup.precision.floor = found.state["floor"]
        if self.setup.critic is not None:
            self.setup.critic.load_state_dict(found.state["critic"])
        self.setup.tally.discarded = found.state.get("discarded", 0)
        self.setup.tally.tokens = found.state.get("tokens", 0)
        self.setup.noise.entries = list(found.state.get("noise", ()))
        checkpoint.restore_random_states(found.random)  # a reward of the user's own may draw from them
        self.saved = found.step
        return found.step

    def after_step(self, record: LocalRecord, done: int, last: bool) -> None:
        """Save where it is time to, after the last step, or where the time before it failed."""
        trainer = self.setup.config.trainer
        again = self._failed is not None and time.monotonic() - self._failed >= RETRY_S
        if again or last or due(done, trainer.checkpoint_every) or self._by_time(trainer):
            self.save(record, done)

    def save(self, record: LocalRecord, done: int) -> None:
        """Save the state after `done` steps, unless that has been done. A disk that refuses is noted, no more.

        Raises FloatingPointError where the weights are no longer finite: there is nothing to go on from."""
        if done == self.saved:
            return
        if name := not_finite(self.setup.policy.model):
            raise FloatingPointError(
                f"the weights {name} are not finite after step {done}: the run has diverged; lower trainer.lr"
            )
        state = {
            "model": _trainable(self.setup),
            "optimizer": self.setup.optimizer.state_dict(),
            "floor": self.setup.precision.floor,
            "discarded": self.setup.tally.discarded,
            "tokens": self.setup.tally.tokens,
            "noise": self.setup.noise.entries,
            "critic": None if self.setup.critic is None else self.setup.critic.state_dict(),
        }
        try:
            record.compact()
            keep = self.setup.config.trainer.keep_checkpoints
            checkpoint.save(self.folder, done, state, keep=keep, identity=self.identity)
            record.seal(checkpoint=done)
        except OSError as error:
            if self._failed is None:
                reason = error.strerror or " ".join(str(error).split())
                self.note(f"the checkpoint of step {done} could not be written ({reason}); the run goes on without it")
            self._failed = time.monotonic()
        else:
            if self._failed is not None:
                self.note(f"checkpoints can be written again, from step {done} on")
            self.saved, self._failed, self._at = done, None, time.monotonic()

    def _by_time(self, trainer: TrainerConfig) -> bool:
        minutes = trainer.checkpoint_minutes
        return minutes is not None and time.monotonic() - self._at >= 60 * minutes


def _trainable(setup: Setup) -> dict[str, torch.Tensor]:
    """Frozen weights are where they were loaded from: a LoRA checkpoint holds the adapters alone."""
    return {name: p.detach() for name, p in setup.policy.model.named_parameters() if p.requires_grad}
