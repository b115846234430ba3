"""What a block measured: Grams whole, by layer and by parameter, and the checks of them against the gradient.

`Reduction` makes the Grams, once per block, of what the recorders left: small launches would cost more than the
arithmetic, so the sums over kernel programs, and the Grams of all small parameters, are formed together.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, overload

import numpy as np
import torch
from torch import Tensor, nn

from grpo_sweeps.engine.gram.layout import GramError, RowLayout, SlotPlan, back_to_back, squared_norm
from grpo_sweeps.engine.gram.recorder import Partial, Recorder, Rows, Slots, state_of
from grpo_sweeps.engine.gram.torch_private import gradient_hooks, version_of
from grpo_sweeps.engine.gram.uses import ParameterUse, layer_of
from grpo_sweeps.spectra.floor import tolerance

# In machine epsilons of the parameter, of sum |w| ||psi||: roundings of .grad and of its recorded norm, seen below 1.
BYPASS_FACTOR = 32.0
By = Literal["whole", "layer", "parameter"]


class GramCheckError(GramError):
    """A check missed. The message holds both numbers."""


FUSED = (
    " (a penalty, or a fused loss: TRL's GRPOTrainer multiplies by lm_head.weight itself; give it the "
    "log-probabilities of model(...).logits, as examples/trl_trainer.py does)"
)


class Measurement:
    """The results of one block, to be read after it."""

    def __init__(self, uses: list[ParameterUse], layout: RowLayout, model_dtype: torch.dtype) -> None:
        self.layout = layout
        self._model_dtype = model_dtype
        self._uses = uses
        self._parameters = {use.name: use.parameter for use in uses}
        self.plan = SlotPlan.of(layout)
        self._grads_before = {name: _grad_state(parameter) for name, parameter in self._parameters.items()}
        self._reduction: Reduction | None = None
        self._records: Tensor | None = None  # (parameters, flat_size + 1) on the host, once read

    def _finish(self, recorders: list[Recorder]) -> None:
        """Begin to reduce what the recorders kept, after making sure that no gradient came around a claimed module."""
        partials: dict[str, list[Partial]] = {name: [] for name in self._parameters}
        for recorder in recorders:
            if recorder.partial is not None:
                partials[recorder.name].append(recorder.partial)
        for name, parameter in self._parameters.items():
            if not partials[name] and _grad_state(parameter) != self._grads_before[name]:
                where = [use.module_name for use in self._uses if use.name == name]
                raise GramError(
                    f"parameter {name} gained a gradient that did not pass through module {' or '.join(where)}: "
                    f"something reads the weight directly{FUSED}, so its rows were not measured"
                )
        if not any(partials.values()):
            return
        flat = [partial for kept in partials.values() for partial in kept]
        owners = [index for index, kept in enumerate(partials.values()) for _ in kept]
        self._reduction = Reduction(flat, owners, self.layout, self.plan)
        self._refuse_bypasses({recorder.name: recorder.handed for recorder in recorders})

    def _refuse_bypasses(self, handed: dict[str, tuple[int, int] | None]) -> None:
        """Make sure that a `.grad` that was empty before gained only what the claimed modules gave it.

        This catches a weight that is read around its module as well (a fused head on a tied weight, a penalty). Where
        `.grad` is the very tensor that a recorder handed out, unchanged, its norm need not be formed.
        """
        fresh = [
            name
            for name, parameter in self._parameters.items()
            if self._grads_before[name] is None
            and parameter.grad is not None
            and state_of(parameter.grad) != handed[name]
        ]
        if not fresh:
            return
        grads = [self._parameters[name].grad for name in fresh]
        gained = torch.stack([squared_norm(g.reshape(len(g), -1)) for g in grads if g is not None]).sqrt().cpu()
        names = list(self._parameters)
        for name, norm in zip(fresh, gained.tolist(), strict=True):
            recorded = max(0.0, float(self._read()[names.index(name), -1])) ** 0.5
            tol = BYPASS_FACTOR * torch.finfo(self._parameters[name].dtype).eps
            if abs(norm - recorded) > tol * self._scale(names.index(name)):
                raise GramError(
                    f"parameter {name} gained a gradient of norm {norm:.9g}, of which {recorded:.9g} passed through "
                    f"its module: something else reads the weight{FUSED}, so its rows are not exact"
                )

    def _scale(self, index: int) -> float:
        """sum_i |w_i| ||psi_i|| of one parameter: the most that its gradient's norm can be."""
        grams = self.layout.unflat(self._read()[index, :-1])
        norms = torch.cat([gram.diagonal().clamp_min(0).sqrt() for gram in grams])
        return float(self.layout.weights_B.cpu().abs() @ norms)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The claimed parameters, each once."""
        return list(self._parameters.values())

    @property
    def may_wait(self) -> bool:
        """Whether gradients may be handed to autograd late, at the end of the backward; see `delivery`."""
        return not any(self._grads_before.values()) and not any(
            gradient_hooks(parameter) for parameter in self._parameters.values()
        )

    @property
    def measured(self) -> bool:
        """Whether a backward ran in the block."""
        return self._reduction is not None

    def _read(self) -> Tensor:
        """(parameters, flat_size + 1) on the host. The first call waits for the device, and not the block's end: what
        the host does in between is free."""
        if self._reduction is None:
            raise GramError(
                "nothing was measured: read results after the block, in which row_sums.sum().backward() must have run"
            )
        if self._records is None:
            self._records = self._reduction.read(len(self._parameters))
        return self._records

    def _labels(self, by: By) -> list[str]:
        if by not in ("layer", "parameter"):
            raise GramError(f"by={by!r}: whole, layer or parameter")
        names = list(self._parameters)
        return names if by == "parameter" else [layer_of(name) for name in names]

    @overload
    def matrices(self, by: Literal["whole"] = "whole") -> list[Tensor]: ...

    @overload
    def matrices(self, by: Literal["layer", "parameter"]) -> dict[str, list[Tensor]]: ...

    def matrices(self, by: By = "whole") -> list[Tensor] | dict[str, list[Tensor]]:
        """One (R, R) float64 Gram per group, on the CPU. by="layer"|"parameter": {name: such a list}, which add up to
        the whole."""
        records = self._read()[:, :-1]
        if by == "whole":
            return self._groups(sum_of(records))
        labels = self._labels(by)
        sums: dict[str, Tensor] = {}
        for label, record in zip(labels, records, strict=True):
            sums[label] = sums[label] + record if label in sums else record
        return {label: self._groups(flat) for label, flat in sums.items()}

    def _groups(self, flat: Tensor) -> list[Tensor]:
        units = self.layout.unflat(flat)
        if not self.layout.cross_groups:
            return units
        return [units[0][rows, rows].clone() for rows in back_to_back(self.layout.group_sizes)]

    def matrix(self) -> Tensor:
        """(rows, rows) float64 with the products between groups; needs one group or cross_groups=True."""
        return self._full(sum_of(self._read()[:, :-1]))

    def parameter_matrix(self, name: str) -> Tensor:
        """`matrix()` of one parameter."""
        return self._full(self._read()[list(self._parameters).index(name), :-1])

    def _full(self, flat: Tensor) -> Tensor:
        if len(self.layout.unit_sizes) != 1:
            raise GramError("the products between groups were not measured: pass cross_groups=True to measure()")
        return self.layout.unflat(flat)[0]

    @property
    def floor(self) -> float:
        """The miss of w'Kw that `check` allows. It stands in for how exactly K is the Gram of the gradients that were
        added to `.grad`, relative to sqrt(K_ii K_jj), which `measured_floor` estimates for a model."""
        return tolerance_of(self._model_dtype)

    @property
    def grad_sq_norm(self) -> float:
        """||sum_i w_i psi_i||^2 of what the block added to `.grad`, summed where the weights' gradients were formed."""
        return float(self._read()[:, -1].sum())

    def parameter_grad_sq_norm(self, name: str) -> float:
        """`grad_sq_norm` of one parameter."""
        return float(self._read()[list(self._parameters).index(name), -1])

    def check(self, tol: float | None = None) -> float:
        """The miss of w'Kw against grad_sq_norm, relative to |w|'|K||w| (not to the norm, which can cancel).

        Raises GramCheckError with both numbers where it exceeds tol or a number is not finite. Needs one group or
        cross_groups=True.
        """
        gram, w = self.matrix(), self.layout.weights_B.cpu()
        tol = tolerance_of(widest_eps(self._parameters.values())) if tol is None else tol
        quadratic, scale = float(w @ gram @ w), float(w.abs() @ gram.abs() @ w.abs())
        miss = abs(quadratic - self.grad_sq_norm)
        if not miss <= tol * scale:
            raise GramCheckError(
                f"w'Kw = {quadratic:.9g} but the gradient that was added has squared norm {self.grad_sq_norm:.9g}: "
                f"they differ by {miss:.3g}, allowed are {tol:.1g} x |w|'|K||w| = {tol * scale:.3g}"
            )
        return miss / scale if scale else 0.0


