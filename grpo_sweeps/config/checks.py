"""Checks of a whole configuration: what its types cannot say. Each failure is one sentence that names the key, the
value and what is allowed.

`check` is cheap (it imports neither torch nor the user's code) and comes first, for every run of a sweep;
`check_functions` imports the functions that the configuration names and compares their signatures with its keys;
`check_tasks` loads the data.
"""

from __future__ import annotations

import inspect
import math
import os
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_args

from grpo_sweeps.config.functions import (
    LENGTHS,
    SAMPLER_CHOICES,
    load_function,
    load_own_metrics,
    load_verdict,
    sampler_class,
)
from grpo_sweeps.config.rewards import bound_reward, reward_parts
from grpo_sweeps.config.schema import FunctionConfig, ModelConfig, RolloutConfig, RunConfig, flatten, shown, to_mapping
from grpo_sweeps.estimators.declared import paths
from grpo_sweeps.paths import why_no_path, working_directory_kept
from grpo_sweeps.rewards.verdicts import CORRECT, JUDGES, KINDS, MATH_NEEDED, NUMBERS_ONLY, is_own, why_no_answer
from grpo_sweeps.types import ConfigError, TaskData, Within

DTYPES = ("float32", "bfloat16", "float16", "float64")
ATTENTIONS = ("sdpa", "eager")
AGGREGATIONS = ("sum", "length", "token_mean", "constant")
SCHEDULES = ("constant", "linear", "cosine")
ANALYSIS_GROUPS = ("mixed", "all")
ANALYSIS_BY = ("whole", "layer", "parameter")
TRACKING = ("mlflow", "local")
BUDGETS = ("prompts", "rollouts")
REDO = (None, "failed", "stale", "all")
RATIOS = ("none", "token", "sequence")
KL_ESTIMATORS = ("k1", "k2", "k3")
KL_PLACES = ("loss", "reward")
ON_FAILURE = ("stop", "zero")
CUT = ("keep", "mask")
OURS_IN_TEMPLATES = ("conversation", "chat_template", "tokenize", "add_generation_prompt", "continue_final_message")
# With one rollout in the group, or in the whole step, the advantages of these are always 0.
GROUP_BASELINES = paths(lambda one: one.least_R > 1)
STEP_BASELINES = paths(lambda one: one.least_N > 1)
NO_BASELINE = paths(lambda one: one.kind == "none")
UNIT_REWARDS = paths(lambda one: one.unit_rewards)
GSM8K, JSONL, HUB = (f"grpo_sweeps.tasks.{name}" for name in ("gsm8k.gsm8k", "own_data.jsonl", "own_data.hub"))
MOST_ROLLOUTS = 65_536  # per group, and groups per step: more is a typing error that fills the memory
MOST_UPDATES = 1024  # per step, each over all rollouts of the step
MOST_CONTINUATIONS = 4096  # per valued prefix
MOST_LORA = 4096  # wider than most models
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?")


def check(config: RunConfig) -> None:
    """Raise ConfigError for the first thing that is out of range or cannot work together."""
    _check_finite(config)
    _check_top(config)
    _check_model(config.model)
    _check_task(config)
    _check_rollout_and_analysis(config)
    _check_trainer(config)
    _check_objective(config)
    _check_group(config)
    _check_tracking(config)


def check_launch(redo: str | None, wait: bool = True, on_nodes: bool = True, unclean: bool | None = False) -> None:
    """Raise ConfigError for a bad key of the launch. unclean: the checkout has changes, and a clean one is required."""
    _one_of("redo", redo, REDO)
    if not wait and not on_nodes:
        _fail(
            "wait", wait, "the runs end with this command, so true is allowed; false needs -m and a launcher on SLURM"
        )
    if unclean:
        _fail(
            "require_clean", True, "the checkout differs from its commit (see git status); commit, or leave the key out"
        )


