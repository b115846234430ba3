"""Weights of linear maps: the Gram of the per-row gradients y_b' x_b, without any of them ever held whole.

Four exact ways to form it, between which `choose_form` takes by a measured rule:

blocks   a block of rows' gradients by a batched product, its Gram and weighted sum by library calls; the
         reference, on any device and in any dtype
onepass  the same block, read once by a Triton kernel that does both (CUDA)
fused    no block at all: a Hopper kernel keeps the rows' tiles on the chip (half types, units of up to 8 rows)
ghost    sum over t, s of <x_it, x_js> <y_it, y_js>, plus the ordinary product; for short T. It is the ghost norm of
         Li et al. 2021 (arXiv 2110.05679), for all pairs of rows instead of the diagonal

`WeightSums` gathers what one weight needs by the form that was chosen, and `LinearRecorder` feeds it.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor

from grpo_sweeps.engine.gram.embedding import TiedLink
from grpo_sweeps.engine.gram.kernels.launch import CudaError
from grpo_sweeps.engine.gram.layout import (
    HALF_TYPES,
    GramError,
    RowLayout,
    SlotPlan,
    accumulation_dtype,
    plan_for,
    squared_norm,
    wide_mm,
)
from grpo_sweeps.engine.gram.recorder import Partial, Record, Recorder, Slots, Workspace

if TYPE_CHECKING:
    from grpo_sweeps.engine.gram.uses import ParameterUse


Form = Literal["auto", "blocks", "onepass", "fused", "ghost"]
FORMS: tuple[str, ...] = get_args(Form)

log = logging.getLogger(__name__)

MAX_GHOST_BYTES = 64 * 2**20
# ghost when T^2 (o + i) < factor o i, by the form that it would replace. By arithmetic the factor is 1; what a block
# costs in memory traffic raises it. CPU: `python -m grpo_sweeps.bench forms`, float32, 6 to 10 for widths 512 to 8192.
GHOST_FACTOR = {"blocks": 6.0, "onepass": 4.0, "fused": 1.0}
# Tokens up to which the fused kernel beats the written block: its products run at 680 TFLOP/s, the library's at 800.
MAX_FUSED_TOKENS = 1400
ONEPASS_DTYPES = (torch.float32, *HALF_TYPES)
MAX_FUSED_ROWS = 8
UNUSABLE = "its kernel cannot be compiled or failed its trial here (the log says why)"


@functools.cache
def kernels(name: Literal["onepass", "fused", "norm_rows"]) -> ModuleType | None:
    """The module of a kernel, or None, said once, where it cannot be imported, compiled or trusted. Each is tried on a
    small case first, since compilers and drivers change under it."""
    try:
        module = importlib.import_module(f"grpo_sweeps.engine.gram.kernels.{name}")
        module.trial()
    except Exception as error:  # a compiler may raise anything, and a slower form is there
        line = (str(error).strip().splitlines() or [""])[-1]
        log.warning("the %s kernel cannot be used (%s: %s): a slower form stands in", name, type(error).__name__, line)
        return None
    return module


def begin_compiling(
    groups: Sequence[tuple[int, int]], cross_groups: bool, dtype: torch.dtype, device: torch.device
) -> None:
    """Begin to compile, in the background, the kernels that such groups, (rows, groups per block), take if their widths
    allow; with `cross_groups` also for blocks whose groups are measured as one unit."""
    if device.type != "cuda":
        return
    hopper = dtype in HALF_TYPES and torch.cuda.get_device_capability(device)[0] == 9
    fits = [(R, count) for R, count in groups if hopper and R <= MAX_FUSED_ROWS]
    if fits:
        importlib.import_module("grpo_sweeps.engine.gram.kernels.fused").begin(fits, dtype)
    layouts = [(R,) * count for R, count in groups if (R, count) not in fits]
    if cross_groups:
        layouts += [(R * count,) for R, count in groups if count > 1 and not (hopper and R * count <= MAX_FUSED_ROWS)]
    if layouts and dtype in ONEPASS_DTYPES and (onepass := kernels("onepass")) is not None:
        for units in layouts:
            onepass.begin(plan_for(units), dtype, device)


@functools.cache
def refuse_shape(form: str, reason: str) -> None:
    """Say, once for each reason, that the reference stands in for a kernel that cannot take a shape."""
    line = (reason.strip().splitlines() or ["no reason given"])[-1]
    log.warning("the %s kernel cannot take every shape of this model (%s): the reference stands in there", form, line)


def why_not(form: str, o: int, i: int, largest_unit: int, dtype: torch.dtype, device: torch.device) -> str:
    """The reason, in a few words, why `form` cannot measure a weight (o, i); '' where it can."""
    if form in ("blocks", "ghost"):
        return ""
    if device.type != "cuda":
        return f"{form} needs CUDA, not {device.type}"
    if form == "onepass":
        if dtype not in ONEPASS_DTYPES:
            return f"onepass does not know {dtype}"
        return "" if kernels("onepass") else UNUSABLE
    if dtype not in HALF_TYPES:
        return f"fused needs a half type, not {dtype}"
    if largest_unit > MAX_FUSED_ROWS:
        return f"fused takes up to {MAX_FUSED_ROWS} rows per group, not {largest_unit}"
    if o % 8 or i % 8:
        return f"fused needs widths that are multiples of 8, not {o} and {i}"
    if torch.cuda.get_device_capability(device)[0] != 9:
        return f"fused needs a Hopper card, not {torch.cuda.get_device_name(device)}"
    return "" if kernels("fused") else UNUSABLE


def prefer_ghost(instead_of: str, T: int, o: int, i: int, largest_unit: int, dtype: torch.dtype) -> bool:
    """Whether the ghost form costs less than `instead_of`. T counts padding, which is multiplied like everything
    else."""
    pair_bytes = (largest_unit * T) ** 2 * accumulation_dtype(dtype).itemsize
    return T * T * (o + i) < GHOST_FACTOR[instead_of] * o * i and pair_bytes <= MAX_GHOST_BYTES


@functools.cache
def choose_form(
    form: Form, T: int, o: int, i: int, largest_unit: int, dtype: torch.dtype, device: torch.device, whole: bool = True
) -> str:
    """The form for one weight (o, i) and T tokens per row. Anything but "auto" is taken as asked for.

    whole: all output rows are at hand; the ghost form needs them (the head brings the vocabulary block by block, and
    an asked-for ghost form is replaced there). Raises GramError where the form asked for cannot be had.
    """
    if form != "auto" and (form != "ghost" or whole):
        reason = why_not(form, o, i, largest_unit, dtype, device)
        if reason:
            raise GramError(f"form={form}: {reason}")
        return form
    candidates = ["onepass", "fused"] if T > MAX_FUSED_TOKENS else ["fused", "onepass"]
    best = next((c for c in candidates if not why_not(c, o, i, largest_unit, dtype, device)), "blocks")
    return "ghost" if whole and prefer_ghost(best, T, o, i, largest_unit, dtype) else best


# Most memory of one block. A CPU block that stays in the second-level cache costs nothing to read back: 2 MB was the
# best of 0.25 to 64 MB. On a GPU small blocks do not pay, though its cache would hold them: the batched products slow
# down by more (H100, 9216 x 3072, R=8: 0.55 ms whole, 0.71 in blocks of 25 MB).
BLOCK_BYTES = {"cpu": 2 * 2**20, "cuda": 512 * 2**20}
# Elements of a block: the kernels' offsets are 32 bits, also those of a program's next turn, which lies beyond it.
MOST_ELEMENTS = 2**31 - 2**20
# Slots that take more room are summed at once: those of all weights are kept until the block ends.
KEPT_SLOT_BYTES = 4 * 2**20


def block_bytes_for(device: torch.device) -> int:
    """The most memory of one block on this kind of device."""
    return BLOCK_BYTES.get(device.type, BLOCK_BYTES["cpu"])


class WeightSums:
    """Gathers the three sums over rows that one weight needs, at once or by blocks of its output rows.

    gram     inner products of the rows' gradients y_b' x_b
    grad     sum_b w_b y_b' x_b, the weight's gradient
    sq_norm  ||grad||^2, for the check of w'Kw

    form: one of FORMS but "auto".
    """

    def __init__(
        self, layout: RowLayout, plan: SlotPlan, weight: Tensor, form: str, block_bytes: int, workspace: Workspace
    ) -> None:
        self.layout = layout
        self.plan = plan
        self.form = form
        self.block_bytes = block_bytes
        self.workspace = workspace
        self.grad = torch.empty_like(weight, memory_format=torch.contiguous_format)
        self._gram = self._sq_norm = self._slots = None  # type: Any

    def add(self, y_BTn: Tensor, x_BTi: Tensor, start: int = 0) -> None:
        """Add the sums of weight rows start .. start + n."""
        if self.form == "ghost":
            self._add_ghost(y_BTn, x_BTi)
        elif self.form != "fused" or not self._add_fused(y_BTn, x_BTi, self.grad[start : start + y_BTn.shape[2]]):
            self._add_blocks(y_BTn, x_BTi, start)

    def partial(self) -> Partial:
        """What was gathered for the Gram, by a kernel, by the reference, or by both where one stood in."""
        self.workspace.forms[self.form] += 1
        slots = self._slots
        if self._gram is None:
            assert slots is not None
            large = slots.numel() * slots.element_size() > KEPT_SLOT_BYTES
            return Record(self.plan.summed(slots)) if large else Slots(slots)
        record = torch.cat([self._gram, self._sq_norm.reshape(1)])
        return Record(record if slots is None else record + self.plan.summed(slots))

    def _add_blocks(self, y_BTn: Tensor, x_BTi: Tensor, start: int) -> None:
        """Add in blocks of at most `block_bytes`, of one weight row at least."""
        B, _, n = y_BTn.shape
        i = x_BTi.shape[2]
        step = max(1, min(n, self.block_bytes // (B * i * y_BTn.element_size()), MOST_ELEMENTS // (B * i)))
        y_BnT = y_BTn.transpose(1, 2)
        for low in range(0, n, step):
            high = min(n, low + step)
            rows = self.workspace.get("rows", (B, high - low, i), y_BTn.dtype, y_BTn.device)
            torch.bmm(y_BnT[:, low:high], x_BTi, out=rows)
            grad_ni = self.grad[start + low : start + high]
            if self.form != "onepass" or not self._pass(rows, grad_ni):
                self._sum(rows, grad_ni)

    def _sum(self, rows_Bni: Tensor, grad_ni: Tensor) -> None:
        """Add one block by the reference: library calls, each of which reads the block."""
        gram = self.layout.inner(rows_Bni)
        if rows_Bni.dtype in HALF_TYPES:
            total = self.layout.weighted_sum(rows_Bni.flatten(1))
            grad_ni.copy_(total.view_as(grad_ni))
        else:
            total = self.layout.weighted_sum(rows_Bni.flatten(1), out=grad_ni.view(-1))
        self._keep(gram, squared_norm(total.view_as(grad_ni)))

    def _pass(self, rows_Bni: Tensor, grad_ni: Tensor) -> bool:
        """Add one block by the Triton kernel. False where the compiler refuses these rows: nothing is added then."""
        onepass: Any = kernels("onepass")
        first = self._claim_slots(onepass)
        total = self._total(grad_ni.shape) if len(self.plan.diagonal) > 1 else None
        weights = self.layout.weights(torch.float32)
        try:
            onepass.add_block(rows_Bni, weights, grad_ni, total, self._slots, self.plan, first)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # a compiler may raise anything
            if not first:  # what was added before would be counted twice
                raise
            self._stand_in("onepass", error)
            self._slots = None
        return self.form == "onepass"

    def _add_fused(self, y_BTn: Tensor, x_BTi: Tensor, grad_ni: Tensor) -> bool:
        """Add by the Hopper kernel. False where it cannot take these shapes: nothing is added then."""
        fused: Any = kernels("fused")
        try:
            product = fused.Product(y_BTn, x_BTi, self.plan, first=self._slots is None)
        except (ValueError, CudaError) as error:
            self._stand_in("fused", error)
            return False
        self._claim_slots(fused)
        total = self._total(grad_ni.shape) if len(self.plan.launches) > 1 else None
        product.add(self.layout.weights(torch.float32), grad_ni, total, self._slots)
        return True

    def _stand_in(self, form: str, error: Exception) -> None:
        """Let the reference take over for this weight from here on, said once per reason."""
        refuse_shape(form, str(error))
        self.form = "blocks"

    def _claim_slots(self, module: Any) -> bool:
        """Make room for a kernel's sums. True where nothing is in it yet."""
        if self._slots is not None:
            return False
        self._slots = self.plan.slots(module.programs(self.grad.device), self.grad.device)
        return True

    def _total(self, shape: torch.Size) -> Tensor:
        """Scratch for a weighted sum that several launches add to."""
        return self.workspace.get("total", (shape.numel(),), torch.float32, self.grad.device)

    def _add_ghost(self, y_BTo: Tensor, x_BTi: Tensor) -> None:
        layout = self.layout
        gram = layout.flat([ghost_gram(y_BTo[unit], x_BTi[unit]) for unit in layout.units])
        weights_B = layout.weights(accumulation_dtype(y_BTo.dtype))
        # By a power of two, so that no bit changes: float16 would lose the products of small weights with small y.
        size = torch.exp2(weights_B.abs().max().clamp_min(2.0**-100).log2().ceil())
        weighted_y = (y_BTo * (weights_B / size)[:, None, None]).to(y_BTo.dtype)
        total = wide_mm(weighted_y.flatten(0, 1).T, x_BTi.flatten(0, 1)).mul_(size)
        self.grad.copy_(total)
        self._keep(gram, squared_norm(total))

    def _keep(self, gram: Tensor, sq_norm: Tensor) -> None:
        self._gram = gram if self._gram is None else self._gram + gram
        self._sq_norm = sq_norm if self._sq_norm is None else self._sq_norm + sq_norm


