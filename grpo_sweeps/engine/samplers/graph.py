"""Samples rollouts with a decode step that was recorded as a CUDA graph: the card never waits for Python.

Rows sit in slots, each with its own length. Every few tokens the host looks at what was drawn: rows that ended leave,
and the next ones take their slots. A prompt is read once, however many rows have it. The draw is `eager`'s own, so that
the same logits give the same tokens.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

from grpo_sweeps.config import RolloutConfig
from grpo_sweeps.engine.policy import Policy
from grpo_sweeps.engine.rollouts import Rollout, completion_text
from grpo_sweeps.engine.samplers.decode import PROMPT_TOKENS, DecodeStep, Read, Recorder, cuda_graph
from grpo_sweeps.engine.samplers.draw import draw, uniforms
from grpo_sweeps.engine.samplers.endings import Endings
from grpo_sweeps.engine.samplers.served import why_not_served
from grpo_sweeps.types import ConfigError

log = logging.getLogger(__name__)

LOOK = 8  # tokens between two looks of the host


@dataclass
class _Row:
    """One rollout in the making."""

    number: int
    prompt: tuple[int, ...]
    uniforms: np.ndarray
    slot: int = -1
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    @property
    def next_token(self) -> int:
        return self.ids[-1] if self.ids else self.prompt[-1]

    @property
    def held(self) -> int:
        """Tokens in the row's slot: all but the one that is taken next."""
        return len(self.prompt) + len(self.ids) - 1


class GraphSampler:
    """For the models of `served.SERVED` on a CUDA GPU; see `SamplerEngine`."""

    name = "graph"

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
        """One completion for each row of `prompt_ids`, at most `config.batch` at a time; see `SamplerEngine.sample`.

        Prompts are always read once.
        """
        if not len(prompt_ids):
            return []
        drawn = np.zeros((len(seeds), config.max_new_tokens)) if greedy else uniforms(seeds, config.max_new_tokens)
        rows = [_Row(i, tuple(ids), u) for i, (ids, u) in enumerate(zip(prompt_ids, drawn, strict=True))]
        longest = max(len(row.prompt) for row in rows) + config.max_new_tokens + LOOK
        with _evaluating(self.policy.model):
            step = self._step_for(min(config.batch, len(rows)), longest)
            return _Call(self.policy, step, rows, config, Endings(self.policy, stop), greedy).run()

    def _step_for(self, rows: int, longest: int) -> DecodeStep:
        """The step that was recorded, where it is large enough and still holds; else a new one."""
        step = self.step
        if step is None or step.slots < rows or step.length < longest:
            self.step = None  # the old slots go before the new ones come
            slots, length = (max(rows, step.slots), max(longest, step.length)) if step else (rows, longest)
            del step
            self.step = step = DecodeStep(self.policy, slots, length, self.record)
        elif changed := step.follow(self.policy):
            log.info("the decode step is recorded anew, since %s changed", changed)
        return step