def check_sweep_name(name: str) -> None:
    """Raise ConfigError for a name that cannot be a folder."""
    if not NAME.fullmatch(name) or len(name) > 100:
        shown = name if len(name) <= 100 else f"{name[:80]}..."
        raise ConfigError(
            f"sweep={shown}: a sweep's name becomes a folder, so letters, digits, '.', '_' and '-' are allowed "
            f"(at most 100, no '/')"
        )


def check_functions(config: RunConfig) -> None:
    """Import task, reward, estimator and a sampler engine of the user's own, and check that they take the keys they are
    given. May import torch."""
    functions = (("task", config.task.function, 0), ("estimator", config.estimator, 1))
    for key, function, positional in functions:
        offered = (LENGTHS,) if key == "estimator" else ()
        _check_types(load_function(function, key, positional, offered), function, key)
    for part in reward_parts(config.reward):
        bound, per = bound_reward(part)
        _check_types(bound, part.function, part.key)
        if per == "group" and config.objective.continuations:
            _fail(
                f"{part.key}._target_",
                part.function.target,
                "it is called with a whole group, and a continuation (objective.continuations) has none; one that is "
                "called per rollout is needed",
            )
    load_own_metrics(config.analysis.own_metrics)
    verdicts = _verdicts(config)
    for key, kind in verdicts.items():
        if is_own(kind):
            load_verdict(kind, key)
    if "math" in verdicts.values():
        JUDGES["math"]("#### 1", "1")  # raises where the package is there and cannot be used
    if config.rollout.engine not in SAMPLER_CHOICES:
        sampler_class(config.rollout.engine)


def check_tasks(configs: Iterable[RunConfig], loaded: dict[str, TaskData] | None = None) -> None:
    """Load each different task once and check that every run finds the problems that it asks for.

    loaded: those that have been loaded, by `repr(config.task.function)`; what is loaded here is added.
    """
    loaded, distinct = {} if loaded is None else loaded, set[str]()
    for config in configs:
        key = repr(config.task.function)
        if key not in loaded:
            loaded[key] = load_task(config.task.function)
        if key not in distinct:
            _check_distinct(loaded[key], config.task.function.target)
            distinct.add(key)
        kinds = repr((key, config.task.verdict, config.reward))
        if kinds not in distinct:
            _check_answers(loaded[key], config)
            distinct.add(kinds)
        _check_enough(loaded[key], config)


def load_task(function: FunctionConfig) -> TaskData:
    """The problems of a task. Raises ConfigError where they cannot be loaded, whatever its function raises."""
    try:
        with working_directory_kept():
            data = load_function(function, "task", 0)()
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(f"task={function.target}: its problems could not be loaded ({reason})") from error
    if not isinstance(data, TaskData):
        raise ConfigError(f"task={function.target}: returns a {type(data).__name__}; a TaskData is needed")
    return data


def check_data(data: TaskData, config: RunConfig) -> None:
    """Raise ConfigError where a step or an evaluation takes more problems than there are, or where problems are not
    told apart: their id is their name in the records and gives their random numbers."""
    _check_distinct(data, config.task.function.target)
    _check_answers(data, config)
    _check_enough(data, config)


def is_fetched(config: RunConfig) -> bool:
    """Is the run's data one that a hub may have to be asked for?"""
    function = config.task.function
    if function.target == HUB:
        return not Path(str(function.kwargs.get("dataset"))).is_dir()
    return function.target == GSM8K and function.kwargs.get("path") is None


def _check_answers(data: TaskData, config: RunConfig) -> None:
    """Raise ConfigError for the first reference answer that the task's verdict, or the reward, cannot compare with."""
    others = f"choose another kind ({', '.join(KINDS)})"
    kinds = [(key, kind, kind, others) for key, kind in _verdicts(config).items()]
    if config.reward.target in NUMBERS_ONLY:
        own = "it compares numbers; choose reward=correct, which takes task.verdict, or a reward of your own"
        kinds.append(("reward._target_", config.reward.target, "numbers", own))
    for key, value, kind, remedy in kinds:
        if is_own(kind):
            _check_own_verdict(key, kind, data)
        for problem in (*data.train, *data.held_out):
            if reason := why_no_answer(kind, problem.answer):
                answer = f"the answer {problem.answer[:60]!r} of problem {problem.id}"
                _fail(key, value, f"{answer} cannot be compared ({reason}); {remedy}")


