"""What MLflow holds beside the records: runs that were copied from this folder of runs and whose own folder is gone.

A run is one of these where its tags name this folder of runs (`mlflow_place`: its id and its path) and no note
(mlflow.json) of a folder in it names the run. Runs of other places, of other people and of versions that did not say
where a run came from are never among them, nor is a run whose folder is there and has not been copied yet.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from grpo_sweeps.tracking.mlflow_copy import FILE_NAME, key, read_note
from grpo_sweeps.tracking.mlflow_place import PLACE, Place, read_place
from grpo_sweeps.tracking.mlflow_store import Store

MOST_NAMED = 10


@dataclass(frozen=True)
class _Here:
    """The ids of runs that folders name, and the folders (sweep, identity; "" for a sweep's own) that name none."""

    named: frozenset[str]
    silent: frozenset[tuple[str, str]]


def beside(store: Store, runs_dir: Path, sweep: str | None, prune: bool) -> list[str]:
    """See `mlflow_tracker.MLflowTracker.beside`."""
    place = read_place(runs_dir)
    if place is None:
        return []
    found = _without_folder(store, place, runs_dir, sweep)
    if not found:
        return []
    if prune:
        for run_id, _ in found:
            store.delete(run_id)
    names = ", ".join(f"{name} ({run_id})" for run_id, name in found[:MOST_NAMED])
    names += f" and {len(found) - MOST_NAMED} more" if len(found) > MOST_NAMED else ""
    runs = "1 run was" if len(found) == 1 else f"{len(found)} runs were"
    what = "deleted in MLflow (mlflow runs restore brings a run back)" if prune else "prune=true deletes them there"
    return [
        f"experiment {store.experiment}: {runs} copied from folders that are no longer in {runs_dir}: {names}; {what}."
    ]


def _without_folder(store: Store, place: Place, runs_dir: Path, sweep: str | None) -> list[tuple[str, str]]:
    """(id, sweep/name) of each run of this place that no folder stands for, sorted by name."""
    here, found = _here(runs_dir, key(store.uri, store.experiment)), []
    for run_id, name, tags in store.find_all({PLACE: place.id}):
        kind, of = tags.get("grpo_sweeps.kind"), tags.get("grpo_sweeps.sweep", "")
        if kind not in ("run", "sweep") or not place.made(tags) or run_id in here.named:
            continue
        if (of, "" if kind == "sweep" else tags.get("identity", "")) in here.silent:
            continue
        if sweep is None or of == sweep or not (runs_dir / of).is_dir():
            found.append((run_id, of if kind == "sweep" else f"{of}/{name}"))
    return sorted(found, key=lambda one: (one[1], one[0]))


def _here(runs_dir: Path, store_key: str) -> _Here:
    named, silent = set(), set()
    for pattern, depth in (("[!.]*", 1), ("[!.]*/[!.]*", 2)):
        for folder in runs_dir.glob(pattern):
            if not folder.is_dir():
                continue
            owner = (folder.name, "") if depth == 1 else (folder.parent.name, folder.name)
            try:
                run_id = read_note(folder / FILE_NAME)["stores"].get(store_key, {}).get("run_id")
            except (OSError, ValueError, KeyError, TypeError, AttributeError):
                run_id = None
            if run_id is None:
                silent.add(owner)
            else:
                named.add(run_id)
    return _Here(frozenset(named), frozenset(silent))
