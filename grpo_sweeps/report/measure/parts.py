"""The parts of a model: what a parameter's name says, and what a part's Gram says of the gradient.

A name tells where a parameter stands (layer) and what it is (kind), for any naming that Hugging Face models use.
Layers: "embedding", the numbered layers "0", "1", ..., "norm" (one outside the numbered layers), "head", "other".
Kinds: "embedding", "positions", "q", "k", "v", "qkv" (in one matrix), "o", "router", "gate", "up", "gate+up", "down",
"norms" (weights and biases of norm layers), "biases" (all others), "head", "other". A factor of LoRA is the kind of the
matrix it adapts with A or B behind it: "q A".

A tied weight is measured once, under the embedding's name. Where a run kept an embedding and no head, both the layer
and the kind are "embedding+head".

Group records with one Gram per layer or parameter give each part and group its effective rank and shares. For a group
with weights w and Gram K, and K_p the Gram over the parameters of part p (the K_p add up to K):

    effective rank   of diag(w) K_p diag(w), rows of equal texts made one
    energy share     tr diag(w) K_p diag(w) / tr diag(w) K diag(w): of the sum of the squared norms of the R rows
    norm share       w'K_p w / w'K w: of the squared norm of the rows' sum, the group's own gradient
    correlation      of the entries of K_p and K off the diagonal, between different texts, each pair once
    cosine           of the leading eigenvectors of K_p and K, without sign

The Gram of a layer, or of all parameters of one kind, is the sum of its parameters' Grams. One run is read at a time
and one part of it is measured at a time, so that hundreds of parameters times thousands of groups need five numbers
each, not R^2.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from grpo_sweeps import spectra
from grpo_sweeps.spectra.equal import Labels, merged
from grpo_sweeps.spectra.records import own_precision, same_rows
from grpo_sweeps.types import Array, GroupRecord

EMBEDDING, TIED, NORM, HEAD, OTHER = "embedding", "embedding+head", "norm", "head", "other"
ALL = "all"  # the layer or the kind of what is not cut by it
KINDS = (
    EMBEDDING, TIED, "positions", "q", "k", "v", "qkv", "o", "router", "gate", "up", "gate+up", "down", "norms",
    "biases", HEAD, OTHER,
)  # fmt: skip
# The first pattern that one component of the name matches as a whole decides, innermost component first.
_RULES = tuple(
    (kind, re.compile(pattern))
    for kind, pattern in (
        ("norms", r".*norm.*|ln(_.*|\d*)"),
        (HEAD, r"lm_head|head|output_layer|embed_out"),
        ("positions", r"wpe|.*position.*|pos_emb.*"),
        (EMBEDDING, r"wte|.*embed.*|shared"),
        ("q", r"q|wq|query|q_?(proj|lin)|to_q"),
        ("k", r"k|wk|key|k_?(proj|lin)|to_k"),
        ("v", r"v|wv|value|v_?(proj|lin)|to_v"),
        ("qkv", r"c_attn|query_key_value|w?qkv(_proj)?|attn_qkv"),
        ("o", r"wo|o_proj|out_proj|out_lin|to_out"),
        ("gate+up", r"gate_up_proj"),
        ("gate", r"gate_proj|w1|wi_0"),
        ("up", r"up_proj|c_fc|fc1|fc_in|w3|wi(_1)?|lin1|dense_h_to_4h"),
        ("down", r"down_proj|fc2|fc_out|w2|lin2|dense_4h_to_h"),
        ("router", r"router|gate"),
    )
)
_AMBIGUOUS = re.compile(r"dense|c_proj|proj")  # attention's output, or a part of the MLP: its parents tell
_FACTOR = re.compile(r"lora_(?:embedding_)?([ab])")


class Part(NamedTuple):
    """What one row of the table stands for. level: whole | layer | kind | parameter."""

    level: str
    layer: str
    kind: str
    name: str = ""


def parts_of(names: Sequence[str]) -> list[Part]:
    """The parts that a run's names of parameters stand for, in their order.

    >>> parts_of(["model.embed_tokens.weight", "model.layers.3.self_attn.q_proj.weight"])[1]
    Part(level='parameter', layer='3', kind='q', name='model.layers.3.self_attn.q_proj.weight')
    """
    found = [Part("parameter", layer_of(name), kind_of(name), name) for name in names]
    tied = not any(HEAD in (p.kind, _module_kind(p.name)) for p in found)
    return [_tied(part) for part in found] if tied else found


def _tied(part: Part) -> Part:
    if part.kind != EMBEDDING:
        return part._replace(layer=TIED) if part.layer == EMBEDDING else part
    return part._replace(layer=TIED, kind=TIED)


def layer_of(name: str) -> str:
    """The first number in a name, or else what stands outside the numbered layers. Takes a layer's own name, too.

    >>> [layer_of(n) for n in ("transformer.h.11.attn.c_attn.bias", "model.norm.weight", "lm_head", "wpe.weight")]
    ['11', 'norm', 'head', 'embedding']
    """
    number = next((c for c in name.split(".") if c.isdecimal()), None)
    if number is not None:
        return str(int(number))
    kind = _module_kind(name)
    if "embed" in name.lower() and kind == "norms":  # a norm between the embedding and the first layer
        return EMBEDDING
    return {EMBEDDING: EMBEDDING, "positions": EMBEDDING, "norms": NORM, HEAD: HEAD}.get(kind, OTHER)


def kind_of(name: str) -> str:
    """The kind of a parameter; "other" where nothing in its name is known.

    >>> [kind_of(n) for n in ("h.0.mlp.c_proj.weight", "l.1.q_proj.bias", "l.1.q_proj.lora_A.default.weight", "x")]
    ['down', 'biases', 'q A', 'other']
    """
    kind = _module_kind(name)
    if name.rpartition(".")[2] == "bias" and kind != "norms":
        return "biases"
    factor = _FACTOR.search(name.lower())
    return f"{kind} {factor[1].upper()}" if factor else kind


def _module_kind(name: str) -> str:
    """The kind of the module, whichever of its parameters this is."""
    parts = [c for c in name.lower().split(".") if c not in ("weight", "bias") and not _FACTOR.fullmatch(c)]
    for component in reversed(parts):
        for kind, pattern in _RULES:
            if pattern.fullmatch(component):
                return kind
        if _AMBIGUOUS.fullmatch(component):
            parents = ".".join(parts)
            if "att" in parents:
                return "o"
            return "up" if "intermediate" in parents else "down"
    return OTHER


def order(part: Part) -> tuple[int, int, int, int, str]:
    """Sort key: the whole, layers by depth, kinds from the embedding to the head, parameters by depth and kind."""
    kind, _, factor = part.kind.partition(" ")
    return (
        ("whole", "layer", "kind", "parameter").index(part.level), *depth_key(part.layer),
        KINDS.index(kind) * 3 + ("", "A", "B").index(factor) if kind in KINDS else -1, part.name,
    )  # fmt: skip


def depth_key(layer: str) -> tuple[int, int]:
    """Sort key of a layer: what stands before the numbered ones, these, what stands after."""
    if layer.isdecimal():
        return 1, int(layer)
    return (2, (NORM, HEAD, OTHER).index(layer)) if layer in (NORM, HEAD, OTHER) else (0, 0)


@dataclass(frozen=True)
class Parts:
    """The parts of N groups of one run. values: part -> (5, N) effective rank, energy share, norm share, correlation
    and cosine with the whole; NaN where there is none. prompts: (N,) problem of each group, for the intervals. by:
    layer | parameter."""

    run: str
    by: str
    prompts: tuple[str, ...]
    values: dict[Part, Array]


def run_parts(run: str, by: str, records: Sequence[GroupRecord], dtype: str | None = None) -> list[Parts]:
    """What the records of one run say of its parts: of its measured mixed groups whose gradient is not zero.

    `by` is the run's `analysis.by`; where it is neither layer nor parameter the names tell. dtype: of the run's model.
    Groups whose names or R differ (never within an undamaged run) come as separate items; none where no part was kept.
    """
    alike: dict[tuple[int, str, tuple[str, ...]], list[GroupRecord]] = {}
    for record in records:
        if record.gram is not None and record.gram_by and record.mixed:
            alike.setdefault((record.R, record.rows, tuple(record.gram_by)), []).append(record)
    found = []
    for (_, _, names), groups in alike.items():
        kind = by if by in ("layer", "parameter") else _by_names(names)
        energetic = [r for r in groups if np.trace(spectra.weighted_gram(_gram(r), _weights(r))) > 0]
        if energetic:
            prompts = tuple(r.prompt_id for r in energetic)
            found.append(Parts(run, kind, prompts, dict(_measured(energetic, names, kind, dtype))))
    return found


def _by_names(names: Sequence[str]) -> str:
    """A layer's name ends in its number ("model.layers.3"), a parameter's in weight or bias."""
    return "layer" if any(name.rpartition(".")[2].isdecimal() for name in names) else "parameter"


def _gram(record: GroupRecord) -> Array:
    assert record.gram is not None
    return record.gram


def _weights(record: GroupRecord) -> Array:
    """(R,) the factors between the rows of the Gram and those of the gradient matrix."""
    return np.asarray(record.weights) if record.rows == "scores" else np.ones(record.R)


def _measured(
    records: Sequence[GroupRecord], names: Sequence[str], by: str, dtype: str | None
) -> Iterator[tuple[Part, Array]]:
    """Each part with its (5, N) values. Sums over parameters grow while these are gone through: one Gram per layer and
    kind is held, never one per parameter."""
    whole = _Whole(records, dtype)
    yield Part("whole", ALL, ALL), whole.values(whole.gram_NRR)
    sums: dict[Part, Array] = {}
    for part in parts_of(names):
        gram_NRR = np.stack([r.gram_by[part.name] for r in records])
        coarser = [Part("layer", part.layer, ALL)]
        if by == "parameter":
            yield part, whole.values(gram_NRR)
            coarser.append(Part("kind", ALL, part.kind))
        for key in coarser:
            sums[key] = sums[key] + gram_NRR if key in sums else gram_NRR
    for key, gram_NRR in sums.items():
        yield key, whole.values(gram_NRR)


class _Whole:
    """The whole gradient of N groups, against which the parts are measured. dtype: of the run's model."""

    def __init__(self, records: Sequence[GroupRecord], dtype: str | None) -> None:
        self.gram_NRR = np.stack([_gram(r) for r in records])
        self.weights_NR = np.stack([_weights(r) for r in records])
        self.rows_NR = np.stack([same_rows(r) for r in records])
        floor_N = np.array([own_precision(r, dtype) for r in records])
        weighted_NRR = spectra.weighted_gram(self.gram_NRR, self.weights_NR)
        self.energy_N = np.trace(weighted_NRR, axis1=-2, axis2=-1)
        self.norm_N = weighted_NRR.sum(axis=(-2, -1))
        # The rows may cancel in their sum: a sum within its own rounding is no measure to divide by.
        sizes_NR = np.sqrt(np.clip(np.diagonal(weighted_NRR, axis1=-2, axis2=-1), 0.0, None))
        error_N = np.maximum(floor_N, spectra.ROUNDING_FLOOR) * sizes_NR.sum(axis=-1) ** 2
        self.has_norm_N = self.norm_N > error_N

    def values(self, part_NRR: Array) -> Array:
        """(5, N): effective rank, energy share, norm share, correlation and cosine of a part with Grams (N, R, R)."""
        weighted_NRR = spectra.weighted_gram(part_NRR, self.weights_NR)
        values_NR = spectra.singular_values(*merged(part_NRR, self.weights_NR, self.rows_NR))
        energy_N = np.trace(weighted_NRR, axis1=-2, axis2=-1)
        missing_N = np.full(len(energy_N), np.nan)
        return np.stack(
            [
                np.asarray(spectra.effective_rank(values_NR), dtype=float),
                energy_N / self.energy_N,
                np.divide(weighted_NRR.sum(axis=(-2, -1)), self.norm_N, out=missing_N, where=self.has_norm_N),
                off_diagonal_correlation(part_NRR, self.gram_NRR, self.rows_NR),
                leading_cosine(part_NRR, self.gram_NRR),
            ]
        )