def _check_own_verdict(key: str, target: str, data: TaskData) -> None:
    """Raise ConfigError where a verdict of the user's own gives no answer on a problem and its reference answer."""
    verdict = load_verdict(target, key)
    for problem in data.train[:1]:
        try:
            with working_directory_kept():
                verdict(problem.answer, problem)
        except ConfigError:
            raise
        except (Exception, SystemExit) as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            _fail(key, target, f"fails on the reference answer of problem {problem.id} ({reason}); a bool is needed")


def _check_enough(data: TaskData, config: RunConfig) -> None:
    if len(data.train) < config.groups:
        step = f", {config.groups} groups a step by budget=rollouts" if config.budget == "rollouts" else ""
        raise ConfigError(
            f"trainer.prompts={config.trainer.prompts}{step}: the task has {len(data.train)} training problems; "
            f"allowed are as many at most"
        )
    if config.trainer.eval_every and len(data.held_out) < config.trainer.eval_problems:
        raise ConfigError(
            f"trainer.eval_problems={config.trainer.eval_problems}: the task has {len(data.held_out)} held-out "
            f"problems; allowed are as many at most"
        )


def _check_distinct(data: TaskData, target: str) -> None:
    ids = Counter(problem.id for problem in (*data.train, *data.held_out))
    twice = [name for name, times in ids.items() if times > 1]
    if twice:
        raise ConfigError(
            f"task={target}: the id {twice[0]!r} names more than one problem{_others(len(twice))}; each problem needs "
            f"an id of its own"
        )
    shared = {problem.question for problem in data.train} & {problem.question for problem in data.held_out}
    if shared:
        raise ConfigError(
            f"task={target}: the question {min(shared)[:60]!r} stands among the training and the held-out "
            f"problems{_others(len(shared))}; they must be disjoint"
        )


def _others(number: int) -> str:
    return f" (and {number - 1} more like it)" if number > 1 else ""


def check_device(device: str) -> None:
    """Raise ConfigError for a GPU that is not here. Imports torch for cuda alone."""
    if not device.startswith("cuda"):
        return
    import torch

    count = torch.cuda.device_count()
    if int(device.partition(":")[2] or 0) >= count:
        _fail("trainer.device", device, f"this machine has {count} CUDA devices; auto takes what there is")


def _check_types(bound: Callable[..., Any], function: FunctionConfig, key: str) -> None:
    """Raise ConfigError where a parameter annotated with a plain type is given another, or a number outside the range
    that its annotation declares: either would fail after the start."""
    target = getattr(bound, "func", bound)
    try:
        parameters = inspect.signature(target, eval_str=True).parameters
    except (NameError, TypeError, ValueError):
        return  # built in, or annotated with names that exist only for type checkers: nothing can be said
    for name, value in function.kwargs.items():
        kind = parameters[name].annotation if name in parameters else None
        ranges = [mark for mark in getattr(kind, "__metadata__", ()) if isinstance(mark, Within)]
        kind = get_args(kind)[0] if ranges else kind
        if kind not in (int, float, bool, str):
            continue
        right = isinstance(value, (int, float) if kind is float else kind) and (
            kind is bool or not isinstance(value, bool)
        )
        if not right:
            _fail(f"{key}.{name}", value, f"{function.target} expects a value of type {kind.__name__}")
        for allowed in ranges:
            if value not in allowed:
                _fail(f"{key}.{name}", value, f"{allowed} is needed")


def _check_finite(config: RunConfig) -> None:
    for key, value in flatten(to_mapping(config)).items():
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, float) and not math.isfinite(item):
                _fail(key, value, "a finite number is needed")


