"""Time and peak memory of steps on the same model, interleaved (plain, ours, ..., ours, plain, ...), so that a machine
that slows down slows all of them. A subject that fails becomes a row with its error and does not stop the others."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from grpo_sweeps.benchmarks.setup import drop_grads, free_memory, one_line, spread, synchronize
from grpo_sweeps.benchmarks.subjects import Subject

MB = 2**20
WARM_UP = 4  # steps: the allocator's blocks, and with them the kernels' descriptors, settle over the first three


@dataclass
class Row:
    """What is known of one subject. times_ms: one per round; plain_ms: times of plain in the same rounds, empty where
    plain is not measured; peak_mb: most memory of a step beyond what was in use before it; error: that of its Gram on
    the small case; failed: the error that ended it."""

    note: str = ""
    times_ms: list[float] = field(default_factory=list)
    plain_ms: list[float] = field(default_factory=list)
    peak_mb: float | None = None
    error: float | None = None
    failed: str = ""
    retries: int = 0  # of the allocator within the times

    def pair_with(self, plain: Row | None) -> None:
        """Add plain's time in the round that has just ended; None: plain has failed, and ratios with it."""
        if plain is None:
            self.plain_ms.clear()
        elif self.times_ms:
            self.plain_ms.append(plain.times_ms[-1])

    def as_json(self) -> dict[str, Any]:
        """Medians with their spread; ratio: to plain's time in the same round."""
        if self.failed or not self.times_ms:
            return {"failed": self.failed or "OutOfMemoryError: in the last repeat", "note": self.note}
        result: dict[str, Any] = {"ms": spread(self.times_ms), "times_ms": self.times_ms}
        if self.plain_ms:
            result["plain_ms"] = self.plain_ms
            result["ratio"] = spread([a / b for a, b in zip(self.times_ms, self.plain_ms, strict=True)])
        note = join_notes(self.note, f"{self.retries} allocator retries" if self.retries else "")
        return result | {"peak_mb": self.peak_mb, "error": self.error, "note": note}


def join_notes(*notes: str) -> str:
    return "; ".join(note for note in notes if note)


def attempt(action: Callable[[], Any], model: nn.Module) -> tuple[Any, str]:
    """(result, ""), or (None, the error in one line) after freeing what the failure left behind."""
    try:
        return action(), ""
    except Exception as error:
        failed = one_line(error)
    # After the except clause the error is gone, and with it the frames that held its tensors.
    try:
        drop_grads(model)
        free_memory()
    except RuntimeError as error:  # a device that no longer answers: the rows that follow will say so too
        failed += f"; then {one_line(error)}"
    return None, failed


def time_subjects(
    subjects: dict[str, Callable[[], Subject]],
    model: nn.Module,
    device: torch.device,
    repeats: int,
    apart: Collection[str] = (),
) -> dict[str, Row]:
    """One row per subject: steps to warm up, the last of them for its peak memory (CUDA only), then `repeats` rounds.

    Args:
        subjects: how each is made from the model, which they share.
        apart: those that come afterwards, in rounds of their own with plain, because they fragment the memory and would
            slow the others.
    """
    rows = {name: Row() for name in subjects}
    in_rounds({name: make for name, make in subjects.items() if name not in apart}, rows, model, device, repeats)
    late = {name: make for name, make in subjects.items() if name in apart}
    if late:
        plain = {"plain": subjects["plain"]} if "plain" in subjects else {}
        in_rounds(plain | late, rows | {"plain": Row()}, model, device, repeats)
    return rows


def in_rounds(
    subjects: dict[str, Callable[[], Subject]],
    rows: dict[str, Row],
    model: nn.Module,
    device: torch.device,
    repeats: int,
) -> None:
    """Warm the subjects up and add `repeats` times of each to its row; every other round goes in reverse, so that
    none always comes after the same one."""
    alive: dict[str, Subject] = {}
    for name, make in subjects.items():
        row = rows[name]
        subject, row.failed = attempt(make, model)
        if subject is not None:
            row.peak_mb, row.failed = attempt(lambda s=subject: warm_up(s, device), model)  # type: ignore[misc]
            row.note = subject.note
        if not row.failed:
            alive[name] = subject
        del subject
    for number in range(repeats):
        names = list(alive)
        for name in names if number % 2 == 0 else names[::-1]:
            rows[name].failed = time_once(rows[name], alive[name], device)
            if rows[name].failed:
                del alive[name]
        for name in alive:
            rows[name].pair_with(rows["plain"] if "plain" in alive else None)


def time_once(row: Row, subject: Subject, device: torch.device) -> str:
    """Add one time to `row` and return the error that ended the subject, or "". A subject that changed what it does in
    this step (naive, out of memory) starts its list again: its earlier times were of other work."""
    retries = alloc_retries(device)
    ms, failed = attempt(lambda: timed(subject, device), subject.model)
    if failed:
        return failed
    row.retries += alloc_retries(device) - retries
    if subject.note == row.note:
        row.times_ms.append(ms)
    else:
        row.times_ms.clear()
        row.plain_ms.clear()
        row.note = subject.note
    return ""


def alloc_retries(device: torch.device) -> int:
    """How often the allocator has emptied its cache to serve a request, which costs time."""
    return torch.cuda.memory_stats(device).get("num_alloc_retries", 0) if device.type == "cuda" else 0


def warm_up(subject: Subject, device: torch.device) -> float | None:
    """Run the steps to warm up and return the peak of the last one in MB (2^20 bytes), None on a CPU."""
    peak = None
    for _ in range(WARM_UP):
        with subject.attached():
            peak = peak_mb(subject.step, device)
        drop_grads(subject.model)
    return peak


def peak_mb(step: Callable[[], list[Tensor] | None], device: torch.device) -> float | None:
    if device.type != "cuda":
        step()
        return None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    step()
    torch.cuda.synchronize(device)
    return (torch.cuda.max_memory_allocated(device) - before) / MB


def timed(subject: Subject, device: torch.device) -> float:
    """Milliseconds of one step, between two events of the stream on CUDA, by the clock on a CPU."""
    gc.collect()  # a collection during a step would count towards its time
    with subject.attached():
        synchronize(device)
        if device.type == "cuda":
            with torch.cuda.device(device):
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                start.record()
                subject.step()
                end.record()
                end.synchronize()
            ms = start.elapsed_time(end)
        else:
            begun = time.perf_counter()
            subject.step()
            ms = 1e3 * (time.perf_counter() - begun)
    drop_grads(subject.model)
    return ms


def resident_growth(subject: Subject) -> float | None:
    """Growth of this process's resident high-water mark over two steps, in MB; None where /proc does not tell."""
    before = resident_mb("VmRSS")
    for _ in range(2):
        with subject.attached():
            subject.step()
        drop_grads(subject.model)
    after = resident_mb("VmHWM")
    return None if before is None or after is None else after - before


def resident_mb(name: str) -> float | None:
    status = Path("/proc/self/status")
    if not status.exists():
        return None
    line = next(line for line in status.read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) / 1024
