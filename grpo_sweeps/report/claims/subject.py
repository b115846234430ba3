"""Are an arm's runs about what the paper measured: its model, task and reward?

By what was trained: the architecture and sizes of the model that a run loaded, that its weights were loaded and trained
(all of them, at a learning rate above 0), the functions of task, reward and estimator. Never by a name: users choose
names freely. What a record does not say counts as another.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grpo_sweeps.models.shapes import SHAPES
from grpo_sweeps.paper import MODEL, MODEL_SHAPES, REWARDS, TASK
from grpo_sweeps.report.claims.finding import ESTIMATORS
from grpo_sweeps.report.read.query import Sweep
from grpo_sweeps.tracking.model import LOADED, SIZES, read_model


def differences(sweep: Sweep, arm: str) -> list[str]:
    """In words, each once, what of an arm's runs is not the paper's; empty where all of it is."""
    found: dict[str, None] = {}
    for run in sweep.runs.loc[sweep.runs["arm"] == arm].itertuples():
        found |= dict.fromkeys(_of_run(sweep.configs[str(run.run)], read_model(Path(str(run.path)))))
    return list(found)


def _of_run(config: Mapping[str, Any], model: Mapping[str, Any]) -> list[str]:
    settings, trainer = _part(config, "model"), _part(config, "trainer")
    found = [_architecture(model)]
    if settings.get("random") or model.get("weights", LOADED) != LOADED:
        found.append("random weights")
    if _part(settings, "lora").get("r"):
        found.append("adapters alone are trained")
    if _part(config, "task").get("_target_") != TASK:
        found.append(f"task {_part(config, 'task').get('name') or 'not recorded'}")
    for name, allowed in (("reward", REWARDS), ("estimator", tuple(ESTIMATORS))):
        target = str(_part(config, name).get("_target_") or "not recorded")
        if target not in allowed and target.rpartition(".")[2] not in allowed:
            found.append(f"{name} {target.removeprefix('grpo_sweeps.')}")
    if not float(trainer.get("lr") or 0) > 0:
        found.append("a policy that is not trained (trainer.lr = 0)")
    return [words for words in found if words]


def _architecture(model: Mapping[str, Any]) -> str:
    """Empty for one of the shapes that the paper may mean."""
    if not model:
        return "an architecture that is not recorded"
    if any(
        all(model.get(name) == SHAPES[shape].get(name) for name in ("model_type", *SIZES)) for shape in MODEL_SHAPES
    ):
        return ""
    width, layers = model.get("hidden_size", "?"), model.get("num_hidden_layers", "?")
    return f"a {model.get('model_type', 'model')} of {layers} layers and width {width}"


def _part(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = config.get(key)
    return found if isinstance(found, Mapping) else {}


def scope(others: list[str]) -> tuple[str, ...]:
    """Which runs a verdict is about where they are not the paper's, and that it says nothing about that model."""
    if not others:
        return ()
    return (
        f"The paper's figures are about {MODEL} on GSM8K, these runs about something else: {', '.join(others)}. "
        f"A claim about {MODEL} is not decided by another model, task or reward.",
    )