def _check_top(config: RunConfig) -> None:
    _at_least("R", config.R, 1)
    _at_most("R", config.R, MOST_ROLLOUTS)
    _at_most("trainer.prompts", config.trainer.prompts, MOST_ROLLOUTS)
    _check_budget(config)
    if config.reward_timeout is not None and config.reward_timeout <= 0:
        _fail("reward_timeout", config.reward_timeout, "seconds above 0 are needed, or null for no limit")
    _at_least("reward_retries", config.reward_retries, 0)
    _one_of("reward_on_failure", config.reward_on_failure, ON_FAILURE)
    reward_parts(config.reward)
    if not 0 <= config.seed < 2**32:
        _fail("seed", config.seed, "an integer from 0 to 4294967295 is needed")
    check_sweep_name(config.sweep)
    _one_of("aggregation", config.aggregation, AGGREGATIONS)
    _check_runs_dir(config.runs_dir, config.sweep)


def _check_budget(config: RunConfig) -> None:
    _one_of("budget", config.budget, BUDGETS)
    _at_least("budget_R", config.budget_R, 1)
    _at_most("budget_R", config.budget_R, MOST_ROLLOUTS)
    rollouts = config.trainer.prompts * config.budget_R
    if config.budget == "rollouts" and (rollouts % config.R or not rollouts):
        _fail(
            "R",
            config.R,
            f"budget=rollouts has trainer.prompts x budget_R = {config.trainer.prompts} x {config.budget_R} = "
            f"{rollouts} rollouts a step, and a divisor of that is needed, so that its groups are whole",
        )


def _check_runs_dir(runs_dir: str, sweep: str) -> None:
    """Raise ConfigError unless the sweep's folder, or the nearest existing one above it, is writable; checks by an
    unnamed temporary file."""
    allowed = "a folder is needed, or a path where one can be made"
    if not runs_dir:
        _fail("runs_dir", runs_dir, allowed)
    path = Path(runs_dir) / sweep
    try:
        (path / "identity").exists()
        nearest = next(place for place in (path, *path.parents) if os.path.lexists(place))
        if not nearest.is_dir():
            _fail("runs_dir", runs_dir, f"{allowed}, and {nearest} is none")
    except OSError as error:  # a name that is too long, a loop of links
        _fail("runs_dir", f"{runs_dir[:80]}...", f"{allowed} ({error.strerror})")
    try:
        with tempfile.TemporaryFile(dir=nearest):
            pass
    except OSError as error:
        _fail("runs_dir", runs_dir, f"{allowed}, and {nearest} cannot be written ({error.strerror})")


def _check_path(key: str, value: str) -> None:
    """Raise ConfigError for a text that no file system can hold as a path; whether there is something is no matter."""
    if reason := why_no_path(value):
        _fail(key, f"{value[:80]}...", f"a path that the file system can hold is needed ({reason})")


def _check_model(model: ModelConfig) -> None:
    _one_of("model.dtype", model.dtype, DTYPES)
    _one_of("model.attention", model.attention, ATTENTIONS)
    _at_least("model.lora.r", model.lora.r, 0)
    _at_most("model.lora.r", model.lora.r, MOST_LORA)
    if model.lora.r and find_spec("peft") is None:
        _fail(
            "model.lora.r",
            model.lora.r,
            "needs the package peft (pip install 'grpo_sweeps[lora]'), or 0 to train all weights",
        )
    if model.path == "embedded":
        return
    _check_path("model.path", model.path)
    path = Path(model.path)
    local = model.path.startswith((".", "/", "~")) or model.path.endswith(".gguf") or not HUB_ID.fullmatch(model.path)
    if not path.exists() and local:
        _fail(
            "model.path",
            model.path,
            "no such file or folder; give 'embedded', a hub id (owner/name), a local folder or a GGUF file",
        )
    if (path / "adapter_config.json").is_file():
        _fail(
            "model.path",
            model.path,
            "the folder holds a LoRA adapter, which needs the model below it; give a whole model, as "
            "python -m grpo_sweeps.export writes it with merge=true",
        )
    if path.is_dir() and not (path / "config.json").is_file():
        _fail(
            "model.path",
            model.path,
            "the folder has no config.json; give a folder written by save_pretrained, or a GGUF file",
        )
    if path.is_file() and path.suffix != ".gguf":
        _fail(
            "model.path",
            model.path,
            "of single files only GGUF (*.gguf) can be read; give the folder for anything else",
        )
    if path.exists() and not os.access(path, os.R_OK):
        _fail("model.path", model.path, "is not readable by this user; give a readable folder or GGUF file")
    if path.is_file() and find_spec("gguf") is None:
        _fail(
            "model.path",
            model.path,
            "needs the package gguf (pip install 'grpo_sweeps[gguf]'), or a safetensors folder",
        )