class _Call:
    """The rows of one call of the sampler, from the first prompt read to the last row ended."""

    def __init__(
        self,
        policy: Policy,
        step: DecodeStep,
        rows: list[_Row],
        config: RolloutConfig,
        endings: Endings,
        greedy: bool,
    ) -> None:
        self.policy, self.step, self.config, self.endings, self.greedy = policy, step, config, endings, greedy
        self.waiting = deque(rows)
        self.unread = Counter(row.prompt for row in rows)  # how many rows still wait for each prompt
        self.read: dict[tuple[int, ...], tuple[Read, int]] = {}
        self.free = list(range(step.slots))
        self.live: list[_Row] = []
        self.rollouts: dict[int, Rollout] = {}
        special = endings.ids | endings.watch
        self.special = np.fromiter(special, dtype=np.int64, count=len(special))

    def run(self) -> list[Rollout]:
        while self.waiting or self.live:
            self._admit()
            tokens_BT, logprobs_BT = self._draw_some()
            self._look(tokens_BT, logprobs_BT)
        return [self.rollouts[number] for number in sorted(self.rollouts)]

    def _admit(self) -> None:
        """Waiting rows take the free slots, with the keys and values of their prompts."""
        new = [self.waiting.popleft() for _ in range(min(len(self.free), len(self.waiting)))]
        if not new:
            return
        self._read([p for p in dict.fromkeys(row.prompt for row in new) if p not in self.read])
        by_read: dict[int, list[_Row]] = {}
        for row in new:
            row.slot = self.free.pop()
            by_read.setdefault(id(self.read[row.prompt][0]), []).append(row)
        for rows in by_read.values():
            read = self.read[rows[0].prompt][0]
            self.step.fill([row.slot for row in rows], read, [self.read[row.prompt][1] for row in rows])
        self.unread.subtract(row.prompt for row in new)
        for prompt in {row.prompt for row in new if not self.unread[row.prompt]}:
            del self.read[prompt]
        self.live += new

    def _read(self, prompts: list[tuple[int, ...]]) -> None:
        """Read prompts, so many at once that a forward stays within `PROMPT_TOKENS`."""
        for part in _parts(prompts, PROMPT_TOKENS):
            read = self.step.read(part)
            self.read.update({prompt: (read, i) for i, prompt in enumerate(part)})

    def _draw_some(self) -> tuple[np.ndarray, np.ndarray]:
        """The next tokens of the live rows, (B, n), and their log-probabilities, for n up to `LOOK`."""
        rows, limit = self.live, self.config.max_new_tokens
        B, n = len(rows), min(LOOK, limit - min(len(row.ids) for row in rows))
        b = self.step.size(B)
        self.step.place(b, [r.next_token for r in rows], [r.held for r in rows], [r.slot for r in rows])
        uniforms_BT = None if self.greedy else self._uniforms(rows, n)
        tokens, logprobs = list[Tensor](), list[Tensor]()
        for t in range(n):
            logits_BV = self.step.run(b)[:B]
            at_t = None if uniforms_BT is None else uniforms_BT[:, t : t + 1]
            next_B, logprobs_B = draw(logits_BV, at_t, self.config.temperature)
            self.step.take(next_B)
            tokens.append(next_B)
            logprobs.append(logprobs_B)
        return torch.stack(tokens, 1).cpu().numpy(), torch.stack(logprobs, 1).cpu().numpy()

    def _uniforms(self, rows: list[_Row], n: int) -> Tensor:
        """(B, n) the rows' next uniform numbers; zeros past the limit, whose tokens are not kept."""
        found = np.zeros((len(rows), n))
        for i, row in enumerate(rows):
            some = row.uniforms[len(row.ids) : len(row.ids) + n]
            found[i, : len(some)] = some
        return torch.from_numpy(found).to(self.policy.device)

    def _look(self, tokens_BT: np.ndarray, logprobs_BT: np.ndarray) -> None:
        """Each row keeps its tokens up to its end; rows that ended leave their slots."""
        special_BT = np.isin(tokens_BT, self.special)
        live = []
        for row, tokens_T, logprobs_T, special_T in zip(self.live, tokens_BT, logprobs_BT, special_BT, strict=True):
            before = len(row.ids)
            row.ids += tokens_T[: self.config.max_new_tokens - before].tolist()
            ends = (before + int(t) + 1 for t in np.flatnonzero(special_T) if before + t < len(row.ids))
            end = next((end for end in ends if self.endings.end(row.ids[:end])), None)
            if end is not None:
                del row.ids[end:]
            row.logprobs += logprobs_T[: len(row.ids) - before].tolist()
            if end is None and len(row.ids) < self.config.max_new_tokens:
                live.append(row)
            else:
                self._finish(row, truncated=end is None)
        self.live = live

    def _finish(self, row: _Row, truncated: bool) -> None:
        self.free.append(row.slot)
        text = completion_text(self.policy.tokenizer, row.ids, self.endings.stop)
        logprobs_T = np.array(row.logprobs, dtype=np.float32)
        self.rollouts[row.number] = Rollout(row.prompt, tuple(row.ids), text, logprobs_T, truncated)


def _parts(prompts: list[tuple[int, ...]], tokens: int) -> Iterator[list[tuple[int, ...]]]:
    part: list[tuple[int, ...]] = []
    for prompt in prompts:
        if part and max(map(len, [*part, prompt])) * (len(part) + 1) > tokens:
            yield part
            part = []
        part.append(prompt)
    if part:
        yield part


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)
