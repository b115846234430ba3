"""Random shapes of what a kernel entry may meet in training, each drawn as a function of (seed, index) alone and run
through GradientGram on a small module, with the float64 rows of the same inputs beside it.

"The same inputs" are what the weight's gradient is a product of, in the dtype that was asked for: the layer's input and
its output gradient. A head's output gradients dz are rounded to the dtype by the head itself, from logits that the
product rounds before: they are formed again here by the same products. A second comparison takes the logits in float64
too, from the same hidden states and weight; it is shown and not judged, since 1 - p of a confident row cancels.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from grpo_sweeps.engine.gram import GradientGram
from grpo_sweeps.engine.gram.linear import FORMS, why_not
from grpo_sweeps.engine.gram.measurement import Measurement
from grpo_sweeps.engine.gram.norm import takes_norm_kernel
from grpo_sweeps.engine.head import block_logits, head_log_probs, vocabulary_blocks

FORCED = tuple(f"linear_{form}" for form in FORMS if form != "auto")
WEIGHTS = {  # how often each entry is drawn
    "linear": 24, **dict.fromkeys(FORCED, 6), "conv1d": 8, "head": 18, "tied": 10, "embedding": 6, "layer_norm": 5,
    "rms_norm": 4, "row_norm": 4, "bias": 5,
}  # fmt: skip
ENTRIES = tuple(WEIGHTS)
NORMS = ("layer_norm", "rms_norm", "row_norm")
OF_WORDS = ("head", "tied", "embedding")
# Rows of the groups of one micro-batch. A fixed list: each number of rows is a kernel of its own to compile.
LAYOUTS = (
    (2,), (3,), (4,), (5,), (6,), (7,), (8,), (9,), (12,), (16,), (17,), (24,), (32,),
    (1, 2), (8, 8), (4, 4, 4), (3, 5, 8), (8, 1, 7), (2, 6, 1), (5, 16), (17, 3), (1, 1, 8, 2), (32, 8),
)  # fmt: skip
WIDTHS = (1, 3, 7, 8, 24, 64, 72, 100, 128, 136, 257, 384, 576, 640, 896, 1000, 1022, 1536, 2304, 3072, 4097, 4864)
NORM_WIDTHS = (*WIDTHS, 8192, 16_384, 16_400)
VOCABULARIES = (29, 100, 1000, 8191, 8192, 10_922, 32_001, 49_152, 50_257, 151_936)
MOST_ELEMENTS = 2**26  # of inputs and output gradients together: 512 MB in float64
MOST_GHOST_PAIRS = 2**26  # (R T)^2 of a forced ghost form
MOST_WEIGHTS = 3 * 2**26  # of a head or an embedding: 1.5 GB in float64
CHUNK_ELEMENTS = 2**26  # of float64 rows held at once: 512 MB
# A slice of the parameter's first dimension and the rows' gradients there, (B, n, m) float64.
Rows = Iterator[tuple[slice, Tensor]]


@dataclass(frozen=True)
class Shape:
    """One drawn shape. groups: rows of each group, back to back. lengths: tokens of each row; the rest up to T is
    padding on the right. o, i: outputs and inputs of a linear layer, (V, H) for an embedding or a head, H twice for a
    norm. led: an earlier measured module feeds this one, as in all but the first module of a model."""

    index: int
    entry: str
    groups: tuple[int, ...]
    cross_groups: bool
    lengths: tuple[int, ...]
    T: int
    o: int
    i: int
    temperature: float
    led: bool

    @property
    def rows(self) -> int:
        return sum(self.groups)

    @property
    def largest_unit(self) -> int:
        return self.rows if self.cross_groups else max(self.groups)

    @property
    def form(self) -> str:
        """The form that GradientGram is asked for."""
        return self.entry.partition("_")[2] if self.entry in FORCED else "auto"

    def __str__(self) -> str:
        cross = ", cross groups" if self.cross_groups else ""
        return f"#{self.index} {self.entry} groups {self.groups}{cross}, T={self.T}, o={self.o}, i={self.i}"


def draw(seed: int, index: int, tokens: int, work: float, dtype: torch.dtype, device: torch.device) -> Shape:
    """The index-th shape of a seed: T up to `tokens`, at most `work` multiplications of a forward.

    A form that the device or the dtype does not allow is drawn as an unforced linear layer.
    """
    dice = random.Random(f"{seed} {index}")
    entry = dice.choices(ENTRIES, list(WEIGHTS.values()))[0]
    groups = dice.choice(LAYOUTS)
    if entry == "linear_fused":
        groups = dice.choice([layout for layout in LAYOUTS if max(layout) <= 8])
    rows, cross = sum(groups), len(groups) > 1 and dice.random() < 0.2
    if entry == "linear_fused":
        cross = cross and rows <= 8
    T = round(math.exp(dice.uniform(0, math.log(tokens))))
    T = max(1, min(T, int(work / rows), MOST_ELEMENTS // (2 * rows)))
    if entry == "linear_ghost":
        T = min(T, max(1, math.isqrt(MOST_GHOST_PAIRS) // (rows if cross else max(groups))))
    o, i = _widths(dice, entry, rows * T, work)
    if entry in FORCED and why_not(entry.partition("_")[2], o, i, rows if cross else max(groups), dtype, device):
        entry = "linear"
    lengths = _lengths(dice, rows, T)
    if entry in ("head", "tied") and dice.random() < 0.02:
        lengths, T = (0,) * rows, 0  # completions that are all empty leave no column
    temperature = dice.choice((1.0, 1.0, 0.7, 1.3))
    led = entry not in ("tied", "embedding") and dice.random() < 0.7
    return Shape(index, entry, groups, cross, lengths, T, o, i, temperature, led)


def _widths(dice: random.Random, entry: str, tokens: int, work: float) -> tuple[int, int]:
    """(o, i) within the work and the elements that are left to `tokens` rows of input."""
    room = MOST_ELEMENTS / tokens
    if entry in NORMS:
        width = _width(dice, NORM_WIDTHS, min(room / 2, work / tokens))
        return width, width
    if entry in OF_WORDS:
        o = _width(dice, VOCABULARIES, work / tokens, odd=0.2)
        products = 1 if entry == "embedding" else o
        i = _width(dice, WIDTHS, min(room, work / tokens / products, MOST_WEIGHTS / o))
        return o, i
    o = _width(dice, WIDTHS, min(room / 2, work / tokens))
    i = _width(dice, WIDTHS, min(room / 2, work / tokens / o))
    return (o + 7 & -8, i + 7 & -8) if entry == "linear_fused" else (o, i)


def _width(dice: random.Random, listed: tuple[int, ...], most: float, odd: float = 0.4) -> int:
    """One of the listed widths that fits, or an odd number that no block divides."""
    fits = [width for width in listed if width <= most] or [1]
    if dice.random() < odd:
        return dice.randint(1, max(1, min(int(most), fits[-1]))) | 1
    return dice.choice(fits[-12:])


def _lengths(dice: random.Random, rows: int, T: int) -> tuple[int, ...]:
    """Tokens of each row: all T, or some shorter and some empty, with at least one of T."""
    if dice.random() < 0.25:
        return (T,) * rows
    lengths = [0 if dice.random() < 0.1 else dice.randint(1, T) for _ in range(rows)]
    lengths[dice.randrange(rows)] = T
    return tuple(lengths)


@dataclass(frozen=True)
class Errors:
    """Errors in machine epsilons of the dtype. gram: largest |K_ij - exact| / sqrt(K_ii K_jj). gradient: norm of the
    weighted gradient's error over sum_i |w_i| |psi_i|. wide: as gram, with the logits in float64 too (0 without
    logits)."""

    gram: float
    gradient: float
    wide: float = 0.0


class Case:
    """One shape on a device. A subclass builds `part`, the module under test, and knows its rows in float64."""

    def __init__(self, shape: Shape, dtype: torch.dtype, device: torch.device, seed: int) -> None:
        self.shape, self.dtype, self.device = shape, dtype, device
        self.random = torch.Generator(device).manual_seed(seed * 1_000_003 + shape.index)
        B, T = shape.rows, shape.T
        lengths = torch.tensor(shape.lengths, device=device)
        self.real_BT = torch.arange(T, device=device)[None] < lengths[:, None]
        # Rows of different size, as scores have; 0 where there is nothing but padding.
        scale = torch.exp(self.normal(B, dtype=torch.float32))[:, None]
        self.scale_BT = torch.where(self.real_BT, scale, 0.0)
        self.weights_B = self.normal(B, dtype=torch.float64)
        self.first = nn.Embedding(1, 1, device=device, dtype=dtype) if shape.led else None
        self.part = self.build()

    def normal(self, *size: int, dtype: torch.dtype | None = None) -> Tensor:
        made = torch.randn(*size, generator=self.random, device=self.device)
        return made.to(dtype or self.dtype)

    def gradient(self, width: int) -> Tensor:
        """(B, T, width) output gradients, 0 at padding."""
        made = self.normal(self.shape.rows, self.shape.T, width, dtype=torch.float32)
        return (made * self.scale_BT[..., None]).to(self.dtype)

    def lead(self, x: Tensor) -> Tensor:
        """x, made by an earlier measured module where the shape says so."""
        if self.first is None:
            return x
        return x + 0 * self.first(torch.zeros(len(x), 1, dtype=torch.long, device=self.device))

    def build(self) -> nn.Module:
        raise NotImplementedError

    def row_sums(self) -> Tensor:
        """One sum per row, (B,): the forward whose per-row gradients are measured."""
        raise NotImplementedError

    def rows(self, name: str, wide: bool) -> Rows:
        """The exact rows of a parameter, slice by slice; wide: with the logits in float64 too."""
        raise NotImplementedError

    def path(self) -> str:
        """The path that measured it, where it is none of the forms of a linear weight."""
        raise NotImplementedError

    def has_logits(self) -> bool:
        return False

    def chunks(self, n: int, m: int) -> Iterator[slice]:
        step = max(1, CHUNK_ELEMENTS // (self.shape.rows * m))
        return (slice(low, min(n, low + step)) for low in range(0, n, step))


class LinearCase(Case):
    """A linear layer in any form, Conv1D with its transposed weight, a bias."""

    def build(self) -> nn.Module:
        o, i, entry = self.shape.o, self.shape.i, self.shape.entry
        self.x_BTi = self.normal(self.shape.rows, self.shape.T, i)
        self.y_BTo = self.gradient(o)
        if entry == "conv1d":
            from transformers.pytorch_utils import Conv1D

            return Conv1D(o, i).to(self.device, self.dtype)
        return nn.Linear(i, o, bias=entry == "bias", device=self.device, dtype=self.dtype)

    def row_sums(self) -> Tensor:
        return (self.part(self.lead(self.x_BTi)) * self.y_BTo).sum((1, 2))

    def rows(self, name: str, wide: bool) -> Rows:
        left, right = self.y_BTo, self.x_BTi
        if name == "bias":
            yield slice(0, self.shape.o), left.sum(1, dtype=torch.float64)[..., None]
            return
        if self.shape.entry == "conv1d":
            left, right = right, left
        right = right.double()
        for chunk in self.chunks(left.shape[2], right.shape[2]):
            yield chunk, left[:, :, chunk].double().transpose(1, 2) @ right


class NormCase(Case):
    """A layer norm with bias, torch's RMS norm, and one of the classes that take one weight per row."""

    EPS = 1e-5

    def build(self) -> nn.Module:
        H = self.shape.o
        self.x_BTH = self.normal(self.shape.rows, self.shape.T, H) * 2 + 1
        self.y_BTH = self.gradient(H)
        if self.shape.entry == "row_norm":
            from transformers.models.llama.modeling_llama import LlamaRMSNorm

            return LlamaRMSNorm(H, self.EPS).to(self.device, self.dtype)
        kind = nn.LayerNorm if self.shape.entry == "layer_norm" else nn.RMSNorm
        return kind(H, eps=self.EPS, device=self.device, dtype=self.dtype)

    def row_sums(self) -> Tensor:
        return (self.part(self.lead(self.x_BTH)) * self.y_BTH).sum((1, 2))

    def rows(self, name: str, wide: bool) -> Rows:
        y, H = self.y_BTH.double(), self.shape.o
        if name == "weight":
            x = self.x_BTH.double()
            centred = self.shape.entry == "layer_norm"
            y *= F.layer_norm(x, (H,), eps=self.EPS) if centred else F.rms_norm(x, (H,), eps=self.EPS)
        yield slice(0, H), y.sum(1)[..., None]

    def path(self) -> str:
        if self.shape.entry == "row_norm":
            return "autograd"
        return "norm_rows" if takes_norm_kernel(self.x_BTH) else "reference"


