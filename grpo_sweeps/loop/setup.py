"""Everything a run needs, built from its configuration before the first step."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from grpo_sweeps.config import RunConfig
from grpo_sweeps.config.checks import check_data
from grpo_sweeps.config.functions import load_estimator, load_function, load_own_metrics
from grpo_sweeps.engine import samplers
from grpo_sweeps.engine.allocator import grow_segments
from grpo_sweeps.engine.critic import Critic
from grpo_sweeps.engine.gram import GradientGram
from grpo_sweeps.engine.head import causal_model, output_head
from grpo_sweeps.engine.optim import MasterAdamW
from grpo_sweeps.engine.policy import Policy, Reference, Turns, load_policy, resolve_device
from grpo_sweeps.engine.rollouts import row_seed
from grpo_sweeps.engine.samplers import SamplerEngine
from grpo_sweeps.loop.judging import Judge
from grpo_sweeps.loop.rewarding import Rewarder
from grpo_sweeps.maths.noise import NoiseWindow
from grpo_sweeps.paths import working_directory_kept
from grpo_sweeps.types import EstimatorFunction, Problem, TaskData

VERIFIED_ROWS = 4  # of the block that is verified before the first step


def _silent(sentence: str) -> None:
    pass


@dataclass
class Precision:
    """How exactly K is the Gram of the applied gradients: measured before step 0, kept in checkpoints; None until
    then."""

    floor: float | None = None


@dataclass
class Tally:
    """Rollouts so far that were drawn and not trained on, discarded (objective.resample) or continuations of a prefix
    (objective.continuations); and, with a budget of them, completion tokens of all that was drawn for training; kept in
    checkpoints."""

    discarded: int = 0
    tokens: int = 0


@dataclass
class Room:
    """Rows that fit the device at a time, found by `room.measure_room`; None until then, and where nothing is to be
    found: on a CPU, and where trainer.micro_batch says it."""

    rows: int | None = None


@dataclass
class Stack:
    """`stacked/...` of the step that runs, where its groups were measured together; empty otherwise."""

    metrics: dict[str, float] = field(default_factory=dict)

    def take(self) -> dict[str, float]:
        found, self.metrics = self.metrics, {}
        return found


@dataclass(frozen=True)
class Setup:
    """What a step works on. `gram` is None when nothing is measured (analysis.every = 0), `reference` without KL,
    `critic` without a learned value."""

    config: RunConfig
    policy: Policy
    sampler: SamplerEngine
    optimizer: MasterAdamW
    gram: GradientGram | None
    data: TaskData
    reward: Rewarder
    judge: Judge
    estimator: EstimatorFunction
    precision: Precision = field(default_factory=Precision)
    room: Room = field(default_factory=Room)
    reference: Reference | None = None
    critic: Critic | None = None
    tally: Tally = field(default_factory=Tally)
    say: Callable[[str], None] = _silent  # what the run is doing where that takes a while
    noise: NoiseWindow = field(default_factory=NoiseWindow)
    stack: Stack = field(default_factory=Stack)
    own_metrics: tuple[tuple[str, Callable[..., Any]], ...] = ()  # by name, see loop/own_metrics

    def close(self) -> None:
        """End what runs in other processes for this run."""
        self.reward.close()
        self.judge.close()

    def problems(self, step: int) -> list[Problem]:
        """The step's prompts: a walk through a fresh permutation of the training problems in each epoch.

        A function of (seed, step) alone, so that resuming needs no data position.
        """
        train, prompts = self.data.train, self.config.groups
        chosen = []
        for position in range(step * prompts, (step + 1) * prompts):
            epoch, index = divmod(position, len(train))
            chosen.append(train[_permutation(len(train), row_seed(self.config.seed, "order", epoch))[index]])
        return chosen

    def prompt(self, problem: Problem) -> str:
        """The problem as the model is asked it: the whole prompt, or the user's turn of a chat."""
        return self.config.task.turn(problem.question, self.config.prompt_key)

    def asked(self, problem: Problem) -> str | list[dict[str, str]]:
        """The prompt as TRL has it: the text, or the messages that the chat template is given."""
        return self.policy.messages(self.prompt(problem)) if self.policy.chat_template else self.prompt(problem)


