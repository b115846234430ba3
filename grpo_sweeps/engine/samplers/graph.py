"""Samples rollouts with a decode step that was recorded as a CUDA graph: the card never waits for Python.

Rows sit in slots, each with its own length. Every few tokens the host looks at what was drawn: rows that ended leave,
and the next ones take their slots. A prompt is read once, however many rows have it. The draw is `eager`'s own, so that
the same logits give the same tokens.
"""

from __future__ import annotations

import logging
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from grpo_sweeps.config import RolloutConfig
from grpo_sweeps.engine.device_memory import allowed_bytes
from grpo_sweeps.engine.policy import Policy, evaluating
from grpo_sweeps.engine.rollouts import Rollout, completion_text
from grpo_sweeps.engine.samplers.decode import PROMPT_TOKENS, DecodeStep, Read, Recorder, cuda_graph, slot_bytes
from grpo_sweeps.engine.samplers.draw import draw, uniforms
from grpo_sweeps.engine.samplers.endings import Endings
from grpo_sweeps.engine.samplers.served import why_not_served
from grpo_sweeps.types import ConfigError

log = logging.getLogger(__name__)

LOOK = 16  # tokens between two looks of the host
CACHE_SHARE = 0.1  # of the card's memory: slots stay for the run, beside the weights, their moments and activations


