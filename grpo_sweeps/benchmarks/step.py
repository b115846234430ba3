"""Seconds of a whole training step, by part: ours with each engine, beside TRL's GRPOTrainer with HF generate.

All take the same prompts, as many rollouts of them, the same limit and the run's own reward, in bfloat16 where the
model's choice says so, with sdpa attention, without checkpointing. Ours measures every group's Gram and keeps float32
masters; TRL does neither. Each subject has its own copy of the weights. Rounds of a few steps are interleaved, every
other one in reverse; the first step of a round warms up again what the others have displaced. TRL ends a rollout at
its end tokens alone: where stop strings cut many, ours has fewer tokens (`tokens` says how many). Groups of equal
rewards have no gradient: ours leaves them out of the backward, TRL does not.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import torch

from grpo_sweeps.benchmarks.options import StepOptions
from grpo_sweeps.benchmarks.setup import (
    NotInstalled,
    check_choice,
    check_positive,
    environment,
    free_memory,
    one_line,
    spread,
    synchronize,
    write_json,
)
from grpo_sweeps.benchmarks.setup import prepare as on_device
from grpo_sweeps.cli import aligned
from grpo_sweeps.config import RunConfig
from grpo_sweeps.config.checks import check
from grpo_sweeps.loop.inner import take_step
from grpo_sweeps.loop.rollouts import rewards_of
from grpo_sweeps.loop.setup import Setup, prepare
from grpo_sweeps.paths import conf_dir
from hydra_plugins.grpo_launcher.registration import composed

SUBJECTS = ("graph", "eager", "trl")
PARTS = ("sample", "backward", "update")
Steps = Callable[[int], "list[dict[str, float]]"]
"""Takes so many steps and gives the seconds of each, and of its parts where they are known, by name."""


@dataclass
class Timed:
    """One subject: seconds of its very first step, and of every counted one with its parts; or what ended it."""

    first_s: float = 0.0
    steps: list[dict[str, float]] = field(default_factory=list)
    note: str = ""
    failed: str = ""

    def as_json(self) -> dict[str, Any]:
        if self.failed or not self.steps:
            return {"failed": self.failed or "no step was counted", "note": self.note}
        names = list(dict.fromkeys(name for one in self.steps for name in one))
        columns = {name: [one[name] for one in self.steps if name in one] for name in names}
        return {"first_s": self.first_s, "note": self.note, "steps": self.steps} | {
            name: spread(values) for name, values in columns.items()
        }


def run(options: StepOptions, command: str) -> int:
    """Measure, print a table, write the JSON file where one is asked for; 1 where no subject could be measured."""
    for name in options.subjects:
        check_choice("subjects", name, SUBJECTS)
    check_choice("model", options.model, sorted(path.stem for path in (conf_dir() / "model").glob("*.yaml")))
    check_positive(prompts=options.prompts, R=options.R, new=options.new, steps=options.steps, repeats=options.repeats)
    device = on_device(options)
    timed = _measure(options, device)
    result = environment("step", command, options, device)
    result["rows"] = {name: one.as_json() for name, one in timed.items()}
    write_json(options.json, result)
    _print(result, options)
    return int(all(one.failed for one in timed.values()))


def _measure(options: StepOptions, device: torch.device) -> dict[str, Timed]:
    timed, subjects = {name: Timed() for name in options.subjects}, dict[str, Steps]()
    for name, one in timed.items():
        try:
            subjects[name] = _trl(options, device, one) if name == "trl" else _ours(options, name)
            one.first_s = one.first_s or subjects[name](1)[0]["step"]
        except Exception as error:
            one.failed = one_line(error)
            free_memory()
    for number in range(options.repeats):
        names = [name for name, one in timed.items() if not one.failed]
        for name in names if number % 2 == 0 else names[::-1]:
            try:
                timed[name].steps += subjects[name](options.steps + 1)[1:]
            except Exception as error:
                timed[name].failed = one_line(error)
                free_memory()
    return timed


def _config(options: StepOptions, engine: str) -> RunConfig:
    words = [f"model={options.model}", f"R={options.R}", f"trainer.prompts={options.prompts}", "tracking=local"]
    words += [f"rollout.engine={engine}", f"rollout.max_new_tokens={options.new}", f"trainer.device={options.device}"]
    words += ["analysis.update_every=0", "trainer.steps=100000", "trainer.eval_every=0"]
    words += [f"model.path={_quoted(options.path)}"] if options.path else []
    words += ["task=gsm8k", f"task.path={_quoted(options.gsm8k)}"] if options.gsm8k else []
    config = RunConfig.from_composed(composed(*words))
    check(config)
    return config


def _quoted(text: str) -> str:
    """A text as Hydra reads it whole, whatever is in it."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _ours(options: StepOptions, engine: str) -> Steps:
    setup = prepare(_config(options, engine))
    done = 0

    def steps(number: int) -> list[dict[str, float]]:
        nonlocal done
        found = []
        for step in range(done, done + number):
            metrics = take_step(setup, step).metrics
            parts = {name: metrics[f"time/{name}"] for name in PARTS}
            tokens = metrics["completions/mean_length"] * options.prompts * options.R
            found.append({"step": metrics["step_time"], **parts, "tokens": tokens})
        done += number
        return found

    return steps