def prepare(config: RunConfig, say: Callable[[str], None] = _silent) -> Setup:
    """Seed, load the data and the model, claim the parameters. `say` is told what takes a while.

    Raises:
        ConfigError: for data, a model or a function that cannot be used.
    """
    _seed_everything(config.seed)
    _ready_gpu()
    judge = Judge(config.task.verdict, config.reward_timeout)
    reward = Rewarder(config, judge)
    estimator = load_estimator(config.estimator)
    with working_directory_kept():  # the model's path may be relative
        data = load_function(config.task.function, "task", positional=0)()
    check_data(data, config)
    say(f"loading {config.model.name}")
    policy = replace(load_policy(config.model, resolve_device(config.trainer.device)), turns=turns_of(config))
    sampler = samplers.load(config.rollout.engine, policy)
    reference = Reference(policy.model) if config.objective.kl_beta > 0 else None
    gram = GradientGram(policy.model) if config.analysis.every else None
    if gram is not None:  # compilers work while the first rollouts are sampled
        expected = [(VERIFIED_ROWS, 1), (config.R, max(1, config.micro_batch_rows // config.R))]
        gram.expect(expected, cross_groups=bool(config.analysis.check_every or config.analysis.stacked_every))
    optimizer = MasterAdamW(policy.model.parameters(), config.trainer)
    critic = _critic(config, policy) if config.objective.critic else None
    return Setup(
        config, policy, sampler, optimizer, gram, data, reward, judge, estimator,
        reference=reference, critic=critic, say=say,
        own_metrics=load_own_metrics(config.analysis.own_metrics),
    )  # fmt: skip


def turns_of(config: RunConfig) -> Turns:
    """What a run's prompts have around the question."""
    task = config.task
    before = [{"role": "system", "content": task.system}] if task.system is not None else []
    for example in task.few_shot:
        asked = task.turn(example["question"], config.prompt_key)
        before += [{"role": "user", "content": asked}, {"role": "assistant", "content": example["answer"]}]
    return Turns(tuple(before), task.assistant_prefix or "", config.model.chat_template_kwargs)


def _critic(config: RunConfig, policy: Policy) -> Critic:
    width = output_head(causal_model(policy.model)).in_features
    return Critic(width, policy.device, config.objective.critic_lr, config.objective.critic_updates)


def micro_batch_rows(setup: Setup) -> int:
    """Rows in a micro-batch: whole groups, or fewer than R rows, and then a group is run in parts."""
    return setup.config.trainer.micro_batch or setup.room.rows or setup.config.micro_batch_rows


def micro_batch_groups(setup: Setup) -> int:
    """Groups that are run together; 1 also where a group takes several micro-batches."""
    return max(1, micro_batch_rows(setup) // setup.config.R)


_PERMUTATIONS: dict[tuple[int, int], np.ndarray] = {}


def _permutation(size: int, seed: int) -> np.ndarray:
    key = (size, seed)
    if key not in _PERMUTATIONS:
        if len(_PERMUTATIONS) > 2:
            _PERMUTATIONS.clear()
        _PERMUTATIONS[key] = np.random.Generator(np.random.Philox(seed)).permutation(size)
    return _PERMUTATIONS[key]


def _seed_everything(seed: int) -> None:
    """Random initialisation (model.random, LoRA) draws from torch's generator; nothing in a step does."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def _ready_gpu() -> None:
    """What torch and cuBLAS are told before they use a GPU."""
    # TF32 would put an error of 1e-3 into the Gram; reproducible cuBLAS needs its workspace set before first use.
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    grow_segments(os.environ)


def due(step: int, every: int) -> bool:
    """At steps 0, every, 2 every, ...; never where `every` is 0."""
    return bool(every) and step % every == 0
