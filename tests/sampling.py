"""One call of the eager sampler, for tests that need rollouts of a policy and no run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from grpo_sweeps.engine.policy import Policy
from grpo_sweeps.engine.rollouts import Rollout
from grpo_sweeps.engine.samplers.eager import EagerSampler


def sample(
    policy: Policy, prompt_ids: Sequence[Sequence[int]], seeds: Sequence[int], *rest: Any, **named: Any
) -> list[Rollout]:
    """What the run's sampler draws; see `SamplerEngine.sample`."""
    return EagerSampler(policy).sample(prompt_ids, seeds, *rest, **named)