class WordsCase(Case):
    """An embedding, a head, and both with one weight."""

    def build(self) -> nn.Module:
        shape = self.shape
        V, H, B, T = shape.o, shape.i, shape.rows, shape.T
        self.ids_BT = torch.randint(0, V, (B, T), generator=self.random, device=self.device)
        self.ids_BT[~self.real_BT] = 0
        self.targets_BT = torch.randint(0, V, (B, T), generator=self.random, device=self.device)
        self.part = nn.Module()
        # Logits of some nats, which is what a policy has.
        self.part.weight = weight = nn.Parameter(2 * self.normal(V, H, dtype=torch.float32).div_(H**0.5).to(self.dtype))
        if shape.entry != "head":
            padding = 0 if shape.index % 2 and shape.entry == "embedding" else None
            self.part.embedding = nn.Embedding(V, H, padding, _weight=weight, dtype=self.dtype)
            self.part.embedding.weight = weight
        if shape.entry != "embedding":
            self.part.head = nn.Linear(H, V, bias=False, device="meta", dtype=self.dtype)
            self.part.head.weight = weight
        del self.part.weight  # its two modules hold it
        self.weight_VH = weight
        self.x_BTH = self.normal(B, T, H)
        self.y_BTH = self.gradient(H)
        self.gx_BTH: Tensor | None = None
        return self.part

    def row_sums(self) -> Tensor:
        entry = self.shape.entry
        if entry == "embedding":
            return (self.part.embedding(self.ids_BT) * self.y_BTH).sum((1, 2))  # type: ignore[operator]
        if entry == "head":
            x = self.lead(self.x_BTH)
        else:
            x = self.part.embedding(self.ids_BT)  # type: ignore[operator]
            x.register_hook(self._keep)
        head: Any = self.part.head
        logprobs_BT, _ = head_log_probs(x, head, self.targets_BT, self.shape.temperature, False)
        return (logprobs_BT * self.scale_BT).sum(1)

    def _keep(self, gx: Tensor) -> None:
        self.gx_BTH = gx.detach()

    def has_logits(self) -> bool:
        return self.shape.entry != "embedding"

    def rows(self, name: str, wide: bool) -> Rows:
        V, H = self.weight_VH.shape
        if self.shape.entry == "embedding":
            y = self.y_BTH
            if self.part.embedding.padding_idx is not None:  # type: ignore[union-attr]
                y = y.masked_fill((self.ids_BT == 0)[..., None], 0)
            for chunk in self.chunks(V, H):
                yield chunk, self._scattered(y.double(), chunk)
            return
        tied = self.shape.entry == "tied"
        hidden = self.weight_VH.detach()[self.ids_BT] if tied else self.x_BTH
        gradients = LogitGradients(self, hidden, wide)
        gx = gradients.of_hidden().view_as(hidden) if wide and tied else self.gx_BTH
        for block in gradients.blocks:
            dz_BTn = gradients.of(block).view(*hidden.shape[:2], block.stop - block.start)
            for part in self.chunks(block.stop - block.start, H):
                found = dz_BTn[:, :, part].double().transpose(1, 2) @ hidden.double()
                chunk = slice(block.start + part.start, block.start + part.stop)
                if tied and gx is not None:
                    found += self._scattered(gx.double(), chunk)
                yield chunk, found

    def _scattered(self, y_BTH: Tensor, ids: slice) -> Tensor:
        """Sums of y over the tokens with each of the ids, (B, n, H)."""
        (B, _, H), n = y_BTH.shape, ids.stop - ids.start
        row, column = ((self.ids_BT >= ids.start) & (self.ids_BT < ids.stop)).nonzero(as_tuple=True)
        out = y_BTH.new_zeros(B * n, H)
        out.index_add_(0, row * n + self.ids_BT[row, column] - ids.start, y_BTH[row, column])
        return out.view(B, n, H)

    def path(self) -> str:
        return "scatter"


