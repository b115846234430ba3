"""Typed configuration: dataclass schemas, range checks, and the one conversion from Hydra's composed config.

Everything past `RunConfig.from_composed` handles plain frozen dataclasses. This module imports OmegaConf only where a
composed config comes in; `registration` has what Hydra itself is told.

A configuration has one written form, the one that Hydra composes: nested mappings in which `task`, `reward` and
`estimator` hold `_target_` and the function's keyword arguments side by side. `from_mapping` reads it, `to_mapping`
writes it, the run's config.yaml holds it.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpo_sweeps.types import ConfigError


@dataclass(frozen=True)
class LoraConfig:
    """LoRA through peft (extra `lora`). `r = 0` switches it off."""

    r: int = 0
    alpha: int = 16
    targets: str = "all-linear"


@dataclass(frozen=True)
class ModelConfig:
    """A causal language model, loaded by transformers' Auto classes.

    path: "embedded" (the tiny model inside the package), a hub id, a local folder or a GGUF file.
    random: keep the configuration, draw the weights (to measure cost without weights).
    """

    name: str
    path: str
    revision: str | None = None
    dtype: str = "float32"  # float32 | bfloat16 | float16 | float64
    attention: str = "sdpa"  # sdpa | eager
    random: bool = False
    gradient_checkpointing: bool = False
    chat_template: bool = False  # wrap the prompt by the tokenizer's chat template
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict, hash=False)  # such as enable_thinking: false
    trust_remote_code: bool = False
    lora: LoraConfig = field(default_factory=LoraConfig)


@dataclass(frozen=True)
class FunctionConfig:
    """A function (task, reward or estimator) by dotted path, and its keyword arguments: open to users' own code."""

    target: str
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class TaskConfig:
    """A task function and how its problems become prompts: `{question}` is replaced in the text.

    chat_prompt: the text of the user's turn where `model.chat_template` is true; None = `prompt`.
    verdict: the kind of what is right, see `rewards/verdicts.py`, or the dotted path of a function that says it.
    system: the system message of the chat. few_shot: examples before the question, each {question, answer}, a user's
    and an assistant's turn. assistant_prefix: how every completion begins; it belongs to the prompt.
    """

    name: str
    function: FunctionConfig
    prompt: str
    stop: tuple[str, ...] = ()
    chat_prompt: str | None = None
    verdict: str = "numbers"  # numbers | exact | choice | math | none | a dotted path
    system: str | None = None
    few_shot: tuple[Mapping[str, str], ...] = ()
    assistant_prefix: str | None = None

    def turn(self, question: str, key: str) -> str:
        """The text that asks a question, by `prompt` or `chat_prompt`. A plain replacement: braces in a question are
        text."""
        text: str = getattr(self, key)
        return text.replace("{question}", question)

    @property
    def judged(self) -> bool:
        """Is there a right answer to each problem?"""
        return self.verdict != "none"


@dataclass(frozen=True)
class ObjectiveConfig:
    """The loss of a step and how often it uses its rollouts; docs/objective.md has the equations."""

    ratio: str = "none"  # none | token (PPO) | sequence (GSPO)
    clip_low: float = 0.2
    clip_high: float = 0.2
    inner_updates: int = 1  # passes over a step's rollouts
    minibatches: int = 1  # parts that the step's groups are cut into, one update each
    kl_beta: float = 0.0  # 0 = no KL, no reference model
    kl_estimator: str = "k3"  # k1 | k2 | k3
    kl_place: str = "loss"  # loss | reward
    resample: bool = False  # draw fresh prompts until every group is mixed
    resample_rounds: int = 10
    critic: bool = False  # a learned value, and GAE by token
    critic_lr: float = 1e-3
    critic_updates: int = 4  # updates of the value head per step
    gae_gamma: float = 1.0
    gae_lambda: float = 0.95
    continuations: int = 0  # fresh ones per valued prefix, for credit by token; 0 = off
    value_every: int = 0  # tokens between valued prefixes; 0 = the prompt alone

    @property
    def updates(self) -> int:
        """Updates of the weights per step."""
        return self.inner_updates * self.minibatches

    @property
    def kl_in_loss(self) -> bool:
        return self.kl_beta > 0 and self.kl_place == "loss"

    @property
    def kl_in_reward(self) -> bool:
        return self.kl_beta > 0 and self.kl_place == "reward"

    @property
    def on_policy(self) -> bool:
        """True when the loss is -sum_i w_i log pi(o_i) alone, with one update: the rows are then the scores times w."""
        plain = self.ratio == "none" and self.updates == 1 and not self.kl_in_loss
        return plain and not self.critic and not self.continuations

    @property
    def by_token(self) -> bool:
        """Does each token have an advantage of its own?"""
        return bool(self.critic or (self.continuations and self.value_every))

    @property
    def choice(self) -> str:
        """The choice of conf/objective that these settings are of the kind of."""
        if self.critic:
            return "ppo"
        if self.continuations:
            return "vine" if self.by_token else "oracle"
        return {"none": "reinforce", "token": "ppo_clip", "sequence": "gspo"}.get(self.ratio, self.ratio)


