"""Forward and backward of one micro-batch, plain and measured, on the same model with the same blockwise head.

Times are interleaved (plain, measured, plain, ...), so that a machine that slows down slows both. Peak memory: on
CUDA the allocator's high-water mark over one step; on a CPU the resident set's, each in a process of its own. Both
are given without the weights and what was there before the step.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from grpo_sweeps.engine.gram import GradientGram
from grpo_sweeps.engine.head import completion_log_probs
from grpo_sweeps.models import tiny_path
from grpo_sweeps.models.shapes import SHAPES, shape_config
from grpo_sweeps.types import ConfigError

DTYPES = {name: getattr(torch, name) for name in ("float64", "float32", "bfloat16", "float16")}
OWN_SHAPES: dict[str, dict[str, Any]] = {
    "test": {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2, "vocab_size": 256},
    "llama_512": {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8, "vocab_size": 16_000},
}


@dataclass(frozen=True)
class Options:
    """groups of R rows, T tokens a row of which the first `prompt` are not scored; one thread a CPU unless `threads`
    says."""

    model: str = "tiny"
    R: int = 8
    groups: int = 1
    T: int = 128
    prompt: int = 1
    device: str = "auto"
    dtype: str = "float32"
    form: str = "auto"
    block_mb: float = 0.0  # 0 = the default of the device
    checkpointing: bool = False
    threads: int = 0
    repeats: int = 7
    json: str = ""
    peak_of: str = ""  # the child processes' own: plain or measured


@dataclass
class Subject:
    """The model and the two steps that are compared."""

    plain: Callable[[], None]
    measured: Callable[[], None]
    device: torch.device
    parameters: int


def run(options: Options) -> None:
    """Print the comparison; with json=path also write it."""
    check(options)
    if options.threads:
        torch.set_num_threads(options.threads)
    if options.peak_of:
        print(json.dumps(resident_growth(options)))
        return
    subject = build(options)
    result: dict[str, Any] = {
        "options": asdict(options),
        "torch": torch.__version__,
        "device": device_name(subject.device),
    }
    result["parameters"] = subject.parameters
    times = interleaved(subject, options.repeats)
    result |= {name: summary(values) for name, values in times.items()}
    result["ratio"] = summary([m / p for m, p in zip(times["measured"], times["plain"], strict=True)])
    result["peak_mb"] = peaks(subject, options)
    if options.json:
        Path(options.json).write_text(json.dumps(result, indent=1) + "\n")
    print_table(result)


def check(options: Options) -> None:
    if options.model not in ("tiny", *OWN_SHAPES, *SHAPES):
        raise ConfigError(f"bench: model={options.model}: allowed are {', '.join(['tiny', *OWN_SHAPES, *SHAPES])}")
    if options.dtype not in DTYPES:
        raise ConfigError(f"bench: dtype={options.dtype}: allowed are {', '.join(DTYPES)}")
    positive = min(options.R, options.groups, options.repeats, options.prompt) >= 1
    if not positive or options.prompt >= options.T:
        raise ConfigError("bench: R, groups, repeats and prompt must be positive and T larger than prompt")
    if options.form not in ("auto", "blocks", "ghost"):
        raise ConfigError(f"bench: form={options.form}: allowed are auto, blocks and ghost")


def random_model(options: Options, device: torch.device) -> nn.Module:
    """The architecture with random weights; needs no files."""
    from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

    config: Any
    if options.model == "tiny":
        config = AutoConfig.from_pretrained(tiny_path())
    elif options.model in OWN_SHAPES:
        heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "tie_word_embeddings": True}
        config = LlamaConfig(**OWN_SHAPES[options.model], **heads)
    else:
        config = shape_config(options.model)
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=DTYPES[options.dtype], attn_implementation="sdpa")
    if options.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train(options.checkpointing)  # type: ignore[no-any-return]


def build(options: Options) -> Subject:
    name = options.device if options.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    model = random_model(options, device)
    rows = options.groups * options.R
    generator = torch.Generator().manual_seed(0)
    vocabulary = model.get_input_embeddings().weight.shape[0]  # type: ignore[operator]
    ids = torch.randint(0, vocabulary, (rows, options.T), generator=generator).to(device)
    attention = torch.ones_like(ids)
    completion = attention.clone()
    completion[:, : options.prompt] = 0
    weights = torch.randn(rows, generator=generator).to(device)
    gram = GradientGram(model, options.form, int(options.block_mb * 2**20) or None)  # type: ignore[arg-type]

    def row_sums() -> Tensor:
        return completion_log_probs(model, ids, attention, completion).sum(1)

    def plain() -> None:
        (row_sums() * weights).sum().backward()
        model.zero_grad()

    def measured() -> None:
        with gram.measure([options.R] * options.groups, weights) as m:
            row_sums().sum().backward()
        m.matrices()
        model.zero_grad()

    return Subject(plain, measured, device, sum(p.numel() for p in model.parameters()))


def interleaved(subject: Subject, repeats: int) -> dict[str, list[float]]:
    """Seconds of each step, plain and measured in turn; two of each first, to warm up."""
    times: dict[str, list[float]] = {"plain": [], "measured": []}
    for repeat in range(repeats + 2):
        for name, values in times.items():
            synchronize(subject.device)
            start = time.perf_counter()
            getattr(subject, name)()
            synchronize(subject.device)
            if repeat >= 2:
                values.append(time.perf_counter() - start)
    return times


def peaks(subject: Subject, options: Options) -> dict[str, float]:
    """Most memory of a step beyond what was there before it, in MB (2^20 bytes)."""
    if subject.device.type != "cuda":
        return {name: resident_of_child(replace(options, peak_of=name, json="")) for name in ("plain", "measured")}
    found = {}
    for name in ("plain", "measured"):
        torch.cuda.synchronize(subject.device)
        torch.cuda.reset_peak_memory_stats(subject.device)
        before = torch.cuda.memory_allocated(subject.device)
        getattr(subject, name)()
        torch.cuda.synchronize(subject.device)
        found[name] = (torch.cuda.max_memory_allocated(subject.device) - before) / 2**20
    return found


def resident_of_child(options: Options) -> float:
    words = [
        f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in asdict(options).items()
    ]
    command = [sys.executable, "-m", "grpo_sweeps.bench", "gram", *words]
    # Blocks above 64 KB go back to the system when freed: what is resident is what tensors hold, not what malloc kept.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(2**16)}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    return float(json.loads(done.stdout.splitlines()[-1]))


def resident_growth(options: Options) -> float:
    """Growth of this process's resident high-water mark over two steps, in MB."""
    subject = build(options)
    before = resident_mb("VmRSS")
    for _ in range(2):
        getattr(subject, options.peak_of)()
    return resident_mb("VmHWM") - before


