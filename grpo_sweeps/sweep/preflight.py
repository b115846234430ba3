"""Finds before anything is queued what is bound to go wrong: a model that no node can load, a disk that cannot hold the
checkpoints, a request that no node can meet, a GPU that the run will hardly fit.

Sizes are read from the headers of safetensors files, so nothing is loaded and torch is not imported. What cannot be
known (a GGUF file, a model that is not here yet) is skipped. Estimates warn; facts refuse. What is allowed and seldom
meant is noted too: a prompt with a backslash and an n in the place of a line break.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import struct
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_sweeps.config import ModelConfig, RunConfig
from grpo_sweeps.models import families
from grpo_sweeps.models.templates import chat_template, unread
from grpo_sweeps.text import count
from grpo_sweeps.types import ConfigError

GB = 1e9
BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
PROMPT_TOKENS = 256  # tokens assumed beside the new ones in the estimate of a GPU's memory
ROWS = 32  # per micro-batch, where none is set
LAYER_BYTES = 17  # kept for the backward pass: values per token, hidden unit and layer (attention and MLP)
TEXTS = ("prompt", "chat_prompt", "system", "assistant_prefix", "stop")  # of a task, as a command line gives them
# Not before a small letter: TeX has nu and neq.
NO_LINE_BREAK = re.compile(r"\\n(?![a-z])")
EMBEDDED = Path(__file__).resolve().parents[1] / "models" / "tiny"


@dataclass(frozen=True)
class Found:
    """`problems` make the runs impossible, `notes` are worth knowing."""

    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def look(configs: Sequence[RunConfig], gpu_mem_gb: float | None = None) -> Found:
    """Check the models of these runs, the disk, and (where gpu_mem_gb says what a GPU has) the GPU's memory."""
    problems, notes = list[str](), list[str]()
    folders: dict[ModelConfig, Path | None] = {}
    for config in configs:
        if config.model not in folders:
            try:
                folders[config.model] = model_folder(config.model)
            except ConfigError as error:
                folders[config.model] = None
                problems.append(str(error))
    for config in {(config.model, bool(config.analysis.every)): config for config in configs}.values():
        found = [_unknown_to_the_gram(config, folders[config.model]), *_unread(config.model, folders[config.model])]
        problems += [problem for problem in found if problem and problem not in problems]
    notes += dict.fromkeys(note for config in configs for note in _no_line_breaks(config))
    space = _space(configs, folders)
    problems += space.problems
    notes += space.notes
    if gpu_mem_gb is not None:
        needs = {round(gpu_need(config, folders[config.model]) or 0.0, 1): config for config in configs}
        most = max(needs, default=0.0)
        if most > gpu_mem_gb:
            notes.append(
                f"hydra.launcher.gpu_mem_gb={gpu_mem_gb:g}: R={needs[most].R} with model={needs[most].model.name} "
                f"takes about {most:.1f} GB by estimate; fewer rows (trainer.micro_batch) or "
                f"model.gradient_checkpointing=true take less"
            )
    return Found(tuple(problems), tuple(notes))


def _no_line_breaks(config: RunConfig) -> list[str]:
    """A note for each text of the task that spells a line break instead of having one."""
    found = []
    for key in TEXTS:
        value = getattr(config.task, key)
        texts = value if isinstance(value, (list, tuple)) else [value]
        if any(isinstance(text, str) and NO_LINE_BREAK.search(text) for text in texts):
            found.append(
                f"task.{key} holds a backslash and an n, which is no line break: a shell gives one as "
                f'$\'task.{key}="first line\\nsecond line"\', a YAML file as "first line\\nsecond line"'
            )
    return found


def model_folder(model: ModelConfig) -> Path | None:
    """Where a model's files are; None where they are fetched later, or are one GGUF file.

    Raises ConfigError where a file is missing and cannot be fetched, or cannot be read.
    """
    if model.path == "embedded":
        return EMBEDDED
    path = Path(model.path)
    if path.is_file():
        return None
    if not path.is_dir():
        cached = _cached(model)
        if cached is None:
            return None
        path = cached
    _check_files(path, model)
    return path


