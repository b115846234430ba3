"""Random shapes of what a kernel entry may meet in training, each a function of (seed, index) alone."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import torch

from grpo_sweeps.engine.gram.forms import FORMS, why_not

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


@dataclass(frozen=True)
class Shape:
    """One draw. groups: rows of each group, back to back. lengths: tokens of each row, the rest up to T is padding on
    the right. o, i: outputs and inputs of a linear layer, (V, H) for an embedding or a head, H twice for a norm. led:
    an earlier measured module feeds this one, as it does all but the first of a model."""

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
        """As GradientGram is told it."""
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
    """One of the listed that fits, or some number that no block divides."""
    fits = [width for width in listed if width <= most] or [1]
    if dice.random() < odd:
        return dice.randint(1, max(1, min(int(most), fits[-1]))) | 1
    return dice.choice(fits[-12:])


def _lengths(dice: random.Random, rows: int, T: int) -> tuple[int, ...]:
    """Tokens of each row: all T, or some shorter and some empty, one at least of T."""
    if dice.random() < 0.25:
        return (T,) * rows
    lengths = [0 if dice.random() < 0.1 else dice.randint(1, T) for _ in range(rows)]
    lengths[dice.randrange(rows)] = T
    return tuple(lengths)