@dataclass(frozen=True)
class RolloutConfig:
    """Sampling of training rollouts. Nothing but the temperature shapes the distribution (no top-p, no top-k)."""

    temperature: float = 1.0
    max_new_tokens: int = 128
    batch: int = 256  # rows sampled at once
    engine: str = "auto"  # auto | eager | the dotted path of a class (see engine/samplers)
    cut: str = "keep"  # keep | mask: rollouts that reached max_new_tokens have no weight in the loss
    cut_penalty: float = 0.0  # taken off the reward of such a rollout
    cut_buffer: int = 0  # last tokens over which the penalty grows to that; 0: all of it, where the rollout was cut


@dataclass(frozen=True)
class AnalysisConfig:
    """What is measured and how often."""

    every: int = 1  # steps between Grams; 0 = off
    groups: str = "mixed"  # mixed | all
    by: str = "whole"  # whole | layer | parameter
    scores: bool = True  # log scores/... (the unweighted matrix) each step; the records hold its Gram either way
    check_every: int = 10  # steps between norm checks where a micro-batch holds several groups; 0 = never there
    keep_completions_every: int = 10  # steps between kept samples of completions; 0 = off
    update_every: int = 10  # steps between measurements of what an update does to the weights; 0 = off
    stacked_every: int = 0  # steps between spectra of all groups of a step together; 0 = off
    compare_float32: int = 0  # groups of the first step whose spectra are also taken in float32; 0 = off
    own_metrics: tuple[str, ...] = ()  # dotted paths of functions of a measured group, see loop/own_metrics


@dataclass(frozen=True)
class TrainerConfig:
    """Optimisation (AdamW with float32 master weights), evaluation, checkpoints."""

    steps: int = 50
    tokens: int | None = None  # completion tokens sampled for training after which the run ends, if before `steps`
    prompts: int = 8  # groups per step, where the budget is not of rollouts
    # Rows: whole groups or part of one (< R); None: as many whole groups as fit in 32 rows (at least one).
    micro_batch: int | None = None
    lr: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    warmup_steps: int = 0
    schedule: str = "constant"  # constant | linear | cosine
    max_grad_norm: float = 1.0  # 0 = no clipping
    eval_every: int = 25  # 0 = never; otherwise also before step 0 and after the last
    eval_problems: int = 256
    eval_samples: int = 4
    checkpoint_every: int = 25  # steps; 0 = by steps only at the end
    checkpoint_minutes: float | None = None  # and whenever so much time has passed; None = off
    keep_checkpoints: int = 1
    device: str = "auto"  # auto | cpu | cuda | cuda:N


@dataclass(frozen=True)
class TrackingConfig:
    """Where the copy of the local record goes: kind = mlflow | local | the dotted path of a tracker of your own.

    MLflow's uri None = MLFLOW_TRACKING_URI or SQLite here.
    """

    kind: str = "mlflow"
    uri: str | None = None
    experiment: str = "grpo_sweeps"


