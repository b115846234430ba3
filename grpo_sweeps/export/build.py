"""The folder of one exported model, whole or not there.

The weights are those of the run's optimiser, its float32 copies where the model is in a half type, cast once to the
type that is saved. What a run does not train is taken from where the run took it, which must not have changed since.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from grpo_sweeps.config import ModelConfig, RunConfig
from grpo_sweeps.engine import checkpoint
from grpo_sweeps.engine.checkpoint import Checkpoint, CheckpointError
from grpo_sweeps.engine.policy import DTYPES, Policy, load_policy, not_finite, place_of
from grpo_sweeps.export.card import CARD, card
from grpo_sweeps.files import TEMPORARY_PREFIX, write_text
from grpo_sweeps.sweep.named import frozen_config
from grpo_sweeps.sweep.origin import model_of
from grpo_sweeps.tracking import provenance
from grpo_sweeps.tracking.checkpoints import FOLDER, checkpoints
from grpo_sweeps.tracking.made_by import MadeBy, changes
from grpo_sweeps.tracking.published import is_published
from grpo_sweeps.tracking.status import RunStatus
from grpo_sweeps.tracking.weights import leave
from grpo_sweeps.types import ConfigError


def build(
    run_dir: Path,
    status: RunStatus,
    out: Path,
    step: int | None,
    merge: bool,
    dtype: str | None,
    command: str,
    say: Callable[[str], None],
) -> None:
    """Write the model of a run's checkpoint to `out`.

    Args:
        step: updates behind the checkpoint; None for the newest.
        merge: add the adapter of a LoRA run to the weights below it.
        dtype: of the saved weights; None for the run's.

    Raises:
        ConfigError: for a checkpoint, a model or a choice that cannot be used; nothing is written then.
        OSError: where the folder cannot be written.
    """
    config = frozen_config("export", run_dir)
    _check(config, run_dir, merge)
    found = _checkpoint(run_dir, status, step, say)
    say(f"run {run_dir.name} ({status.name}, {status.state}): checkpoint of step {found.step}")
    policy = load_policy(dataclasses.replace(config.model, gradient_checkpointing=False), torch.device("cpu"))
    adapter = bool(config.model.lora.r) and not merge
    kept = None if adapter else config.model.dtype  # adapters of a half-type model are in float32, and stay so
    chosen = dtype or kept
    model = _trained(policy.model, found, DTYPES[chosen] if chosen else None, merge)
    if name := not_finite(model):
        raise ConfigError(
            f"export: dtype={dtype or config.model.dtype}: the weights {name} are not finite in it; take float32"
        )
    aside = out.with_name(f"{TEMPORARY_PREFIX}{out.name}")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        aside.mkdir(parents=True)
        _save(policy, model, config.model, aside)
        if not adapter:
            leave(aside, config.model.path, config.model.dtype, f"{found.step} updates of run {run_dir.name}")
        write_text(aside / CARD, card(run_dir, status, config, found.step, adapter, dtype, command))
        aside.replace(out)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def _check(config: RunConfig, run_dir: Path, merge: bool) -> None:
    """Raise ConfigError where the run's model cannot be made again as it was."""
    model, lora = config.model, config.model.lora.r > 0
    if merge and not lora:
        raise ConfigError("export: merge=true: the run trained all weights and has no adapter; leave it out")
    if lora and model.random:
        raise ConfigError(
            f"export: run={run_dir.name}: its adapter stands on weights that were drawn (model.random=true) and are "
            "stored nowhere; a run on weights from files, or without LoRA, is needed"
        )
    if lora and not merge and model.path.endswith(".gguf"):
        raise ConfigError(
            f"export: run={run_dir.name}: an adapter on the GGUF file {model.path} cannot be loaded by others; "
            "give merge=true"
        )
    source = provenance.read(run_dir, with_diff=False)
    before = MadeBy(weights=source.made_by.weights) if source else MadeBy()
    if changed := changes(before, MadeBy(weights=model_of(model))):
        raise ConfigError(f"export: run={run_dir.name}: since it ran {changed[0]}; put back {model.path} as it was")


