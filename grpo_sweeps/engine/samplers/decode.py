"""The decode step of the graph sampler: one new token for each row, recorded once and replayed.

The forward is the model's own, called with a cache of slots and an attention that takes each row's length
(`attention.attend`). Both stand in only while the step is recorded. A replay runs the recorded kernels alone, on the
addresses that were recorded: weights may change in place, everything else is compared before each call of the sampler
(`state_of`).
"""

from __future__ import annotations

import itertools
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from grpo_sweeps.engine.gram.torch_private import recompilations
from grpo_sweeps.engine.policy import Policy
from grpo_sweeps.engine.samplers.attention import attend
from grpo_sweeps.engine.samplers.eager import cache_argument

log = logging.getLogger(__name__)

Recorder = Callable[[Callable[[], Tensor]], Callable[[], Tensor]]
"""Takes the step, which gives its logits, and gives what repeats it on the same addresses."""

ATTENTION = "grpo_sweeps_decode"
VARIANTS = 64  # of a compiled function: by size of the step, and by the shapes of a model's norms
UNKNOWN = ("s_aux", "position_bias")  # arguments of other models' attention that would change the result
SIZES = 4  # recordings that are kept; each holds its logits
ROUND_LENGTH = 64  # slots are a multiple of this long, so that a slightly longer prompt needs no new ones
COMPILED_ON = "cuda"
PROMPT_TOKENS = 16384  # read in one forward, padding counted
# What the model rounds to its dtype between two operators stays rounded.
COMPILED: dict[str, Any] = {"dynamic": False, "options": {"emulate_precision_casts": True}}


class SlotLayer(CacheLayerMixin):
    """Keys and values of one layer, (S, K, T, D): for each slot the T tokens that it may hold."""

    is_sliding = False  # windows are the attention's business: every slot is as long as the text
    is_compileable = True

    def __init__(self, keys_SKTD: Tensor, values_SKTE: Tensor, lengths_B: Tensor) -> None:
        super().__init__()
        self.keys, self.values, self.lengths, self.is_initialized = keys_SKTD, values_SKTE, lengths_B, True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing: the slots are there from the beginning."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """The new token's alone: the attention stores them and knows where the others are."""
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.keys.shape[2], 0

    def get_seq_length(self) -> Any:
        return self.lengths

    def get_max_length(self) -> int:
        return int(self.keys.shape[2])


class SlotCache(Cache):
    """The slots of all layers. It remembers the layer that was updated last: attention follows at once."""

    def __init__(self, layers: Sequence[SlotLayer]) -> None:
        super().__init__(layers=list(layers))
        self.layer = 0

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        self.layer = layer_idx
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)


@dataclass(frozen=True)
class Read:
    """Prompts that were read in one forward: their keys and values, (U, K, P, D) a layer, padded on the right."""

    layers: list[tuple[Tensor, Tensor]]