def _check_task(config: RunConfig) -> None:
    for key in ("prompt", "chat_prompt"):
        text = getattr(config.task, key)
        if key == "chat_prompt" and text is None:
            continue
        if not isinstance(text, str) or "{question}" not in text:
            _fail(f"task.{key}", repr(text), "must be a text that contains {question}")
    if any(not text for text in config.task.stop):
        _fail("task.stop", list(config.task.stop), "stop strings must not be empty")
    _check_turns(config)
    _check_verdict(config)
    kwargs = config.task.function.kwargs
    if config.task.function.target == GSM8K:
        _check_gsm8k(kwargs.get("path"))
    elif config.task.function.target == JSONL:
        _check_jsonl(kwargs.get("path"))
    elif config.task.function.target == HUB and find_spec("datasets") is None:
        _fail("task.dataset", kwargs.get("dataset"), "needs the package datasets, or task=jsonl task.path=FOLDER")


def _check_turns(config: RunConfig) -> None:
    """Raise ConfigError for messages around the question that are no texts, or that need a chat template."""
    task, model = config.task, config.model
    for key in ("system", "assistant_prefix"):
        value = getattr(task, key)
        if value is not None and not isinstance(value, str):
            _fail(f"task.{key}", value, "a text is needed, or null")
    for example in task.few_shot:
        texts = isinstance(example, Mapping) and set(example) == {"question", "answer"}
        if not texts or not all(isinstance(text, str) for text in example.values()):
            _fail("task.few_shot", example, "each example needs a question and an answer, both texts, and nothing else")
    for name in model.chat_template_kwargs:
        if name in OURS_IN_TEMPLATES:
            _fail(f"model.chat_template_kwargs.{name}", model.chat_template_kwargs[name], "the run sets it itself")
    if model.chat_template:
        return
    of_chats = {
        "task.system": (task.system, "write it into task.prompt"),
        "task.few_shot": (list(task.few_shot) or None, "write the examples into task.prompt"),
        "model.chat_template_kwargs": (model.chat_template_kwargs or None, "drop it"),
    }
    for key, (value, otherwise) in of_chats.items():
        if value is not None:
            need = "a chat template lays it out, so that model.chat_template=true is needed; without one"
            _fail(key, value, f"{need} {otherwise}")


def _check_verdict(config: RunConfig) -> None:
    """Raise ConfigError for a verdict, of the task or of reward=correct, that does not exist or cannot be had here."""
    kinds = _verdicts(config)
    for key, kind in kinds.items():
        allowed = KINDS if key == "task.verdict" else tuple(JUDGES)
        if kind not in allowed and not is_own(kind):
            none = "task.verdict=none has nothing to compare with, so that a reward of your own is needed; else "
            said = f"{none if kind == 'none' else ''}choose one of {', '.join(allowed)}"
            _fail(key, kind, f"{said}, or give the dotted path of a function, such as my_module.my_verdict")
        if kind == "math" and find_spec("math_verify") is None:
            _fail(key, kind, MATH_NEEDED)