class LogitGradients:
    """dz of a block of the vocabulary: in the dtype of the model by the head's own products, or in float64."""

    def __init__(self, case: WordsCase, hidden_BTH: Tensor, wide: bool) -> None:
        weight, shape = case.weight_VH.detach(), case.shape
        blocks = vocabulary_blocks(shape.o, hidden_BTH.shape[0] * hidden_BTH.shape[1], case.dtype, case.device)
        self.blocks = [slice(low, high) for low, high in blocks]
        self.temperature, self.dtype = shape.temperature, torch.float64 if wide else case.dtype
        self.hidden, self.weight = hidden_BTH.flatten(0, 1).to(self.dtype), weight.to(self.dtype)
        self.targets = case.targets_BT.reshape(-1, 1)
        self.g = (case.scale_BT.reshape(-1, 1).double() / shape.temperature).to(
            torch.float64 if wide or case.dtype == torch.float64 else torch.float32
        )
        parts = [self._logits(block).logsumexp(1) for block in self.blocks]
        self.lse = torch.stack(parts).logsumexp(0)[:, None]

    def _logits(self, block: slice) -> Tensor:
        return block_logits(self.hidden, self.weight[block], self.temperature)

    def of(self, block: slice) -> Tensor:
        d = (self._logits(block) - self.lse).exp_().mul_(-self.g)
        columns = torch.arange(block.start, block.stop, device=d.device)
        return d.add_((self.targets == columns) * self.g).to(self.dtype)

    def of_hidden(self) -> Tensor:
        """The hidden states' gradients, (B T, H)."""
        return sum((self.of(block) @ self.weight[block] for block in self.blocks), torch.zeros_like(self.hidden))