def _checkpoint(run_dir: Path, status: RunStatus, step: int | None, say: Callable[[str], None]) -> Checkpoint:
    """The newest whole checkpoint, or that of a step."""
    kept = checkpoints(run_dir)
    steps = sorted({one.step for one in kept if not one.fault})
    if step is not None and step in steps:
        path = next(run_dir / one.name for one in kept if one.step == step and not one.fault)
        try:
            return checkpoint.load(path, identity=status.identity)
        except CheckpointError as error:
            raise ConfigError(f"export: step={step}: {str(error).rstrip('.')}") from error
    found = checkpoint.latest(run_dir / FOLDER, say=say, identity=status.identity) if step is None else None
    if found is None and is_published(run_dir.parent):
        raise ConfigError(
            f"export: run={run_dir.name}: {run_dir.parent} holds published records, which are without checkpoints; the "
            "folder that the run wrote is needed"
        )
    if found is None:
        asked = "" if step is None else f"step={step}: "
        there = f"there are those of steps {', '.join(map(str, steps))}" if steps else "it has none"
        raise ConfigError(
            f"export: {asked}run={run_dir.name} ({status.state} at step {status.step}) has no such whole checkpoint in "
            f"{run_dir / FOLDER}; {there} (trainer.keep_checkpoints says how many are kept)"
        )
    return found


@torch.no_grad()
def _trained(model: PreTrainedModel, found: Checkpoint, dtype: torch.dtype | None, merge: bool) -> PreTrainedModel:
    """The model with the checkpoint's weights in `dtype`, None for the type that each has in the run; an adapter is
    merged in float32 or wider."""
    trained = _masters(model, found)
    parameters = dict(model.named_parameters())
    types = {name: parameters[name].dtype for name in trained}
    for name, value in trained.items():
        parameters[name].data = value.to(types[name]) if dtype is None else value
    merged: Any = model
    if merge:
        wide = max((p.dtype for p in model.parameters()), key=lambda kind: torch.finfo(kind).bits)
        merged = merged.to(wide if wide == torch.float64 else torch.float32).merge_and_unload()
    return merged if dtype is None else merged.to(dtype)  # type: ignore[no-any-return]


def _masters(model: PreTrainedModel, found: Checkpoint) -> dict[str, Tensor]:
    """Each trained weight by name, of the optimiser where the model holds a rounded one: in the order of its
    parameters, as `MasterAdamW` keeps them."""
    saved = found.state["model"]
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    fits = saved.keys() == parameters.keys() and all(saved[name].shape == p.shape for name, p in parameters.items())
    if not fits:
        raise ConfigError(f"export: {found.path} holds the weights of another model than the run's model.path names")
    rounded = [name for name, value in saved.items() if value.dtype not in (torch.float32, torch.float64)]
    masters = found.state["optimizer"]["masters"]
    return {**saved, **dict(zip(sorted(rounded, key=list(parameters).index), masters, strict=True))}


def _save(policy: Policy, model: PreTrainedModel, config: ModelConfig, folder: Path) -> None:
    """Model, tokenizer and generation configuration: it ends a text where the run's rollouts ended."""
    inner = getattr(model, "get_base_model", lambda: model)()
    inner.config.use_cache = True
    if inner.generation_config is not None:
        inner.generation_config.eos_token_id = list(policy.eos_ids)
        inner.generation_config.pad_token_id = policy.pad_id
    if inner is not model:
        model.peft_config["default"].base_model_name_or_path = place_of(config)
        model.peft_config["default"].revision = config.revision
    model.save_pretrained(folder)
    if inner is not model and inner.generation_config is not None:
        inner.generation_config.save_pretrained(folder)
    policy.tokenizer.save_pretrained(folder)