def resident_mb(field: str) -> float:
    """From /proc; NaN on systems without it."""
    status = Path("/proc/self/status")
    if not status.exists():
        return float("nan")
    line = next(line for line in status.read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) / 1024


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu, {torch.get_num_threads()} threads"


def summary(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def print_table(result: dict[str, Any]) -> None:
    o = result["options"]
    print(
        f"{o['model']} ({result['parameters'] / 1e6:.1f} M parameters, {o['dtype']}), {o['groups']} x R={o['R']}, "
        f"T={o['T']}, "
        f"{result['device']}, torch {result['torch']}; median [min, max] of {o['repeats']}"
    )
    print(f"{'step':<10}{'ms':>10}{'[min, max]':>24}{'peak MB beyond weights':>26}")
    for name in ("plain", "measured"):
        t = {key: 1e3 * value for key, value in result[name].items()}
        spread = f"[{t['min']:.1f}, {t['max']:.1f}]"
        print(f"{name:<10}{t['median']:>10.1f}{spread:>24}{result['peak_mb'][name]:>26.0f}")
    r = result["ratio"]
    spread = f"[{r['min']:.3f}, {r['max']:.3f}]"
    more = result["peak_mb"]["measured"] / result["peak_mb"]["plain"]
    print(f"{'ratio':<10}{r['median']:>10.3f}{spread:>24}{more:>26.2f}")
