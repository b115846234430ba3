"""The reference of a KL term: the policy as it was before the first update, frozen."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


class Reference:
    """Made from the model before anything is trained or loaded from a checkpoint: a resumed run has the same one.

    With LoRA the frozen weights below the adapters are that policy, since fresh adapters add zero: nothing is copied.
    Without, a copy in the training dtype stays beside the model.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model: Any = model
        self.copy: nn.Module | None = None
        if getattr(model, "active_peft_config", None) is None:
            self.copy = copy.deepcopy(model).eval().requires_grad_(False)

    @contextmanager
    def opened(self) -> Iterator[nn.Module]:
        """The model whose log-probabilities are the reference's, within the block."""
        if self.copy is not None:
            yield self.copy
            return
        with self.model.disable_adapter():
            yield self.model
