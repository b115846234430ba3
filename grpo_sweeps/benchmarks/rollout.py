"""Tokens a second of rollouts: our engines beside transformers' `generate` and continuous batching, on one model with
random weights, the same prompts and lengths.

    graph        rollout.engine=graph            generate     HF generate, sampling without top-k
    eager        rollout.engine=eager            continuous   transformers' continuous batching

Prompts are read and tokens drawn in the time; capture and compilation are in the first call, whose seconds stand
beside it. The rounds are interleaved, every other one in reverse. No row ends early, so that all make as many tokens.
For our engines the log-probabilities of some rows are compared with a forward over the whole text.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn

from grpo_sweeps.benchmarks.options import RolloutOptions
from grpo_sweeps.benchmarks.setup import (
    DTYPES,
    MODELS,
    check_choice,
    check_positive,
    environment,
    free_memory,
    model_config,
    one_line,
    prepare,
    random_model,
    spread,
    synchronize,
    write_json,
)
from grpo_sweeps.cli import aligned
from grpo_sweeps.config import RolloutConfig
from grpo_sweeps.engine.policy import Policy
from grpo_sweeps.engine.rollouts import Rollout
from grpo_sweeps.engine.samplers.eager import EagerSampler
from grpo_sweeps.engine.samplers.graph import GraphSampler
from grpo_sweeps.types import ConfigError

SUBJECTS = ("graph", "eager", "generate", "continuous")
CHECKED_ROWS = 8
T = TypeVar("T")
Draw = Callable[[], "list[Rollout] | None"]


@dataclass
class Timed:
    """One subject: seconds of its first call and of each round, its rollouts' error, or what ended it."""

    first_s: float = 0.0
    seconds: list[float] = field(default_factory=list)
    difference: dict[str, float] | None = None
    failed: str = ""

    def as_json(self, tokens: int) -> dict[str, Any]:
        if self.failed:
            return {"failed": self.failed}
        rates = [tokens / s for s in self.seconds]
        return {
            "first_s": self.first_s,
            "seconds": spread(self.seconds),
            "times_s": self.seconds,
            "tokens_per_second": spread(rates),
            "logprob_difference": self.difference,
        }


def run(options: RolloutOptions, command: str) -> int:
    """Measure, print a table, write the JSON file where one is asked for; 1 where no subject could be measured."""
    subjects = _checked(options)
    device = prepare(options)
    config = model_config(options.model)
    model = random_model(config, options.dtype, device).eval()
    rows = _prompts(options, config.vocab_size)
    timed, draws = {name: Timed() for name in subjects}, dict[str, Draw]()
    for name in subjects:
        try:
            draws[name] = _subject(name, model, device, rows, options)
        except ConfigError as error:  # an engine that does not serve the model, or the device
            timed[name].failed = str(error)
    _measure(timed, draws, model, options.repeats)
    tokens = len(rows) * options.new
    result = environment("rollout", command, options, device)
    result["rows"] = {name: one.as_json(tokens) for name, one in timed.items()}
    write_json(options.json, result)
    _print(result, options)
    return int(all(one.failed for one in timed.values()))


def _checked(options: RolloutOptions) -> Sequence[str]:
    subjects = SUBJECTS if options.subjects == ("all",) else options.subjects
    for name in subjects:
        check_choice("subjects", name, SUBJECTS)
    check_choice("model", options.model, MODELS)
    check_choice("dtype", options.dtype, tuple(DTYPES))
    check_positive(prompts=options.prompts, R=options.R, new=options.new, repeats=options.repeats)
    if len(options.prompt) != 2 or not 1 <= options.prompt[0] <= options.prompt[1]:
        given = ",".join(map(str, options.prompt))
        raise ConfigError(f"bench: prompt={given}: allowed are two whole numbers from 1, the lesser one first")
    return subjects


def _prompts(options: RolloutOptions, vocabulary: int) -> list[list[int]]:
    """One list of random tokens for each row, R rows of each prompt, of uneven lengths."""
    generator = np.random.default_rng(0)
    lengths = generator.integers(options.prompt[0], options.prompt[1] + 1, options.prompts)
    prompts = [generator.integers(min(3, vocabulary - 1), vocabulary, n).tolist() for n in lengths]
    return [prompt for prompt in prompts for _ in range(options.R)]