class GraphSampler:
    """For the models of `served.SERVED` on a CUDA GPU; see `SamplerEngine`."""

    name = "graph"
    refills = True

    def __init__(self, policy: Policy, record: Recorder | None = None) -> None:
        """Raises ConfigError for a policy that is not served, with the reason. `record`: for tests without a GPU."""
        if reason := why_not_served(policy, on_gpu=record is None):
            raise ConfigError(f"rollout.engine=graph: {reason}; choose auto or eager")
        self.policy, self.record = policy, record or cuda_graph
        self.step: DecodeStep | None = None

    @torch.no_grad()
    def sample(
        self,
        prompt_ids: Sequence[Sequence[int]],
        seeds: Sequence[int],
        config: RolloutConfig,
        stop: Sequence[str] = (),
        greedy: bool = False,
        share_prompts: bool = False,
    ) -> list[Rollout]:
        """One completion for each row of `prompt_ids`; see `SamplerEngine.sample`.

        At most `config.batch` rows at a time, and no more than fit in CACHE_SHARE of the card. Prompts are always read
        once.
        """
        if not len(prompt_ids):
            return []
        prompts = [tuple(ids) for ids in prompt_ids]
        longest = max(map(len, prompts)) + config.max_new_tokens + LOOK
        rows = min(config.batch, len(prompts), self._room(longest))
        drawn_BT = None if greedy else uniforms(seeds, config.max_new_tokens)
        with evaluating(self.policy.model), _current(self.policy.device):
            step = self._step_for(rows, longest)
            return _Call(self.policy, step, rows, prompts, drawn_BT, config, Endings(self.policy, stop)).run()

    def _room(self, longest: int) -> int:
        """How many rows of so many tokens the share of the card holds that slots may take; one at least."""
        if self.policy.device.type != "cuda":
            return sys.maxsize
        share = int(CACHE_SHARE * allowed_bytes(self.policy.device))
        return max(1, share // slot_bytes(self.policy, longest) - 1)  # one is the spare slot

    def _step_for(self, rows: int, longest: int) -> DecodeStep:
        """The step that was recorded, where it is large enough and still holds; else a new one."""
        step = self.step
        if step is None or step.slots < rows or step.length < longest:
            self.step = None  # the old slots go before the new ones come
            length = max(longest, step.length) if step else longest
            slots = max(rows, min(step.slots, self._room(length))) if step else rows
            del step
            self.step = step = DecodeStep(self.policy, slots, length, self.record)
        elif changed := step.follow():
            log.info("the decode step is recorded anew, since %s changed", changed)
        return step


class _Call:
    """The rows of one call of the sampler, from the first prompt read to the last row ended.

    N rows in all, `rows` of them in slots at a time, by a step for b. `live` are the numbers of those, in the order of
    their positions. Arrays over the tokens have room for a look past the limit: what is drawn there is not kept.
    """

    def __init__(
        self,
        policy: Policy,
        step: DecodeStep,
        rows: int,
        prompts: list[tuple[int, ...]],
        uniforms_NT: np.ndarray | None,
        config: RolloutConfig,
        endings: Endings,
    ) -> None:
        self.policy, self.step, self.config, self.endings = policy, step, config, endings
        self.b = step.size(rows)
        self.prompts, N, limit = prompts, len(prompts), config.max_new_tokens
        self.uniforms_NT = None if uniforms_NT is None else np.pad(uniforms_NT, ((0, 0), (0, LOOK)))
        self.tokens_NT = np.zeros((N, limit + LOOK), dtype=np.int64)
        self.logprobs_NT = np.zeros((N, limit + LOOK), dtype=np.float32)
        self.drawn_N = np.zeros(N, dtype=np.int64)  # tokens so far
        self.slots_N = np.zeros(N, dtype=np.int64)
        self.next_N = np.array([ids[-1] for ids in prompts], dtype=np.int64)  # the token that is taken next
        self.held_N = np.array([len(ids) - 1 for ids in prompts], dtype=np.int64)  # those before it, in the slot
        self.by_itself = np.zeros(N, dtype=bool)  # rows that ended before the limit, or with it
        self.waiting, self.free = deque(range(N)), deque(range(rows))
        self.live = np.zeros(0, dtype=np.int64)
        self.read: dict[tuple[int, ...], tuple[Read, int]] = {}
        special = endings.ids | endings.watch
        self.special = np.fromiter(special, dtype=np.int64, count=len(special))

    def run(self) -> list[Rollout]:
        while self.waiting or len(self.live):
            self._admit()
            self._keep(*self._draw())
        return [self._rollout(i) for i in range(len(self.prompts))]

    def _admit(self) -> None:
        """Waiting rows take the free slots, with the keys and values of their prompts."""
        new = [self.waiting.popleft() for _ in range(min(len(self.free), len(self.waiting)))]
        if not new:
            return
        self._read([p for p in dict.fromkeys(self.prompts[i] for i in new) if p not in self.read])
        by_read: dict[int, list[int]] = {}
        for i in new:
            self.slots_N[i] = self.free.popleft()
            by_read.setdefault(id(self.read[self.prompts[i]][0]), []).append(i)
        for rows in by_read.values():
            read = self.read[self.prompts[rows[0]]][0]
            self.step.fill(self.slots_N[rows].tolist(), read, [self.read[self.prompts[i]][1] for i in rows])
        following = self.prompts[self.waiting[0]] if self.waiting else None  # rows of a prompt stand together
        self.read = {prompt: read for prompt, read in self.read.items() if prompt == following}
        self.live = np.concatenate([self.live, np.array(new)])

    def _read(self, prompts: list[tuple[int, ...]]) -> None:
        """Read prompts, so many at once that a forward stays within `PROMPT_TOKENS`."""
        for part in _parts(prompts, PROMPT_TOKENS):
            read = self.step.read(part)
            self.read.update({prompt: (read, i) for i, prompt in enumerate(part)})

    def _draw(self) -> tuple[np.ndarray, np.ndarray]:
        """The next tokens of the live rows, (B, n), and their log-probabilities; n is at most `LOOK`."""
        live, b = self.live, self.b
        B, n = len(live), min(LOOK, self.config.max_new_tokens - int(self.drawn_N[live].min()))
        uniforms_BT = None
        if self.uniforms_NT is not None:
            found = self.uniforms_NT[live[:, None], self.drawn_N[live][:, None] + np.arange(n)]
            uniforms_BT = torch.from_numpy(found).to(self.policy.device)
        self.step.place(b, self.next_N[live], self.held_N[live], self.slots_N[live])
        tokens, logprobs = list[Tensor](), list[Tensor]()
        for t in range(n):
            logits_BV = self.step.run(b)[:B]
            at_t = None if uniforms_BT is None else uniforms_BT[:, t : t + 1]
            next_B, logprobs_B = draw(logits_BV, at_t, self.config.temperature)
            self.step.take(next_B)
            tokens.append(next_B)
            logprobs.append(logprobs_B)
        return torch.stack(tokens, 1).cpu().numpy(), torch.stack(logprobs, 1).cpu().numpy()

    def _keep(self, tokens_BT: np.ndarray, logprobs_BT: np.ndarray) -> None:
        """Each live row keeps its tokens up to its end; rows that ended leave their slots."""
        live, n, limit = self.live, tokens_BT.shape[1], self.config.max_new_tokens
        before_B = self.drawn_N[live]
        columns = live[:, None], before_B[:, None] + np.arange(n)
        self.tokens_NT[columns], self.logprobs_NT[columns] = tokens_BT, logprobs_BT
        self.drawn_N[live] = np.minimum(before_B + n, limit)
        self.next_N[live] = tokens_BT[:, -1]
        self.held_N[live] += n
        ended_B = self.drawn_N[live] == limit
        special_BT = np.isin(tokens_BT, self.special)
        for position in np.flatnonzero(special_BT.any(axis=1)):
            ended_B[position] |= self._cut(live[position], before_B[position] + np.flatnonzero(special_BT[position]))
        for i in live[ended_B]:
            self.free.append(int(self.slots_N[i]))
        self.live = live[~ended_B]

    def _cut(self, i: int, candidates: np.ndarray) -> bool:
        """Whether row i ends at one of these of its tokens; what it drew after that is forgotten."""
        for t in candidates:
            token = int(self.tokens_NT[i, t])
            if t < self.drawn_N[i] and self.endings.end(token, self.tokens_NT[i, : t + 1].tolist):
                self.drawn_N[i], self.by_itself[i] = t + 1, True
                return True
        return False

    def _rollout(self, i: int) -> Rollout:
        ids = self.tokens_NT[i, : self.drawn_N[i]].tolist()
        text = completion_text(self.policy.tokenizer, ids, self.endings.stop)
        logprobs_T = self.logprobs_NT[i, : len(ids)].copy()
        return Rollout(self.prompts[i], tuple(ids), text, logprobs_T, not self.by_itself[i])


def _parts(prompts: list[tuple[int, ...]], tokens: int) -> Iterator[list[tuple[int, ...]]]:
    part: list[tuple[int, ...]] = []
    for prompt in prompts:
        if part and max(map(len, [*part, prompt])) * (len(part) + 1) > tokens:
            yield part
            part = []
        part.append(prompt)
    if part:
        yield part


def _current(device: torch.device) -> AbstractContextManager[Any]:
    """Streams, graphs and Triton's launches are of the current device."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