def _trl(options: StepOptions, device: torch.device, timed: Timed) -> Steps:
    """The fastest of its batch sizes, each tried with two steps; the note says all of them."""
    if find_spec("trl") is None:
        raise NotInstalled("trl is not installed: pip install trl")
    setup = prepare(_config(options, "eager"))  # for its prompts, its reward and its weights
    tried: dict[int, float] = {}
    makers: dict[int, Steps] = {}
    for size in options.per_device:
        if (options.prompts * options.R) % size:
            continue
        makers[size] = _trainer(options, setup, size, device)
        try:
            first, second = makers[size](2)
            timed.first_s = timed.first_s or first["step"]
            tried[size] = second["step"]
        except torch.cuda.OutOfMemoryError:
            free_memory()
    if not tried:
        raise RuntimeError(f"no batch size of per_device={options.per_device} divides the step's rows and fits")
    best = min(tried, key=lambda size: tried[size])
    timed.note = ", ".join(f"batch {size}: {seconds:.2f} s" for size, seconds in tried.items()) + f"; {best} counts"
    return makers[best]


def _trainer(options: StepOptions, setup: Setup, size: int, device: torch.device) -> Steps:
    from datasets import Dataset
    from transformers import PrinterCallback, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    problems = {setup.prompt(p): p for p in setup.data.train}
    chat = setup.policy.chat_template
    prompts = [setup.policy.messages(text) if chat else text for text in problems]

    def reward(prompts: Sequence[Any], completions: Sequence[Any], **_: Any) -> list[float]:
        texts = [one[0]["content"] if chat else one for one in completions]
        asked = [one[-1]["content"] if chat else one for one in prompts]
        keys = [(0, "bench", i) for i in range(len(texts))]
        return rewards_of(setup, texts, [problems[ask] for ask in asked], keys, options.R).values

    class Clock(TrainerCallback):  # type: ignore[misc]
        def __init__(self) -> None:
            self.begun, self.seconds = 0.0, list[float]()

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            synchronize(device)
            self.begun = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            synchronize(device)
            self.seconds.append(time.perf_counter() - self.begun)

    def steps(number: int) -> list[dict[str, float]]:
        clock = Clock()
        with tempfile.TemporaryDirectory() as folder:
            settings = GRPOConfig(
                output_dir=folder, per_device_train_batch_size=size, max_steps=number, num_generations=options.R,
                gradient_accumulation_steps=options.prompts * options.R // size, max_completion_length=options.new,
                temperature=setup.config.rollout.temperature, top_p=1.0, top_k=0, beta=0.0, learning_rate=1e-6,
                bf16=device.type == "cuda", use_cpu=device.type == "cpu", gradient_checkpointing=False,
                report_to="none", save_strategy="no", logging_steps=1, disable_tqdm=True, seed=number,
            )  # fmt: skip
            trainer = GRPOTrainer(
                model=setup.policy.model, reward_funcs=reward, args=settings,
                train_dataset=Dataset.from_dict({"prompt": prompts}), processing_class=setup.policy.tokenizer,
                callbacks=[clock],
            )  # fmt: skip
            trainer.remove_callback(PrinterCallback)
            trainer.train()
            logged = [
                one["completions/mean_length"] for one in trainer.state.log_history if "completions/mean_length" in one
            ]
        rows = options.prompts * options.R
        return [{"step": s, "tokens": length * rows} for s, length in zip(clock.seconds, logged, strict=True)]

    return steps


def _print(result: dict[str, Any], options: StepOptions) -> None:
    print(f"{options.model}, {options.prompts} x R={options.R}, at most {options.new} tokens, {result['device']}")
    names = ("step", *PARTS)
    lines = [("", "s", "least", "most", *PARTS, "tokens", "first step, s", "note")]
    for name, row in result["rows"].items():
        if "failed" in row:
            lines.append((name, *["-"] * (len(lines[0]) - 2), row["failed"]))
            continue
        medians = [f"{row[part]['median']:.2f}" if part in row else "-" for part in names]
        ends = (f"{row['step']['min']:.2f}", f"{row['step']['max']:.2f}")
        tokens = f"{statistics.median(one['tokens'] for one in row['steps']):,.0f}"
        lines.append((name, medians[0], *ends, *medians[1:], tokens, f"{row['first_s']:.1f}", row["note"]))
    print("\n".join(aligned(lines)))