def _verdicts(config: RunConfig) -> dict[str, Any]:
    """The kind of verdict by each key that names one."""
    found = {f"{part.key}.verdict": part.function.kwargs.get("verdict", "numbers")
             for part in reward_parts(config.reward) if part.function.target == CORRECT}  # fmt: skip
    return {"task.verdict": config.task.verdict, **found}


def _check_jsonl(path: object) -> None:
    _check_path("task.path", str(path))
    place = Path(str(path)).expanduser()
    if place.is_dir():
        _check_split_files(path)
    elif not place.is_file() or not os.access(place, os.R_OK):
        why = "cannot be read" if place.exists() else f"is not there (looked in {place.parent.resolve()})"
        _fail("task.path", path, f"{why}; a folder with train.jsonl and test.jsonl is needed, or one file")


def _check_gsm8k(path: object) -> None:
    if path is not None:
        _check_split_files(path)
    elif find_spec("datasets") is None:
        _fail("task.path", None, "needs the package datasets, or task.path=FOLDER with train.jsonl and test.jsonl")


def _check_split_files(path: object) -> None:
    _check_path("task.path", str(path))
    folder = Path(str(path)).expanduser()
    for name in ("train.jsonl", "test.jsonl"):
        file = folder / name
        if not file.is_file() or not os.access(file, os.R_OK):
            _fail(
                "task.path",
                path,
                f"a folder with readable train.jsonl and test.jsonl is needed, and {name} is not there",
            )


def _check_rollout_and_analysis(config: RunConfig) -> None:
    rollout, analysis = config.rollout, config.analysis
    if rollout.temperature <= 0:
        _fail(
            "rollout.temperature",
            rollout.temperature,
            "a number above 0 is needed (greedy decoding is for evaluation only)",
        )
    _at_least("rollout.max_new_tokens", rollout.max_new_tokens, 1)
    _at_least("rollout.batch", rollout.batch, 1)
    _one_of("rollout.cut", rollout.cut, CUT)
    _at_least("rollout.cut_penalty", rollout.cut_penalty, 0)
    _check_cut_buffer(rollout)
    if (
        rollout.engine not in SAMPLER_CHOICES and "." not in rollout.engine
    ):  # a dotted path is imported after these checks
        own = "or give the dotted path of a class, such as rollout.engine=my_module.MySampler"
        _fail("rollout.engine", rollout.engine, f"choose one of {', '.join(SAMPLER_CHOICES)}, {own}")
    if rollout.engine == "graph" and config.trainer.device == "cpu":
        _fail("rollout.engine", "graph", "it needs a CUDA GPU, and trainer.device is cpu; choose auto or eager")
    for key in ("every", "check_every", "keep_completions_every", "update_every", "compare_float32", "stacked_every"):
        _at_least(f"analysis.{key}", getattr(analysis, key), 0)
    _check_stacked(config)
    _one_of("analysis.groups", analysis.groups, ANALYSIS_GROUPS)
    _one_of("analysis.by", analysis.by, ANALYSIS_BY)


def _check_cut_buffer(rollout: RolloutConfig) -> None:
    """Raise ConfigError for a stretch of tokens that a completion does not have, or without a penalty to grow."""
    buffer, most = rollout.cut_buffer, rollout.max_new_tokens
    if not 0 <= buffer < most:
        _fail("rollout.cut_buffer", buffer, f"0 is needed, or fewer tokens than rollout.max_new_tokens={most}")
    if buffer and not rollout.cut_penalty:
        _fail("rollout.cut_buffer", buffer, "the penalty that grows is rollout.cut_penalty, which is 0; set both")