def case_of(shape: Shape, dtype: torch.dtype, device: torch.device, seed: int) -> Case:
    kind: Callable[..., Case] = LinearCase
    if shape.entry in NORMS:
        kind = NormCase
    elif shape.entry in ("head", "tied", "embedding"):
        kind = WordsCase
    return kind(shape, dtype, device, seed)


def errors_of(case: Case) -> tuple[Errors, str]:
    """Largest errors over all parameters of a shape measured as training does, and the path that was taken.

    Raises:
        Exception: whatever the engine raises.
    """
    shape = case.shape
    model = nn.ModuleDict({"part": case.part})
    if case.first is not None:
        model["first"] = case.first
    gram = GradientGram(model, shape.form)  # type: ignore[arg-type]
    with gram.measure(shape.groups, case.weights_B, shape.cross_groups) as m:
        case.row_sums().sum().backward()
    if shape.cross_groups or len(shape.groups) == 1:
        m.check()
    eps = torch.finfo(case.dtype).eps
    found = []
    for name, parameter in case.part.named_parameters():
        short = name.rpartition(".")[2]
        gram_error, gradient = compare(case, m, f"part.{name}", parameter, case.rows(short, wide=False))
        wide = 0.0
        if case.has_logits():
            wide, _ = compare(case, m, f"part.{name}", parameter, case.rows(short, wide=True))
        found.append(Errors(gram_error / eps, gradient / eps, wide / eps))
    worst = Errors(*(max(getattr(e, key) for e in found) for key in ("gram", "gradient", "wide")))
    return worst, "+".join(gram.forms_taken) or case.path()


