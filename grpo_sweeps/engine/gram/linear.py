"""Weights of linear maps: the Gram of per-row gradients y_b' x_b without keeping any of them whole.

The ways to form it are in `forms`; the ghost form is the ghost norm of Li et al. 2021 (arXiv 2110.05679), for all
pairs of rows instead of the diagonal.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from grpo_sweeps.engine.gram.embedding import TiedLink
from grpo_sweeps.engine.gram.forms import Form, choose_form
from grpo_sweeps.engine.gram.layout import RowLayout
from grpo_sweeps.engine.gram.partials import Partial, SlotPlan
from grpo_sweeps.engine.gram.recorder import Recorder, Workspace
from grpo_sweeps.engine.gram.sums import WeightSums

if TYPE_CHECKING:
    from grpo_sweeps.engine.gram.claims import Claim


@dataclass(frozen=True)
class Options:
    """How Grams are formed. block_bytes: most memory of one block of per-row gradients."""

    form: Form
    block_bytes: int
    workspace: Workspace


class LinearRecorder(Recorder):
    """Weight of a linear map. `transposed` for a weight stored (in, out); `link` when it is tied to the embedding."""

    def __init__(
        self,
        claim: Claim,
        layout: RowLayout,
        options: Options,
        plan: SlotPlan,
        transposed: bool = False,
        link: TiedLink | None = None,
    ) -> None:
        super().__init__(claim, layout)
        self.options = options
        self.plan = plan
        self.transposed = transposed
        self.link = link

    def sums(self, T: int, whole: bool = True) -> WeightSums:
        """Empty sums in the form that T tokens a row call for."""
        weight, options = self.parameter, self.options
        o, i = weight.shape
        form = choose_form(options.form, T, o, i, max(self.layout.unit_sizes), weight.dtype, weight.device, whole=whole)
        return WeightSums(self.layout, self.plan, weight, form, options.block_bytes, options.workspace)

    def backward(self, gy: Tensor, *saved: Tensor) -> tuple[Tensor, Partial]:
        (x,) = saved
        rows = self.layout.rows
        y_BTo = gy if gy.dim() == 3 else gy.reshape(rows, -1, gy.shape[-1])
        x_BTi = x if x.dim() == 3 else x.reshape(rows, -1, x.shape[-1])
        left, right = (x_BTi, y_BTo) if self.transposed else (y_BTo, x_BTi)
        sums = self.sums(left.shape[1])
        sums.add(left, right)
        if self.link is not None:
            self.link.offer_output_gradients(y_BTo, x_BTi, sums.grad)
        return sums.grad, sums.partial()