def _cached(model: ModelConfig) -> Path | None:
    """The folder of a hub's model in the cache. Raises ConfigError when it is not there and may not be fetched."""
    from huggingface_hub import constants, try_to_load_from_cache

    found = try_to_load_from_cache(model.path, "config.json", revision=model.revision)
    if isinstance(found, str):
        return Path(found).parent
    if constants.HF_HUB_OFFLINE:
        raise ConfigError(
            f"model.path={model.path}: not in the cache ({constants.HF_HUB_CACHE}), and HF_HUB_OFFLINE is set; a model "
            f"that is in the cache is needed (fetch it with a network by: hf download {model.path}), or a local folder"
        )
    return None


def _check_files(folder: Path, model: ModelConfig) -> None:
    """Raise ConfigError unless all of a model's weights are there and readable."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (OSError, ValueError, KeyError, AttributeError) as error:
            raise ConfigError(f"model.path={model.path}: {index} cannot be read ({error}); fetch it anew") from error
    else:
        names = [path.name for path in folder.iterdir() if path.suffix in (".safetensors", ".bin")]
    if model.random:
        names = []
    elif not names:
        raise ConfigError(
            f"model.path={model.path}: {folder} holds no weights (*.safetensors or *.bin); give a folder that does, or "
            f"model.random=true"
        )
    for name in ("config.json", *names):
        if not os.access(folder / name, os.R_OK):
            raise ConfigError(f"model.path={model.path}: {folder / name} is missing or not readable; fetch it anew")


def _unknown_to_the_gram(config: RunConfig, folder: Path | None) -> str:
    """Why a run of this model would fail at its first step, by the model's config.json; "" where it would not."""
    try:
        shape = json.loads((folder / "config.json").read_text(encoding="utf-8")) if folder is not None else {}
    except (OSError, ValueError):
        return ""  # loading says it better
    if not isinstance(shape, Mapping):
        return ""
    key = f"model.path={config.model.path}: a model of type {families.text_shape(shape).get('model_type')}"
    if reason := families.unscored(shape):
        return f"{key} cannot be trained here: {reason}; docs/models.md lists what can"
    if config.analysis.every and not config.model.lora.r and (reason := families.unmeasured(shape)):
        adapters = "model.lora.r=8 model.lora.targets='q_proj,v_proj' measures adapters of the attention, "
        adapters = "" if reason == families.NO_ATTENTION else adapters
        return f"{key} cannot be measured: {reason}; {adapters}analysis.every=0 nothing; docs/models.md lists more"
    return ""


def _unread(model: ModelConfig, folder: Path | None) -> list[str]:
    """Arguments of the chat template that it does not read, where the model's files have one."""
    template = chat_template(folder) if folder is not None and model.chat_template_kwargs else ""
    return list(unread(model.path, model.chat_template_kwargs, template)) if template else []