def compare(case: Case, m: Measurement, name: str, parameter: nn.Parameter, rows: Rows) -> tuple[float, float]:
    """(Gram error, gradient error) of one parameter, relative."""
    B, w = case.shape.rows, case.weights_B
    exact = torch.zeros(B, B, dtype=torch.float64, device=case.device)
    missed = torch.zeros((), dtype=torch.float64, device=case.device)
    assert parameter.grad is not None
    grad = parameter.grad.view(len(parameter), -1)
    for chunk, rows_Bnm in rows:
        flat = rows_Bnm.flatten(1)
        exact += flat @ flat.T
        missed += (grad[chunk].double().flatten() - w @ flat).square().sum()
    norms = exact.diagonal().sqrt()
    scale = float(w.abs() @ norms)
    units = m.layout.units
    measured = [m.parameter_matrix(name)] if case.shape.cross_groups else m.matrices(by="parameter")[name]
    gram_error = 0.0
    for unit, found in zip(units, measured, strict=True):
        difference = (found.to(case.device) - exact[unit, unit]).abs()
        sizes = torch.outer(norms[unit], norms[unit])
        # A row of padding alone has a gradient of 0 exactly.
        relative = torch.where(sizes > 0, difference / sizes, torch.where(difference > 0, torch.inf, 0.0))
        gram_error = max(gram_error, float(relative.nan_to_num(nan=torch.inf).max()))
    return gram_error, ratio(float(missed.sqrt()), scale)


def ratio(miss: float, scale: float) -> float:
    """miss / scale; infinity where a value must be 0 and is not, or is not a number."""
    found = miss / scale if scale else (0.0 if miss == 0 else math.inf)
    return math.inf if math.isnan(found) else found
