"""What ends a rollout beside its limit: end-of-sequence tokens, and strings in the text of its tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from grpo_sweeps.engine.policy import Policy


class Endings:
    """The endings of one call of a sampler.

    Attributes:
        ids: tokens that end a rollout by themselves.
        watch: tokens that can complete a stop string: only after one of them is the text decoded and searched.
    """

    def __init__(self, policy: Policy, stop: Sequence[str]) -> None:
        self.tokenizer: Any = policy.tokenizer
        self.stop = tuple(stop)
        self.ids = frozenset([*policy.eos_ids, *_special_stops(self.tokenizer, self.stop)])
        self.watch = _ids_with_last_character(self.tokenizer, self.stop)

    def end(self, token: int, so_far: Callable[[], Sequence[int]]) -> bool:
        """Whether a rollout that did not end before ends with this token. `so_far`: all its tokens, this one included;
        asked for only where the text has to be searched."""
        return token in self.ids or (token in self.watch and self._has_stop(so_far()))

    def _has_stop(self, ids: Sequence[int]) -> bool:
        text = self.tokenizer.decode(list(ids), skip_special_tokens=True)
        return any(stop in text for stop in self.stop)


@lru_cache(maxsize=8)
def _ids_with_last_character(tokenizer: Any, stop: tuple[str, ...]) -> frozenset[int]:
    last = {text[-1] for text in stop}
    if not last:
        return frozenset()
    pieces = tokenizer.batch_decode([[i] for i in range(len(tokenizer))])
    # U+FFFD: a token that holds part of a character of several bytes, which a later token completes
    return frozenset(i for i, piece in enumerate(pieces) if (last | {"\ufffd"}) & set(piece) or not piece)


def _special_stops(tokenizer: Any, stop: tuple[str, ...]) -> list[int]:
    """Stop strings that are special tokens: they end a rollout by their id, since decoding leaves them out."""
    special = set(getattr(tokenizer, "all_special_tokens", ()))  # those with a role; others are added and marked
    special |= {str(token) for token in getattr(tokenizer, "added_tokens_decoder", {}).values() if token.special}
    return [int(tokenizer.convert_tokens_to_ids(text)) for text in stop if text in special]