LEAST_PAIRS = 3  # of different texts: the correlation of two is 1 or -1


def off_diagonal_correlation(first_NRR: Array, second_NRR: Array, same_NR: Labels) -> Array:
    """(N,) correlation of two Grams' entries i < j, pairs of equal texts left out; NaN for fewer than `LEAST_PAIRS`, or
    where the entries of one are all equal.

    >>> gram = np.array([[[4.0, 1.0, 2.0], [1.0, 9.0, 5.0], [2.0, 5.0, 1.0]]])
    >>> off_diagonal_correlation(gram, 3 - 2 * gram, np.array([[0, 1, 2]])).round(12).tolist()
    [-1.0]
    """
    i, j = np.triu_indices(first_NRR.shape[-1], 1)
    counts_NP = same_NR[:, i] != same_NR[:, j]
    number_N = counts_NP.sum(axis=1)
    centred = []
    for gram_NRR in (first_NRR, second_NRR):
        pairs_NP = np.where(counts_NP, gram_NRR[:, i, j], 0.0)
        mean_N = pairs_NP.sum(axis=1) / np.maximum(number_N, 1)
        centred.append(np.where(counts_NP, pairs_NP - mean_N[:, None], 0.0))
    x_NP, y_NP = centred
    size_N = np.sqrt((x_NP**2).sum(axis=1) * (y_NP**2).sum(axis=1))
    known_N = (number_N >= LEAST_PAIRS) & (size_N > 0)
    return np.divide((x_NP * y_NP).sum(axis=1), size_N, out=np.full(len(size_N), np.nan), where=known_N)


def leading_cosine(first_NRR: Array, second_NRR: Array) -> Array:
    """(N,) absolute cosine of the leading eigenvectors of two Grams; NaN where one is zero."""
    vectors = [np.linalg.eigh((K + np.swapaxes(K, 1, 2)) / 2)[1][:, :, -1] for K in (first_NRR, second_NRR)]
    known_N = (np.trace(first_NRR, axis1=1, axis2=2) > 0) & (np.trace(second_NRR, axis1=1, axis2=2) > 0)
    return np.where(known_N, np.abs((vectors[0] * vectors[1]).sum(axis=1)), np.nan)
