"""Samples rollouts token by token with transformers' own forward and a key-value cache.

A token is the inverse of the cumulative distribution at the next uniform number of its row. Which other rows share the
batch therefore cannot change a sample, other than through the rounding of the logits.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from grpo_sweeps.config import RolloutConfig
from grpo_sweeps.engine.policy import Policy, evaluating
from grpo_sweeps.engine.rollouts import Rollout, completion_text
from grpo_sweeps.engine.samplers.draw import draw, uniforms
from grpo_sweeps.engine.samplers.endings import Endings

COMPACT_BELOW = 0.75  # finished rows leave the batch once fewer than this share of it is still running


class EagerSampler:
    """Takes every model that transformers generates with; see `SamplerEngine`."""

    name = "eager"

    def __init__(self, policy: Policy) -> None:
        self.policy = policy

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
        """One completion for each row of `prompt_ids`, `config.batch` rows at a time; see `SamplerEngine.sample`."""
        policy = self.policy
        with evaluating(policy.model):
            rollouts: list[Rollout] = []
            for start in range(0, len(prompt_ids), config.batch):
                rows = slice(start, start + config.batch)
                rollouts += _Batch(policy, prompt_ids[rows], seeds[rows], config, stop, greedy).run(share_prompts)
            return rollouts


class _Batch:
    """The rows that are sampled together. `alive` maps the rows still in the tensors to the rows of the batch."""

    def __init__(
        self,
        policy: Policy,
        prompt_ids: Sequence[Sequence[int]],
        seeds: Sequence[int],
        config: RolloutConfig,
        stop: Sequence[str],
        greedy: bool,
    ) -> None:
        self.policy, self.config, self.greedy = policy, config, greedy
        self.endings = Endings(policy, stop)
        self.prompts = [tuple(ids) for ids in prompt_ids]
        B, limit, device = len(self.prompts), config.max_new_tokens, policy.device
        self.uniforms_BT = torch.from_numpy(uniforms(seeds, limit)).to(device)
        self.tokens_BT = torch.full((B, limit), policy.pad_id, dtype=torch.long, device=device)
        self.logprobs_BT = torch.zeros((B, limit), dtype=torch.float32, device=device)
        self.lengths = [limit] * B
        self.stopped = [False] * B
        self.alive = torch.arange(B, device=device)

    def run(self, share_prompts: bool = False) -> list[Rollout]:
        prompts = list(dict.fromkeys(self.prompts)) if share_prompts else self.prompts
        longest = max(len(ids) for ids in prompts)
        padded = [[self.policy.pad_id] * (longest - len(ids)) + list(ids) for ids in prompts]
        mask = [[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompts]
        device = self.policy.device
        inputs, mask_BT = torch.tensor(padded, device=device), torch.tensor(mask, device=device)
        position_ids = (mask_BT.cumsum(1) - 1).clamp(min=0)
        cache = DynamicCache()
        cached = {cache_argument(self.policy.model): cache}
        for t in range(self.config.max_new_tokens):
            logits_BV = self.policy.model(
                input_ids=inputs,
                attention_mask=mask_BT,
                position_ids=position_ids,
                use_cache=True,
                logits_to_keep=1,
                **cached,
            ).logits[:, -1]
            if len(logits_BV) < len(self.alive):  # prompts that were read once become rows of their own
                number = {ids: i for i, ids in enumerate(prompts)}
                rows = torch.tensor([number[ids] for ids in self.prompts], device=device)
                cache.batch_select_indices(rows)
                logits_BV, mask_BT, position_ids = logits_BV[rows], mask_BT[rows], position_ids[rows]
            next_B = self._draw(logits_BV, t)
            keep = self._still_running(next_B, t)
            if len(keep) == 0:
                break
            inputs, position_ids = next_B[:, None], position_ids[:, -1:] + 1
            mask_BT = torch.cat([mask_BT, torch.ones_like(mask_BT[:, :1])], dim=1)
            if len(keep) < COMPACT_BELOW * len(self.alive):
                cache.batch_select_indices(keep)
                inputs, mask_BT, position_ids, self.alive = (
                    inputs[keep],
                    mask_BT[keep],
                    position_ids[keep],
                    self.alive[keep],
                )
        return self._rollouts()

    def _draw(self, logits_BV: Tensor, t: int) -> Tensor:
        """Next token of every row still in the tensors, stored with its log-probability."""
        uniforms_B1 = None if self.greedy else self.uniforms_BT[self.alive, t : t + 1]
        next_B, logprobs_B = draw(logits_BV, uniforms_B1, self.config.temperature)
        self.tokens_BT[self.alive, t] = next_B
        self.logprobs_BT[self.alive, t] = logprobs_B
        return next_B

    def _still_running(self, next_B: Tensor, t: int) -> Tensor:
        """Positions (in the current tensors) of rows that go on; the others get their length."""
        tokens = next_B.tolist()
        running = []
        for position, row in enumerate(self.alive.tolist()):
            if self.stopped[row]:
                continue
            if self.endings.end(tokens[position], partial(self._tokens, row, t + 1)):
                self.stopped[row], self.lengths[row] = True, t + 1
            else:
                running.append(position)
        return torch.tensor(running, dtype=torch.long, device=next_B.device)

    def _tokens(self, row: int, number: int) -> list[int]:
        """The first tokens of a row."""
        return self.tokens_BT[row, :number].tolist()

    def _rollouts(self) -> list[Rollout]:
        tokens, logprobs = self.tokens_BT.cpu(), self.logprobs_BT.cpu().numpy()
        rollouts = []
        for row, (prompt, length) in enumerate(zip(self.prompts, self.lengths, strict=True)):
            ids = tuple(tokens[row, :length].tolist())
            text = completion_text(self.policy.tokenizer, ids, self.endings.stop)
            rollouts.append(Rollout(prompt, ids, text, logprobs[row, :length].copy(), not self.stopped[row]))
        return rollouts


def cache_argument(model: torch.nn.Module) -> str:
    """transformers renames `past_key_values` to `cache` in the course of its version 5."""
    base: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]  # peft
    return "cache" if "cache" in inspect.signature(base.forward).parameters else "past_key_values"