def _check_stacked(config: RunConfig) -> None:
    """All groups of a step are measured together only where they go through the model together, at one policy."""
    every, rows = config.analysis.stacked_every, config.groups * config.R
    if not every:
        return
    if not config.analysis.every:
        _fail("analysis.stacked_every", every, "with analysis.every=0 nothing is measured; 0 is allowed")
    if config.objective.minibatches > 1:
        _fail("analysis.stacked_every", every, "with objective.minibatches above 1 a step has several policies; use 0")
    if config.micro_batch_rows < rows:
        _fail(
            "analysis.stacked_every",
            every,
            f"the step's {config.groups} groups of {config.R} must fit into one micro-batch: "
            f"trainer.micro_batch={rows}, or 0 here",
        )


def _check_trainer(config: RunConfig) -> None:
    trainer = config.trainer
    for key, least in (
        ("steps", 1), ("prompts", 1), ("lr", 0), ("weight_decay", 0), ("warmup_steps", 0), ("max_grad_norm", 0),
        ("eval_every", 0), ("eval_problems", 1), ("eval_samples", 1), ("checkpoint_every", 0), ("keep_checkpoints", 1),
    ):  # fmt: skip
        _at_least(f"trainer.{key}", getattr(trainer, key), least)
    if trainer.tokens is not None and trainer.tokens < 1:
        _fail("trainer.tokens", trainer.tokens, "a number of tokens of at least 1 is needed, or null for no budget")
    if trainer.checkpoint_minutes is not None and not trainer.checkpoint_minutes > 0:
        _fail("trainer.checkpoint_minutes", trainer.checkpoint_minutes, "a number above 0 is needed, or null (off)")
    _one_of("trainer.schedule", trainer.schedule, SCHEDULES)
    if len(trainer.betas) != 2 or not all(0 <= beta < 1 for beta in trainer.betas):
        _fail("trainer.betas", list(trainer.betas), "two numbers from 0 to below 1 are needed")
    if not DEVICE.fullmatch(trainer.device):
        _fail("trainer.device", trainer.device, "choose one of auto, cpu, cuda, cuda:N")


def _check_objective(config: RunConfig) -> None:
    """Raise ConfigError for the first key of `objective` that is out of range or does not fit the rest."""
    objective = config.objective
    _one_of("objective.ratio", objective.ratio, RATIOS)
    _one_of("objective.kl_estimator", objective.kl_estimator, KL_ESTIMATORS)
    _one_of("objective.kl_place", objective.kl_place, KL_PLACES)
    if not 0 < objective.clip_low <= 1:
        _fail("objective.clip_low", objective.clip_low, "a number above 0 and at most 1 is needed")
    if objective.clip_high <= 0:
        _fail("objective.clip_high", objective.clip_high, "a number above 0 is needed")
    for key, least in (("inner_updates", 1), ("minibatches", 1), ("kl_beta", 0), ("resample_rounds", 1),
                       ("critic_lr", 0), ("critic_updates", 1), ("continuations", 0), ("value_every", 0)):  # fmt: skip
        _at_least(f"objective.{key}", getattr(objective, key), least)
    for key in ("inner_updates", "resample_rounds", "critic_updates"):
        _at_most(f"objective.{key}", getattr(objective, key), MOST_UPDATES)
    _at_most("objective.continuations", objective.continuations, MOST_CONTINUATIONS)
    if config.groups % objective.minibatches:
        _fail(
            "objective.minibatches",
            objective.minibatches,
            f"minibatches hold whole groups, as many each: a divisor of the step's {config.groups} groups is needed",
        )
    for key in ("gae_gamma", "gae_lambda"):
        if not 0 <= getattr(objective, key) <= 1:
            _fail(f"objective.{key}", getattr(objective, key), "a number from 0 to 1 is needed")
    if objective.critic and config.estimator.target not in NO_BASELINE:
        _fail("objective.critic", True, "the learned value is the baseline, so that estimator=reinforce is needed")
    _check_continuations(config)
    if objective.resample and config.R == 1:
        _fail(
            "objective.resample",
            True,
            "the one rollout of a group (R=1) cannot differ in reward; R=2 or more is needed",
        )