def ghost_gram(y_RTo: Tensor, x_RTi: Tensor) -> Tensor:
    """(R, R) float64: sum over t, s of <x_it, x_js> <y_it, y_js>."""
    R, T, _ = y_RTo.shape
    y, x = y_RTo.reshape(R * T, y_RTo.shape[2]), x_RTi.reshape(R * T, x_RTi.shape[2])
    pairs = wide_mm(y, y.T).mul_(wide_mm(x, x.T))
    return pairs.view(R, T, R, T).sum((1, 3), dtype=torch.float64)


@dataclass(frozen=True)
class GramOptions:
    """The form of Grams asked for, and what blocks share. block_bytes: most memory of one block of per-row
    gradients."""

    form: Form
    block_bytes: int
    workspace: Workspace


class LinearRecorder(Recorder):
    """Measures the weight of a linear map. transposed: it is stored (in, out). link: where it is tied to the
    embedding."""

    def __init__(
        self,
        use: ParameterUse,
        layout: RowLayout,
        options: GramOptions,
        plan: SlotPlan,
        transposed: bool = False,
        link: TiedLink | None = None,
    ) -> None:
        super().__init__(use, layout)
        self.options = options
        self.plan = plan
        self.transposed = transposed
        self.link = link

    def sums(self, T: int, whole: bool = True) -> WeightSums:
        """Empty sums in the form that T tokens per row call for."""
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