def parameters(folder: Path | None) -> int | None:
    """The number of a model's parameters, from the headers of its safetensors files; None where there are none."""
    if folder is None:
        return None
    total = 0
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with open(path, "rb") as file:
                (length,) = struct.unpack("<Q", file.read(8))
                header = json.loads(file.read(min(length, 100_000_000)))
        except (OSError, ValueError, struct.error):
            return None  # another format: its size says nothing
        total += sum(math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")
    return total or None


def checkpoint_bytes(config: RunConfig, folder: Path | None) -> int:
    """Estimated size of one checkpoint: float32 weights and both moments, and the weights in half precision."""
    count = parameters(folder)
    if count is None or config.model.lora.r:
        return 0
    return count * (12 + (2 if BYTES[config.model.dtype] == 2 else 0))


def kept_bytes(config: RunConfig, folder: Path | None) -> int:
    """Estimated size of the checkpoints that a run keeps and the one that is being written."""
    return checkpoint_bytes(config, folder) * (config.trainer.keep_checkpoints + 1)


def free_bytes(runs_dir: str) -> int:
    """What is free where the runs will be."""
    path = Path(runs_dir).absolute()
    return shutil.disk_usage(next(place for place in (path, *path.parents) if place.exists())).free


def _space(configs: Sequence[RunConfig], folders: Mapping[ModelConfig, Path | None]) -> Found:
    """Check that the disk has room for the checkpoints that are kept and the one that is being written."""
    if not configs:
        return Found()
    free = free_bytes(configs[0].runs_dir)
    needs = [kept_bytes(config, folders.get(config.model)) for config in configs]
    text = f"runs_dir={configs[0].runs_dir}: {free / GB:.1f} GB are free, and"
    if max(needs) > free:
        most = max(needs) / GB
        problem = f"{text} the checkpoints of one run take about {most:.1f} GB; make room, or choose another folder"
        return Found(problems=(problem,))
    if sum(needs) > free:
        return Found(notes=(f"{text} the checkpoints of {count(len(configs))} take about {sum(needs) / GB:.1f} GB",))
    return Found()


def gpu_need(config: RunConfig, folder: Path | None) -> float | None:
    """Estimated GB of GPU memory: weights, gradients, optimiser, what a backward pass keeps. None: unknown."""
    count = parameters(folder)
    if count is None or folder is None:
        return None
    width = BYTES[config.model.dtype]
    half = width == 2
    trained = 0 if config.model.lora.r else count
    fixed = count * width + trained * (width + 8 + (8 if half else 0))  # moments; master and its gradient beside a half
    try:
        shape = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        layers, hidden = int(shape["num_hidden_layers"]), int(shape["hidden_size"])
        vocabulary = int(shape["vocab_size"])
    except (OSError, ValueError, KeyError, TypeError):
        return fixed / GB
    rows = config.trainer.micro_batch or max(config.R, ROWS // config.R * config.R)
    tokens = rows * (config.rollout.max_new_tokens + PROMPT_TOKENS)
    kept = 2 if config.model.gradient_checkpointing else LAYER_BYTES
    backward = tokens * (layers * hidden * kept * width + vocabulary * 4)
    return (fixed + backward) / GB


@dataclass(frozen=True)
class Nodes:
    """One kind of a partition's nodes, as sinfo lists them."""

    mem_mb: float
    cpus: int
    gpus: int
    minutes: float  # the partition's longest job


def check_nodes(params: Mapping[str, Any], listing: str | None = None) -> str:
    """Refuse (ConfigError) what no node of the partition can ever give; returns a note where sinfo does not tell.

    A cluster may accept such a job and let it wait for ever. listing: sinfo's lines; None: call it.
    """
    if listing is None:
        listing = _sinfo()
    nodes = parse_nodes(listing, params.get("partition"))
    if not nodes:
        return "" if listing else "sinfo does not answer: what the jobs ask for is not compared with the nodes"
    wants = (
        ("mem_gb", "GB", [node.mem_mb / 1024 for node in nodes]),
        ("cpus_per_task", "CPUs", [float(node.cpus) for node in nodes]),
        ("gpus_per_node", "GPUs", [float(node.gpus) for node in nodes]),
        ("timeout_min", "minutes", [node.minutes for node in nodes]),
    )
    where = f"partition {params['partition']}" if params.get("partition") else "the default partition"
    for key, unit, have in wants:
        if float(params.get(key) or 0) > max(have):
            raise ConfigError(
                f"hydra.launcher.{key}={params[key]:g}: no node of {where} can ever give it; at most {max(have):g} "
                f"{unit} are allowed"
            )
    asked = [(key, float(params.get(key) or 0)) for key, _, _ in wants]
    if not any(all(value <= has[index] for index, (_, value) in enumerate(asked)) for has in _each(nodes)):
        together = " ".join(f"hydra.launcher.{key}={value:g}" for key, value in asked if value)
        raise ConfigError(f"{together}: no node of {where} can ever give all of it; ask for less of one")
    return ""


def _each(nodes: Iterable[Nodes]) -> list[tuple[float, ...]]:
    return [(node.mem_mb / 1024, node.cpus, node.gpus, node.minutes) for node in nodes]


def _sinfo() -> str:
    command = ["sinfo", "-h", "-e", "-o", "%P|%m|%c|%G|%l"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def parse_nodes(listing: str, partition: str | None) -> list[Nodes]:
    """The kinds of nodes of the named partitions, or of the default one (marked by a star), from sinfo's lines of
    "partition|memory|CPUs|GRES|time limit"."""
    named = set(partition.split(",")) if partition else None
    found = []
    for line in listing.splitlines():
        name, memory, cpus, gres, limit = (*line.strip().split("|"), "", "", "", "", "")[:5]
        if (name.endswith("*") if named is None else name.rstrip("*") in named) and memory:
            gpus = sum(int(number) for number in re.findall(r"gpu(?::[^:,()]+)?:(\d+)", gres))
            found.append(Nodes(float(memory.rstrip("+")), int(cpus.rstrip("+")), gpus, _minutes(limit)))
    return found


def _minutes(limit: str) -> float:
    """The minutes of a time limit as SLURM writes it: "1-02:30:00", "30:00" or "infinite"."""
    found = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", limit)
    if not found:
        return math.inf
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return days * 1440 + hours * 60 + minutes + seconds / 60