@dataclass(frozen=True)
class RunConfig:
    """The whole configuration of a run, made by `from_composed` and stored, resolved, as the run's config.yaml."""

    R: int
    seed: int
    sweep: str
    aggregation: str  # sum | length | token_mean | constant
    runs_dir: str
    model: ModelConfig
    task: TaskConfig
    reward: FunctionConfig
    estimator: FunctionConfig
    rollout: RolloutConfig
    analysis: AnalysisConfig
    trainer: TrainerConfig
    tracking: TrackingConfig
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    budget: str = "prompts"  # prompts | rollouts: what a step has equally many of for every R, see `groups_a_step`
    budget_R: int = 4  # the R at which budget=rollouts has trainer.prompts groups per step
    reward_timeout: float | None = None  # seconds per call of the reward, in a process of its own; None: in the run's
    reward_retries: int = 0  # calls again after one that failed
    reward_on_failure: str = "stop"  # stop | zero: the run, or what the call would have given

    @property
    def prompt_key(self) -> str:
        """The key of `task` that holds the text of the prompts."""
        return "chat_prompt" if self.model.chat_template and self.task.chat_prompt is not None else "prompt"

    @property
    def groups(self) -> int:
        """Groups (prompts) per step."""
        return groups_a_step(self.R, self.trainer.prompts, self.budget, self.budget_R)

    @property
    def micro_batch_rows(self) -> int:
        """Rows in a micro-batch: whole groups, or fewer than R rows, and then a group is run in parts."""
        return self.trainer.micro_batch or max(self.R, 32 // self.R * self.R)

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> RunConfig:
        """Return the typed configuration of a written one. Raises ConfigError for an unknown or a missing key.

        The keys of the launch (`redo`, `dry_run`, `wait`, `require_clean`) do not belong to the run and are ignored.
        """
        of_launch = {item.name for item in dataclasses.fields(LaunchConfig)}
        plain = {key: value for key, value in mapping.items() if key not in of_launch}
        parts: dict[str, Any] = {}
        for key, kind in (("reward", _function), ("estimator", _function), ("task", _task)):
            if isinstance(plain.get(key), Mapping):
                parts[key] = kind(plain.pop(key), key)
        built = _build(cls, plain | parts)
        model = dataclasses.replace(built.model, path=_expanded(built.model.path))
        return dataclasses.replace(built, model=model, runs_dir=_expanded(built.runs_dir))

    @classmethod
    def from_composed(cls, composed: Any) -> RunConfig:
        """Return the typed configuration of Hydra's composed one, with or without its `hydra` node.

        Where `sweep` is not given, it becomes the name of the chosen file of sweeps/, else `adhoc`.
        """
        from omegaconf import OmegaConf

        choice = OmegaConf.select(composed, "hydra.runtime.choices.sweeps", default=None)
        named: dict[str, Any] = {}
        for key in composed:
            if key != "hydra":  # it belongs to Hydra, and nobody needs it resolved
                value = composed[key]
                whole = OmegaConf.is_config(value)
                named[str(key)] = OmegaConf.to_container(value, resolve=True, throw_on_missing=True) if whole else value
        named["sweep"] = named.get("sweep") or (str(choice).rsplit("/", 1)[-1] if choice else ADHOC)
        return cls.from_mapping(named)


CHOICES = ("model", "task", "reward", "estimator", "objective", "trainer", "rollout", "analysis")
"""The groups of conf/ whose choices make a run what it is."""


def choices_of(chosen: Mapping[str, Any]) -> dict[str, str]:
    """{group: the name of its chosen file} for the groups of `CHOICES`, of what Hydra says it has chosen
    (`hydra.runtime.choices`), by the command or by another choice."""
    return {group: str(chosen[group]) for group in CHOICES if chosen.get(group)}


@dataclass(frozen=True)
class LaunchConfig:
    """What a command asks for beside its runs: the keys of the top level that belong to no run."""

    redo: str | None = None
    dry_run: bool = False
    wait: bool = True
    require_clean: bool = False

    @classmethod
    def from_composed(cls, composed: Any) -> LaunchConfig:
        """The keys of Hydra's composed configuration; their defaults where it has none."""
        return cls(**{i.name: composed[i.name] for i in dataclasses.fields(cls) if i.name in composed})


def dotted_keys(cls: type = RunConfig, prefix: str = "") -> list[str]:
    """The keys of a run's configuration that have a value, dotted; arguments of functions are not among them."""
    found: list[str] = []
    for key, hint in typing.get_type_hints(cls).items():
        if hint is FunctionConfig:
            continue
        inner = dataclasses.is_dataclass(hint) and isinstance(hint, type)
        found += dotted_keys(hint, f"{prefix}{key}.") if inner else [f"{prefix}{key}"]
    return found


def groups_a_step(R: int, prompts: int, budget: str, budget_R: int) -> int:
    """Groups per step: `prompts` whatever R, or with budget=rollouts as many as make prompts x budget_R rollouts.

    >>> [groups_a_step(R, 16, "rollouts", 4) for R in (2, 4, 8)]
    [32, 16, 8]
    """
    return prompts * budget_R // R if budget == "rollouts" else prompts


ADHOC = "adhoc"  # the sweep of runs that were given on the command line alone
TASK_KEYS = ("name", "prompt", "stop", "chat_prompt", "verdict", "system", "few_shot", "assistant_prefix")


_SHAPES = (
    "is not offered: it would change the distribution that rollouts come from, and with it their log-probabilities"
)
# Keys that people know from other trainers and that are left out on purpose.
NOT_OFFERED = {name: f"{label} {_SHAPES}; set rollout.temperature" for name, label in (
    ("top_p", "top-p"), ("top_k", "top-k"), ("min_p", "min-p"))}  # fmt: skip


def shown(value: object) -> str:
    """A value as it is written in YAML and on the command line."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def to_mapping(config: RunConfig) -> dict[str, Any]:
    """Return the written form, plain values that YAML and JSON hold. The inverse of `RunConfig.from_mapping`."""
    mapping = _plain(config)
    for key in ("reward", "estimator"):
        mapping[key] = {"_target_": mapping[key]["target"], **mapping[key]["kwargs"]}
    task = mapping["task"]
    function = task.pop("function")
    mapping["task"] = {"_target_": function["target"], **task, **function["kwargs"]}
    return mapping


# What cannot change a result: names and places, tracking, device, how rows are cut into batches, how often things are
# kept, which numbers are logged beside the records that they follow from.
IRRELEVANT = (
    "sweep", "runs_dir", "tracking", "model.name", "task.name", "trainer.device", "trainer.micro_batch",
    "rollout.batch", "rollout.engine",
    "trainer.checkpoint_every", "trainer.checkpoint_minutes", "trainer.keep_checkpoints",
    "analysis.keep_completions_every", "analysis.check_every", "analysis.scores", "analysis.update_every",
    "analysis.compare_float32", "analysis.stacked_every", "analysis.own_metrics",
)  # fmt: skip


def changes_no_result(key: str) -> bool:
    """True for a dotted key that is one of `IRRELEVANT` or lies below one."""
    return any(key == name or key.startswith(f"{name}.") for name in IRRELEVANT)


def flatten(mapping: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested mappings as one level with dotted keys; an empty mapping stays as a value."""
    flat: dict[str, Any] = {}
    for key, value in mapping.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _plain(value: Any) -> Any:
    """The value with dataclasses as dicts and tuples as lists, at every depth."""
    if dataclasses.is_dataclass(value):
        return {item.name: _plain(getattr(value, item.name)) for item in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def _function(mapping: Mapping[str, Any], key: str) -> FunctionConfig:
    kwargs = dict(mapping)
    target = kwargs.pop("_target_", None)
    if not isinstance(target, str) or not target:
        raise ConfigError(f"{key}._target_={target}: give the dotted path of a function, such as my_module.my_{key}")
    return FunctionConfig(target=target, kwargs=kwargs)


def _task(mapping: Mapping[str, Any], key: str) -> TaskConfig:
    rest = {name: value for name, value in mapping.items() if name not in TASK_KEYS}
    function = _function(rest, key)
    name = mapping.get("name") or function.target.rsplit(".", 1)[-1]
    stop = mapping.get("stop") or ()
    if isinstance(stop, str):
        raise ConfigError(f"{key}.stop={stop!r}: a list of strings is expected, such as {key}.stop=[{stop!r}]")
    return TaskConfig(
        name=str(name),
        function=function,
        prompt=mapping.get("prompt", "{question}"),
        stop=tuple(str(item) for item in stop),
        chat_prompt=mapping.get("chat_prompt"),
        verdict=mapping.get("verdict", "numbers"),
        system=mapping.get("system"),
        few_shot=_examples(mapping.get("few_shot") or (), f"{key}.few_shot"),
        assistant_prefix=mapping.get("assistant_prefix"),
    )


def _examples(value: Any, key: str) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise ConfigError(f"{key}={value}: a list of examples is expected, each with question and answer")
    return tuple(dict(item) if isinstance(item, Mapping) else item for item in value)


_hints = functools.cache(typing.get_type_hints)  # asked for at each of a sweep's runs


def _build(cls: type, mapping: Mapping[str, Any], prefix: str = "") -> Any:
    """A frozen dataclass from a mapping, by its fields' types; nested dataclasses and tuples are converted."""
    hints = _hints(cls)
    fields = {item.name: item for item in dataclasses.fields(cls)}
    for key in mapping:
        if key not in fields:
            reason = NOT_OFFERED.get(key, f"no such key; allowed here: {', '.join(fields)}")
            raise ConfigError(f"{prefix}{key}={shown(mapping[key])}: {reason}")
    values: dict[str, Any] = {}
    for name, item in fields.items():
        if name in mapping:
            values[name] = _converted(hints[name], mapping[name], prefix + name)
        elif item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING:
            raise ConfigError(f"{prefix}{name}: a value is required and none is given")
    return cls(**values)


def _converted(hint: Any, value: Any, key: str) -> Any:
    """`value` as the annotated type; ConfigError with the key where it is of another type."""
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        if isinstance(value, hint):
            return value
        if not isinstance(value, Mapping):
            raise ConfigError(f"{key}={value}: a group of keys is expected, not a single value")
        return _build(hint, value, key + ".")
    if typing.get_origin(hint) is dict:
        if not isinstance(value, Mapping):
            raise ConfigError(f"{key}={value}: a group of keys is expected, not a single value")
        return dict(value)
    if typing.get_origin(hint) is tuple:
        if isinstance(value, str) or not isinstance(value, list | tuple):
            raise ConfigError(f"{key}={value}: a list is expected")
        return tuple(value)
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if float in options and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    fits = any(option is Any or (isinstance(option, type) and isinstance(value, option)) for option in options)
    if not fits or (isinstance(value, bool) and bool not in options):
        names = " or ".join("null" if option is type(None) else option.__name__ for option in options)
        raise ConfigError(f"{key}={shown(value)}: a value of type {names} is expected")
    return value


def _expanded(path: str) -> str:
    return str(Path(path).expanduser()) if path.startswith("~") else path