class DecodeStep:
    """S slots of T tokens, and the step that was recorded for b rows, for a few values of b.

    A row has a position among the rows and a slot: rows move up without moving their keys and values. Positions
    without a row work on a spare slot, since every row must see at least one key. A step of fewer rows is hardly
    faster, so that none is recorded for the last rows of a call (0.5B on an H200: 16 rows 1.39 ms, 128 rows 1.53 ms).

    Attributes:
        slots: how many rows there can be. length: how many tokens a slot holds.
    """

    def __init__(self, policy: Policy, slots: int, length: int, record: Recorder) -> None:
        self.policy, self.slots, self.record = policy, slots, record
        self.length = slot_length(length)
        device = policy.device
        self.tokens_B1 = torch.zeros((slots, 1), dtype=torch.long, device=device)
        self.lengths_B = torch.zeros(slots, dtype=torch.long, device=device)
        self.slots_B = torch.full((slots,), slots, dtype=torch.long, device=device)
        self._argument = cache_argument(policy.model)
        self._cache: SlotCache | None = None
        self._replays: dict[int, Callable[[], Tensor]] = {}
        self._state = state_of(policy)
        self._compiles = policy.device.type == COMPILED_ON

    def follow(self) -> str:
        """Forget what was recorded if it no longer holds; a word on what changed, empty where nothing did."""
        now = state_of(self.policy)
        changed = ", ".join(name for name, value in now.items() if value != self._state[name])
        if changed:
            used = bool(self._replays)
            self._replays.clear()
            self._cache, self._state = None, now
            return changed if used else ""
        return ""

    def read(self, prompts: Sequence[Sequence[int]]) -> Read:
        """Keys and values of all but the last token of each prompt: that one is the first that the step takes."""
        device = self.policy.device
        width = max(1, max(len(ids) - 1 for ids in prompts))
        padded = [[*ids[:-1], *[self.policy.pad_id] * (width - len(ids) + 1)] for ids in prompts]
        # a prompt of one token leaves nothing to read: its row is padding, and is not looked at
        mask = [[1] * max(1, len(ids) - 1) + [0] * (width - max(1, len(ids) - 1)) for ids in prompts]
        cache = DynamicCache()
        self.policy.model(
            input_ids=torch.tensor(padded, device=device),
            attention_mask=torch.tensor(mask, device=device),
            position_ids=torch.arange(width, device=device)[None].expand(len(prompts), -1),
            use_cache=True,
            logits_to_keep=1,
            **{self._argument: cache},
        )
        return Read([(layer.keys, layer.values) for layer in cache.layers])

    def fill(self, slots: Sequence[int], read: Read, prompts: Sequence[int]) -> None:
        """Copy the keys and values of the prompts of those numbers into slots."""
        if self._cache is None:
            self._cache = self._new_cache(read)
        into = torch.tensor(slots, device=self.policy.device)
        of = torch.tensor(prompts, device=self.policy.device)
        for layer, (keys, values) in zip(self._cache.layers, read.layers, strict=True):
            layer.keys[:, :, : keys.shape[2]].index_copy_(0, into, keys[of])
            layer.values[:, :, : values.shape[2]].index_copy_(0, into, values[of])

    def size(self, rows: int) -> int:
        """Rows of the smallest recorded step that serves so many; as many where there is none yet."""
        return min((b for b in self._replays if b >= rows), default=rows)

    def place(self, b: int, tokens_B: np.ndarray, lengths_B: np.ndarray, slots_B: np.ndarray) -> None:
        """Put rows at the first of b positions: the token that each takes next, how many its slot holds, its slot."""
        B = len(tokens_B)
        state = np.zeros((3, b), dtype=np.int64)
        state[:, :B] = tokens_B, lengths_B, slots_B
        state[2, B:] = self.slots
        on_device = torch.from_numpy(state).to(self.policy.device)
        self.tokens_B1[:b, 0].copy_(on_device[0])
        self.lengths_B[:b].copy_(on_device[1])
        self.slots_B[:b].copy_(on_device[2])

    def run(self, b: int) -> Tensor:
        """(b, V) logits after the rows' next tokens. They stay until the step runs again."""
        if b not in self._replays:
            if len(self._replays) == SIZES:
                del self._replays[min(self._replays)]
            self._replays[b] = self._recorded(b)
        return self._replays[b]()

    def take(self, tokens_B: Tensor) -> None:
        """The tokens of the first rows that the step takes next."""
        self.tokens_B1[: len(tokens_B), 0].copy_(tokens_B)

    def _new_cache(self, read: Read) -> SlotCache:
        def slots(like: Tensor) -> Tensor:  # zeros, never garbage: what is not seen is multiplied by 0
            return like.new_zeros(self.slots + 1, like.shape[1], self.length, like.shape[3])

        return SlotCache([SlotLayer(slots(keys), slots(values), self.lengths_B) for keys, values in read.layers])

    def _recorded(self, b: int) -> Callable[[], Tensor]:
        """Recording runs the step: on the spare slot, so that no row sees it."""
        rows = self.tokens_B1[:b], self.lengths_B[:b], self.slots_B[:b]
        kept = [x.clone() for x in rows]
        try:
            return self._recorded_compiled(b) or self._recorded_plain(b)
        finally:
            for x, was in zip(rows, kept, strict=True):
                x.copy_(was)

    def _recorded_plain(self, b: int) -> Callable[[], Tensor]:
        none = np.zeros(0, dtype=np.int64)
        self.place(b, none, none, none)
        with self._stand_ins():
            return self.record(lambda: self._forward(b))

    def _recorded_compiled(self, b: int) -> Callable[[], Tensor] | None:
        """None where it is not compiled, or cannot be: then the log has said why."""
        if not self._compiles:
            return None
        try:
            with compiled_regions(self.policy.model):
                return self._recorded_plain(b)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # a compiler that is missing, or a module that it cannot take
            self._compiles = False
            line = (str(error).strip().splitlines() or [""])[0]
            log.warning("the decode step is not compiled, and slower (%s: %s)", type(error).__name__, line)
            return None

    def _forward(self, b: int) -> Tensor:
        lengths_B = self.lengths_B[:b]
        logits_B1V: Tensor = self.policy.model(
            input_ids=self.tokens_B1[:b],
            position_ids=lengths_B[:, None],
            use_cache=True,
            **{self._argument: self._cache},
        ).logits
        lengths_B.add_(1)
        return logits_B1V[:, -1]

    @contextmanager
    def _stand_ins(self) -> Iterator[None]:
        """The model attends to slots inside; afterwards it is as it was."""
        model = self.policy.model
        configs = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}
        before = {key: config._attn_implementation for key, config in configs.items()}
        with ExitStack() as stack:
            ALL_ATTENTION_FUNCTIONS[ATTENTION] = self._attention
            stack.callback(lambda: ALL_ATTENTION_FUNCTIONS.pop(ATTENTION))
            for key, config in configs.items():
                config._attn_implementation = ATTENTION
                stack.callback(setattr, config, "_attn_implementation", before[key])
            yield

    def _attention(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        sliding_window: int | None = None,
        softcap: float | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """transformers' attention interface, for one query token a row; (B, 1, H, D)."""
        if unknown := [name for name in UNKNOWN if kwargs.get(name) is not None]:
            raise NotImplementedError(f"attention with {', '.join(unknown)} is not known to the graph engine")
        cache = self._cache
        assert cache is not None and attention_mask is None and query.shape[2] == 1
        layer, b = cache.layers[cache.layer], len(query)
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        out_BHD = attend(
            query[:, :, 0], key[:, :, 0], value[:, :, 0], layer.keys, layer.values,
            self.slots_B[:b], self.lengths_B[:b], scale, sliding_window, softcap,
        )  # fmt: skip
        return out_BHD[:, None], None


def slot_length(tokens: int) -> int:
    return -(-tokens // ROUND_LENGTH) * ROUND_LENGTH


def slot_bytes(policy: Policy, tokens: int) -> int:
    """What a slot for so many tokens takes: keys and values of all layers."""
    config = policy.model.config.get_text_config(decoder=True)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * int(config.num_hidden_layers) * heads * size * slot_length(tokens) * policy.model.dtype.itemsize


def state_of(policy: Policy) -> dict[str, Any]:
    """What a recording stands on beside the values of the weights, by name."""
    model = policy.model
    tensors = itertools.chain(model.parameters(), model.buffers())
    adapters = [
        (tuple(m.active_adapters), m.disable_adapters, m.merged, tuple(m.scaling.items())) for m in lora_layers(model)
    ]
    return {
        "the weights' place or dtype": [(t.data_ptr(), t.dtype) for t in tensors],
        "the attention": model.config._attn_implementation,
        "the adapters": adapters,
    }


def lora_layers(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "merged")]


@contextmanager
def compiled_regions(model: nn.Module) -> Iterator[None]:
    """Norms, MLPs and the rotary function run compiled inside, and as they were afterwards.

    A compiled forward that stayed would not be measured by GradientGram, and would change log-probabilities in silence.
    """
    kinds = ("RMSNorm", "LayerNorm1P") if lora_layers(model) else ("RMSNorm", "LayerNorm1P", "MLP")
    compiled: dict[type, Callable[..., Any]] = {}
    with ExitStack() as stack:
        stack.enter_context(recompilations(VARIANTS))
        for module in model.modules():
            kind = type(module)
            if not kind.__name__.endswith(kinds) or "forward" in vars(module):
                continue
            if kind not in compiled:
                compiled[kind] = torch.compile(kind.forward, **COMPILED)
            module.forward = compiled[kind].__get__(module)
            stack.callback(delattr, module, "forward")
        for source in {sys.modules[type(m).__module__] for m in model.modules()}:
            rotary = getattr(source, "apply_rotary_pos_emb", None)
            if rotary is not None:
                source.apply_rotary_pos_emb = torch.compile(rotary, **COMPILED)  # type: ignore[attr-defined]
                stack.callback(setattr, source, "apply_rotary_pos_emb", rotary)
        yield


def cuda_graph(step: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """The step as a CUDA graph: kernels and addresses as they were at the recording, one launch for all of them."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # what is set up or compiled at a first call must not be part of the recording
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    # other threads of the process, such as a tracker's, may use the device meanwhile
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        logits_BV = step()

    def replay() -> Tensor:
        graph.replay()
        return logits_BV

    return replay
