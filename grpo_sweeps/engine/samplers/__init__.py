"""Engines that draw rollouts: the `SamplerEngine` protocol, and how `rollout.engine` chooses one.

`eager` samples every model, with transformers' own forward and cache. `graph` replays a recorded decode step on a CUDA
GPU, several times as fast, for the architectures of `served.SERVED`. `auto` is `graph` where that serves the policy,
else `eager`. Any other is a class by its dotted path, without a change to the package:

    python -m grpo_sweeps.run R=4 rollout.engine=my_module.MySampler
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from grpo_sweeps.config import RolloutConfig
from grpo_sweeps.config.functions import SAMPLERS, sampler_class
from grpo_sweeps.engine.samplers.served import why_not_served
from grpo_sweeps.types import ConfigError

if TYPE_CHECKING:
    from grpo_sweeps.engine.policy import Policy
    from grpo_sweeps.engine.rollouts import Rollout

log = logging.getLogger(__name__)


class SamplerEngine(Protocol):
    """Draws completions of a policy. The class is called with the `Policy`, once per run, before the first step.

    The policy's weights change in place between two calls of `sample`: what an engine derives from them it derives
    again. An engine is no part of a run's identity. So it draws the same tokens as `eager` from the same logits: row i
    draws uniform numbers u_0, u_1, ... from `np.random.Generator(np.random.Philox(seeds[i])).random(max_new_tokens)`,
    and token t is the first of which the cumulative probability exceeds u_t of the whole. It leaves the model in the
    mode, train or eval, in which it found it. Everything that samples goes through it: training, evaluation,
    continuations and `credit`.

    Attributes:
        name: what the engine is called in sentences and in records, one word ("eager").
        refills: optional; True for an engine in which rows that wait take the places of rows that have ended, so that
            one call with many rows is faster than several.
    """

    name: str

    def sample(
        self,
        prompt_ids: Sequence[Sequence[int]],
        seeds: Sequence[int],
        config: RolloutConfig,
        stop: Sequence[str] = (),
        greedy: bool = False,
        share_prompts: bool = False,
    ) -> list[Rollout]:
        """One completion per row of `prompt_ids`.

        Args:
            prompt_ids: token ids of each row's prompt; a prompt is repeated for several rollouts.
            seeds: one per row, see `rollouts.row_seed`; not used with `greedy`.
            config: the temperature, the longest completion, and how many rows may be sampled at once.
            stop: strings that end a completion; the tokens up to the one that completes the string belong to it.
            greedy: take the most probable token instead of sampling.
            share_prompts: several rows have one prompt, which may be read once: the same up to rounding.

        Returns:
            The rollouts, in the order of the rows, each with the log-probabilities of its tokens at the sampling
            temperature.
        """


def load(engine: str, policy: Policy) -> SamplerEngine:
    """The engine that `rollout.engine` names, made for a policy. What an engine outside the package draws is checked.

    Raises:
        ConfigError: when the class cannot be imported, has no `sample`, or cannot be called with the policy; for
            `graph` with a policy that it does not serve.
    """
    if engine == "auto":
        engine = _best_for(policy)
    cls = sampler_class(engine)
    try:
        made: SamplerEngine = cls(policy)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"rollout.engine={engine}: no sampler can be made of it ({type(error).__name__}: {error}); a class that "
            f"takes a Policy is needed"
        ) from error
    return made if engine in SAMPLERS else Checked(engine, made)


def _best_for(policy: Policy) -> str:
    """What `auto` is: `graph` where it serves the policy. On a GPU the log says why not, where it does not."""
    reason = why_not_served(policy)
    if reason and policy.device.type == "cuda":
        log.info("rollouts are sampled by the eager engine, not by graph: %s", reason)
    return "eager" if reason else "graph"


class Checked:
    """An engine of a user's own: what it returns is compared with what was asked for, where it arrives."""

    def __init__(self, path: str, engine: SamplerEngine) -> None:
        self.path, self.engine = path, engine
        self.name = str(getattr(engine, "name", path))
        self.refills = bool(getattr(engine, "refills", False))

    def sample(
        self,
        prompt_ids: Sequence[Sequence[int]],
        seeds: Sequence[int],
        config: RolloutConfig,
        stop: Sequence[str] = (),
        greedy: bool = False,
        share_prompts: bool = False,
    ) -> list[Rollout]:
        """As the engine's own. Raises ValueError for rollouts that cannot be of these rows."""
        drawn = self.engine.sample(prompt_ids, seeds, config, stop, greedy, share_prompts)
        said = f"rollout.engine={self.path}"
        if len(drawn) != len(prompt_ids):
            raise ValueError(f"{said}: {len(drawn)} rollouts came back for {len(prompt_ids)} rows")
        for row, (prompt, one) in enumerate(zip(prompt_ids, drawn, strict=True)):
            if tuple(one.prompt_ids) != tuple(prompt):
                raise ValueError(f"{said}: rollout {row} is of another prompt than its row")
            if not 1 <= one.length <= config.max_new_tokens or len(one.logprobs) != one.length:
                raise ValueError(
                    f"{said}: rollout {row} has {one.length} tokens and {len(one.logprobs)} log-probabilities; as many "
                    f"of each are needed, from 1 to rollout.max_new_tokens={config.max_new_tokens}"
                )
        return drawn
