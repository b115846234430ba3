"""The model card of an exported model: README.md, with the header that the hub reads."""

from __future__ import annotations

import re
from pathlib import Path

import pandas as pd
import yaml

from grpo_sweeps import __version__
from grpo_sweeps.config import RunConfig
from grpo_sweeps.models import tiny_path
from grpo_sweeps.publish.formats import markdown, number
from grpo_sweeps.publish.page import utc
from grpo_sweeps.redaction import redact, redact_mapping
from grpo_sweeps.text import count
from grpo_sweeps.tracking import provenance
from grpo_sweeps.tracking.local import read_metrics
from grpo_sweeps.tracking.made_by import MadeBy
from grpo_sweeps.tracking.status import RunStatus

CARD = "README.md"
EVALUATED = "eval/"
EMBEDDED_LICENSE = "mit"  # models/tiny/README.md


def card(
    run_dir: Path, status: RunStatus, config: RunConfig, step: int, adapter: bool, dtype: str | None, command: str
) -> str:
    """The card's text: run, code, data, and accuracy and reward on held-out problems before training and after
    `step` updates."""
    source = provenance.read(run_dir, with_diff=False)
    rows = _facts(run_dir, status, config, step, dtype, source.made_by if source else MadeBy())
    parts = [
        f"---\n{yaml.safe_dump(_header(config, adapter), sort_keys=True)}---",
        f"# {_title(config)}",
        f"{'A LoRA adapter' if adapter else 'A model'} trained by reinforcement learning with grpo_sweeps "
        f"{__version__}: {count(step, 'update')}, {count(config.R, 'rollout')} a prompt.",
        markdown(("", "this model"), rows).rstrip(),
        f"## {'Accuracy and reward' if config.task.judged else 'Reward'} on held-out problems",
        _accuracy(read_metrics(run_dir), step),
        "## How it was made",
        f"Trained by `{_code(redact(status.command or 'a command that is not known'))}` and written by "
        f"`{_code(redact(command))}`.",
    ]
    return "\n\n".join(parts) + "\n"


def _header(config: RunConfig, adapter: bool) -> dict[str, object]:
    """What the hub reads. A license only where the model that was trained says which."""
    header: dict[str, object] = {
        "library_name": "peft" if adapter else "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["grpo", "grpo_sweeps", *(["lora"] if config.model.lora.r else [])],
    }
    if _is_hub(config):
        header["base_model"] = config.model.path
    if found := license_of(config):
        header["license"] = found
    return header


def license_of(config: RunConfig) -> str:
    """The license of the model that was trained, as its own card says; "" where that is not known."""
    if config.model.path == "embedded":
        return EMBEDDED_LICENSE
    path = Path(config.model.path).expanduser()
    folder = path.parent if path.is_file() else path
    place: object = folder / CARD if folder.is_dir() else None
    if _is_hub(config):
        from huggingface_hub import try_to_load_from_cache

        place = try_to_load_from_cache(config.model.path, CARD, revision=config.model.revision)
    if not isinstance(place, str | Path) or not Path(place).is_file():
        return ""
    header = re.match(r"---\n(.*?)\n---", Path(place).read_text(encoding="utf-8", errors="replace"), re.DOTALL)
    try:
        content = yaml.safe_load(header[1]) if header else None
    except yaml.YAMLError:  # a card that the hub cannot read either
        return ""
    found = content.get("license") if isinstance(content, dict) else None
    return found if isinstance(found, str) else ""


def _is_hub(config: RunConfig) -> bool:
    path = config.model.path
    return path != "embedded" and not path.endswith(".gguf") and not Path(path).expanduser().exists()


def _title(config: RunConfig) -> str:
    return f"{config.model.name}, trained on {config.task.name}"


def _facts(
    run_dir: Path, status: RunStatus, config: RunConfig, step: int, dtype: str | None, made_by: MadeBy
) -> list[tuple[str, str]]:
    changed = {True: ", with uncommitted changes", False: "", None: ""}[status.dirty]
    data = ", ".join(f"{half.replace('_', '-')} {words}" for half, words in made_by.data.items())
    lora = config.model.lora
    how = f"LoRA, r={lora.r}, alpha={lora.alpha}, {lora.targets}" if lora.r else "all weights"
    arguments = redact_mapping({"task": config.task.function.kwargs})["task"]
    said = ", ".join(f"{key}={value}" for key, value in arguments.items())
    trainer = config.trainer
    return [
        ("run", f"{status.identity or run_dir.name} ({status.name}), sweep {run_dir.parent.name}"),
        ("updates", f"{step} of {status.total} ({status.state})"),
        ("commit", f"{status.commit or 'unknown'}{changed}; code {made_by.package or 'unknown'}"),
        ("started", utc(status.started) or "unknown"),
        ("trained from", redact(config.model.path if config.model.path != "embedded" else str(tiny_path().name))),
        ("trained", f"{how}; learning rate {trainer.lr:g}, {count(trainer.prompts, 'prompt')} a step; weights in "
         f"{config.model.dtype}, saved in {dtype or config.model.dtype}"),
        ("data", f"{config.task.name}: {config.task.function.target}({said}); {data or 'digest unknown'}"),
        ("reward", redact(config.reward.target)),
        ("estimator", config.estimator.target),
        ("sampling", f"temperature {config.rollout.temperature:g}, at most {config.rollout.max_new_tokens} tokens"),
        ("prompt", repr(getattr(config.task, config.prompt_key))),
        ("license of the model it was trained from", license_of(config) or "not known"),
    ]  # fmt: skip


def _accuracy(metrics: pd.DataFrame, step: int) -> str:
    """A table of every number of the evaluations before the first and after the last of `step` updates."""
    names = sorted(name for name in metrics.columns if name.startswith(EVALUATED))
    rows = metrics[metrics["step"] <= step].dropna(subset=names, how="all") if names else metrics[:0]
    if not len(rows):
        return "The run made no evaluation up to here."
    first, last = rows.iloc[0], rows.iloc[-1]
    header = ("", *(f"after {count(int(row['step']), 'update')}" for row in (first, last)))
    cells = [(name.removeprefix(EVALUATED), number(first[name], 3), number(last[name], 3)) for name in names]
    table = markdown(header, cells).rstrip()
    return table if int(last["step"]) == step else f"{table}\n\nNot evaluated after {count(step, 'update')}."


def _code(text: str) -> str:
    return " ".join(text.replace("`", "'").split())