def sum_of(records: Tensor) -> Tensor:
    """The sum of the records, by numpy for the reason that `Reduction` gives."""
    return torch.from_numpy(records.numpy().sum(0))


def _grad_state(parameter: nn.Parameter) -> tuple[int, int] | None:
    return None if parameter.grad is None else (id(parameter.grad), version_of(parameter.grad))


def widest_eps(parameters: Iterable[nn.Parameter]) -> torch.dtype:
    """The dtype with the largest machine epsilon."""
    return max(
        {parameter.dtype for parameter in parameters if parameter.is_floating_point()},
        key=lambda dtype: torch.finfo(dtype).eps,
    )


def tolerance_of(dtype: torch.dtype) -> float:
    """`grpo_sweeps.spectra.floor.tolerance`: allowed miss of w'Kw against the squared gradient norm."""
    return tolerance(str(dtype).removeprefix("torch."))


class Reduction:
    """The records of many partials on their way to the host, in one transfer: nothing waits for them before `read`.

    owners: for each partial the row of the result that it is added to.

    numpy does what is left to do on the host. A few of torch's operators open an OpenMP region there for any size,
    which ends when the slowest core has been there: on a shared host that held up steps by 30 to 55 ms.
    """

    def __init__(self, partials: Sequence[Partial], owners: Sequence[int], layout: RowLayout, plan: SlotPlan) -> None:
        groups: dict[tuple[type, torch.Size, torch.dtype], list[int]] = {}
        for index, partial in enumerate(partials):
            groups.setdefault((type(partial), partial.values.shape, partial.values.dtype), []).append(index)
        records: list[Tensor] = []
        for (kind, _, _), members in groups.items():
            stacked = torch.stack([partials[index].values for index in members])
            if kind is Slots:
                stacked = stacked.sum(1).index_select(1, plan.columns_on(stacked.device))
            elif kind is Rows:
                totals = torch.stack([partials[index].total for index in members])  # type: ignore[union-attr]
                stacked = records_of_rows(stacked, totals, layout)
            records.append(stacked)
        found = torch.cat(records)
        self._arrived: torch.cuda.Event | None = None
        if found.is_cuda:
            host = torch.empty(found.shape, dtype=found.dtype, pin_memory=True)
            found = host.copy_(found, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record(torch.cuda.current_stream(partials[0].values.device))
        self._found = found
        self._owners = [owners[index] for members in groups.values() for index in members]

    def read(self, rows: int) -> Tensor:
        """(rows, flat_size + 1) float64 on the host, zeros in a row that owns nothing."""
        if self._arrived is not None:
            self._arrived.synchronize()
        records = np.zeros((rows, self._found.shape[1]))
        np.add.at(records, self._owners, self._found.numpy())
        return torch.from_numpy(records)


def records_of_rows(rows_PBN: Tensor, totals_PN: Tensor, layout: RowLayout) -> Tensor:
    """(P, flat_size + 1) float64 records of P parameters whose rows' gradients are known whole."""
    rows = rows_PBN.double()
    grams = [torch.bmm(rows[:, unit], rows[:, unit].transpose(1, 2)).flatten(1) for unit in layout.units]
    return torch.cat([*grams, totals_PN.double().square().sum(1, keepdim=True)], dim=1)