def _measure(timed: dict[str, Timed], draws: dict[str, Draw], model: nn.Module, repeats: int) -> None:
    """Call each once, for what is set up then, and `repeats` times in turn."""
    device = next(model.parameters()).device
    for name, draw in draws.items():
        timed[name].first_s, rollouts = _once(timed[name], draw, device)
        if rollouts:
            _, timed[name].difference = _once(timed[name], functools.partial(_difference, model, rollouts), device)
    for number in range(repeats):
        names = [name for name in draws if not timed[name].failed]
        for name in names if number % 2 == 0 else names[::-1]:
            seconds, _ = _once(timed[name], draws[name], device)
            timed[name].seconds.append(seconds)


def _once(timed: Timed, work: Callable[[], T], device: torch.device) -> tuple[float, T | None]:
    """Seconds of the work and what it gave; None where it failed, which ends the subject."""
    found = None
    synchronize(device)
    begun = time.perf_counter()
    try:
        found = work()
        synchronize(device)
    except Exception as error:
        timed.failed = one_line(error)
        free_memory()
    return time.perf_counter() - begun, found


class _NoText:
    """Stands for a tokenizer where no text is needed."""

    all_special_tokens = ()

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        return ""


def _subject(name: str, model: Any, device: torch.device, rows: list[list[int]], options: RolloutOptions) -> Draw:
    no_end = -1  # no token has this id: every row goes to the limit
    if name in ("graph", "eager"):
        policy = Policy(model, _NoText(), (no_end,), 0, device)  # type: ignore[arg-type]
        config = RolloutConfig(max_new_tokens=options.new, batch=len(rows))
        sampler = {"graph": GraphSampler, "eager": EagerSampler}[name](policy)
        return lambda: sampler.sample(rows, range(len(rows)), config)
    if name == "generate":
        return lambda: _generate(model, device, rows, options.new)
    return lambda: _continuous(model, rows, options.new)


def _generate(model: Any, device: torch.device, rows: list[list[int]], new: int) -> None:
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows], device=device)
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=device)
    model.generate(
        ids, attention_mask=mask, do_sample=True, top_k=0, top_p=1.0, temperature=1.0, max_new_tokens=new,
        min_new_tokens=new, pad_token_id=0, eos_token_id=None,
    )  # fmt: skip


def _continuous(model: Any, rows: list[list[int]], new: int) -> None:
    from transformers import GenerationConfig

    settings = GenerationConfig(
        do_sample=True, top_k=0, temperature=1.0, max_new_tokens=new, eos_token_id=-1, pad_token_id=0
    )
    made = model.generate_batch(rows, generation_config=settings)
    tokens = sum(len(one.generated_tokens) for one in made.values())
    if tokens != len(rows) * new:  # what it swallows must not look like speed
        raise RuntimeError(f"{tokens} tokens came back, and {len(rows) * new} were asked for")


@torch.no_grad()
def _difference(model: Any, rollouts: list[Rollout]) -> dict[str, float]:
    """Mean and largest difference of the log-probabilities of some rows to those of a forward over their whole text."""
    device, found = next(model.parameters()).device, []
    for one in rollouts[:: max(1, len(rollouts) // CHECKED_ROWS)]:
        start = len(one.prompt_ids)
        ids = torch.tensor([[*one.prompt_ids, *one.completion_ids]], device=device)
        logprobs_TV = torch.log_softmax(model(input_ids=ids).logits[0, start - 1 : -1].float(), dim=-1)
        whole_T = logprobs_TV.gather(1, ids[0, start:, None])[:, 0]
        found.append(np.abs(whole_T.cpu().numpy() - one.logprobs))
    differences = np.concatenate(found)
    return {"mean": float(differences.mean()), "largest": float(differences.max())}


def _print(result: dict[str, Any], options: RolloutOptions) -> None:
    rows = options.prompts * options.R
    print(f"{options.model}, {options.dtype}, {rows} rows x {options.new} tokens, {result['device']}")
    lines = [("", "tokens/s", "least", "most", "s", "first call, s", "log-prob. difference")]
    for name, row in result["rows"].items():
        if "failed" in row:
            lines.append((name, "-", "-", "-", "-", "-", row["failed"]))
            continue
        rate, seconds, d = row["tokens_per_second"], row["seconds"]["median"], row["logprob_difference"]
        lines.append((
            name, f"{rate['median']:,.0f}", f"{rate['min']:,.0f}", f"{rate['max']:,.0f}", f"{seconds:.2f}",
            f"{row['first_s']:.1f}", f"mean {d['mean']:.4f}, largest {d['largest']:.4f}" if d else "",
        ))  # fmt: skip
    print("\n".join(aligned(lines)))
