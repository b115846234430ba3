"""A parameter's name -> where it stands (layer) and what it is (kind), for any naming that Hugging Face models use.

Layers: "embedding", the numbered layers "0", "1", ..., "norm" (one outside the numbered layers), "head", "other".
Kinds: "embedding", "positions", "q", "k", "v", "qkv" (in one matrix), "o", "router", "gate", "up", "gate+up", "down",
"norms" (weights and biases of norm layers), "biases" (all others), "head", "other". A factor of LoRA is the kind of the
matrix it adapts with A or B behind it: "q A".

A tied weight is measured once, under the embedding's name. Where a run kept an embedding and no head, both the layer
and the kind are "embedding+head".
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

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
