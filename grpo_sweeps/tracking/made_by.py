"""What made a run, by digests, and what of it differs from what would make it now.

    source.json    {..., "made_by": {"package", "package_bytes", "functions", "data", "weights"}}

A part that is empty is not known (a record of before, a hub's model that was not here yet) and is not compared.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from grpo_sweeps.config import TASK_KEYS
from grpo_sweeps.text import in_a_row
from grpo_sweeps.tracking import digests

STALE = "stale: "  # how the reason begins for which a run is refused
REMEDY = "redo=stale makes it afresh"
HALVES = {"train": "training problems", "held_out": "held-out problems"}


@dataclass(frozen=True)
class MadeBy:
    """package: the syntax of the package's own code, package_bytes: its bytes. functions: "reward._target_=my.reward"
    -> {module: digest}. data: "train" and "held_out" -> number and digest. weights: file of the model -> digest.

    since: the step from which on this is known, for a run that was begun before digests were kept."""

    package: str = ""
    package_bytes: str = ""
    functions: dict[str, dict[str, str]] = field(default_factory=dict)
    data: dict[str, str] = field(default_factory=dict)
    weights: dict[str, str] = field(default_factory=dict)
    since: int = 0

    @property
    def known(self) -> bool:
        """True for a record that says which code made the run."""
        return bool(self.package)

    @property
    def code(self) -> digests.Code:
        return digests.Code(self.package, self.package_bytes)

    def going_on(self, other: MadeBy, step: int) -> MadeBy:
        """What makes a run from `step` on that `other` made so far: the same, as far as that is known."""
        return replace(self.or_else(other), since=other.since if other.known else step)

    def or_else(self, other: MadeBy) -> MadeBy:
        """The same, with what is not known taken from `other`."""
        return replace(
            self,
            functions={**other.functions, **self.functions},
            data=self.data or other.data,
            weights=self.weights or other.weights,
        )


UNKNOWN = MadeBy()


def from_json(content: Any) -> MadeBy:
    """What `asdict` wrote; a part that is missing or of another form is not known."""
    if not isinstance(content, Mapping):
        return UNKNOWN
    empty = asdict(UNKNOWN)
    return MadeBy(**{name: content[name] for name in empty if isinstance(content.get(name), type(empty[name]))})


def other_code(before: MadeBy, now: MadeBy) -> bool | None:
    """True where the package's own code differs; None where one of both is not known."""
    return before.package != now.package if before.known and now.known else None


def changes(before: MadeBy, now: MadeBy) -> list[str]:
    """How the user's own functions, the data and the weights differ: one part of a sentence each, functions of which
    the same modules have changed in one."""
    parts: dict[frozenset[str], tuple[list[str], list[str]]] = {}
    for key, modules in before.functions.items():
        if names := _changed(modules, now.functions.get(key, {})):
            parts.setdefault(frozenset(names), ([], names))[0].append(key)
    found = [f"{in_a_row(keys)}: {_have_changed(names)}" for keys, names in parts.values()]
    if before.data and now.data:
        for half, name in HALVES.items():
            was, is_ = before.data.get(half, ""), now.data.get(half, "")
            if was != is_:
                found.append(f"task: its {name} have changed ({_number(was)}, now {_number(is_)})")
    if names := _changed(before.weights, now.weights):
        found.append(f"model.path: {_have_changed(names)}")
    return found


def _changed(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """The names of other digests; none where one side is not known."""
    return _differing([before, now]) if before and now else []


def _have_changed(names: Sequence[str]) -> str:
    """ "my_reward, my_words have changed" """
    return f"{_listed(names)} {'has' if len(names) == 1 else 'have'} changed"


def _number(words: str) -> str:
    return words.partition(",")[0] or "none"


def mixed(runs: Iterable[tuple[str, Mapping[str, Any], MadeBy]]) -> list[str]:
    """What several versions of made runs of one sweep, one sentence each: a function of one dotted path, the data of
    one task, the weights of one model. runs: (name, configuration, what made it)."""
    versions: dict[tuple[str, str], dict[str, tuple[Mapping[str, str], list[str]]]] = {}
    for name, config, made in runs:
        for key, label, part in _parts(config, made):
            versions.setdefault((key, label), {}).setdefault(digests.joined(part), (part, []))[1].append(name)
    found = []
    for (_, label), of_parts in versions.items():
        if len(of_parts) > 1:
            listed = "; ".join(_listed(names) for _, names in of_parts.values())
            differ = _listed(_differing([part for part, _ in of_parts.values()]))
            found.append(
                f"{label}: {len(of_parts)} versions of it made these runs ({listed}), which differ in {differ}"
            )
    return found


def _differing(parts: Sequence[Mapping[str, str]]) -> list[str]:
    """The names of what is not the same in all, in the order in which they come."""
    names = dict.fromkeys(name for part in parts for name in part)
    return [name for name in names if len({part.get(name) for part in parts}) > 1]


def _parts(config: Mapping[str, Any], made: MadeBy) -> Iterable[tuple[str, str, Mapping[str, str]]]:
    """(what tells it from others, its name for a person, digests) of each part that is known."""
    yield from ((key, key, modules) for key, modules in made.functions.items() if modules)
    task, model = config.get("task"), config.get("model")
    if made.data and isinstance(task, Mapping):
        chosen = {key: value for key, value in task.items() if key not in TASK_KEYS}
        yield f"task {json.dumps(chosen, sort_keys=True, default=str)}", f"task={task.get('_target_')}", made.data
    if made.weights and isinstance(model, Mapping):
        chosen = {key: model.get(key) for key in ("path", "revision", "random")}
        yield f"model {json.dumps(chosen, sort_keys=True)}", f"model.path={model.get('path')}", made.weights


def _listed(names: Sequence[str]) -> str:
    """The first names, and how many more there are."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