def _check_continuations(config: RunConfig) -> None:
    """Raise ConfigError where continuations meet another source of values, another baseline or a KL in the reward."""
    objective = config.objective
    key, count = "objective.continuations", objective.continuations
    if not count:
        if objective.value_every:
            _fail("objective.value_every", objective.value_every, f"{key}=1 or more is needed, or else 0 here")
        return
    if objective.critic:
        _fail(key, count, "values come from continuations or from a critic, so that objective.critic=false is needed")
    if config.estimator.target not in NO_BASELINE:
        _fail(key, count, "the values are the baseline, so that estimator=reinforce is needed")
    if config.rollout.cut_penalty:
        _fail(
            "rollout.cut_penalty",
            config.rollout.cut_penalty,
            f"the values by {key} know nothing of a penalty; 0 is needed",
        )
    if objective.value_every and objective.kl_in_reward:
        _fail(
            "objective.value_every",
            objective.value_every,
            "the values know nothing of a KL in the reward, whose credit would go to the last tokens alone; "
            "objective.kl_place=loss is needed, or 0 here",
        )


def _check_group(config: RunConfig) -> None:
    """Raise ConfigError for what does not fit the group size R."""
    target = config.estimator.target
    name = target.rsplit(".", 1)[-1]
    if config.R == 1 and target in GROUP_BASELINES:
        _fail(
            "R",
            1,
            f"the baseline of estimator={name} needs at least R=2 rollouts in a group; R=1 works with "
            f"estimator=reinforce",
        )
    if config.objective.kl_in_reward and target in UNIT_REWARDS:
        _fail(
            "objective.kl_place",
            config.objective.kl_place,
            f"estimator={name} takes rewards from 0 to 1, and a KL taken off them leaves that range; loss is needed",
        )
    if config.rollout.cut_penalty and target in UNIT_REWARDS:
        allowed = f"estimator={name} takes rewards from 0 to 1, and a penalty leaves that range; 0 is needed"
        _fail("rollout.cut_penalty", config.rollout.cut_penalty, allowed)
    if config.R * config.groups == 1 and target in STEP_BASELINES:
        _fail("trainer.prompts", 1, f"the baseline of estimator={name} needs at least 2 rollouts in a step; set R=2")
    micro = config.trainer.micro_batch
    if micro is not None and (micro < 1 or (micro > config.R and micro % config.R)):
        parts = f", 1 to {config.R - 1} rows to run each group in parts" if config.R > 1 else ""
        _fail("trainer.micro_batch", micro, f"whole groups are needed: a multiple of R={config.R}{parts}, or null")


def _check_tracking(config: RunConfig) -> None:
    tracking = config.tracking
    if tracking.kind not in TRACKING and "." not in tracking.kind:  # a dotted path is imported after these checks
        own = "or give the dotted path of a class, such as tracking.kind=my_module.MyTracker"
        _fail("tracking.kind", tracking.kind, f"choose one of {', '.join(TRACKING)}, {own}")
    if not tracking.experiment:
        _fail("tracking.experiment", "''", "a name is needed")
    if tracking.uri and re.search(r"://[^/]*@", tracking.uri):
        raise ConfigError(
            "tracking.uri: must hold no user name or password, because the configuration is stored; "
            "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD in the environment instead"
        )
    if tracking.kind == "mlflow" and find_spec("mlflow") is None:
        _fail("tracking", "mlflow", "the package mlflow is not installed; install it, or choose tracking=local")


def _fail(key: str, value: object, allowed: str) -> None:
    raise ConfigError(f"{key}={shown(value)}: {allowed}")


def _one_of(key: str, value: object, allowed: tuple[Any, ...]) -> None:
    if value not in allowed:
        _fail(key, value, f"choose one of {', '.join(map(shown, allowed))}")


def _at_least(key: str, value: float, least: float) -> None:
    if value < least:
        _fail(key, value, f"at least {least} is needed")


def _at_most(key: str, value: float, most: float) -> None:
    if value > most:
        _fail(key, value, f"at most {most} is allowed")
