"""Random shapes through every kernel entry against float64 of the same inputs: worst error, paths taken, crashes.

Allowed are 4 machine epsilons of a half type, 16 of a wider one. index=N repeats shape N alone.
"""

from __future__ import annotations

import multiprocessing
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

import torch

from grpo_sweeps.benchmarks.options import ShapesOptions
from grpo_sweeps.benchmarks.setup import (
    DTYPES,
    check_choice,
    check_positive,
    device_of,
    environment,
    one_line,
    synchronize,
    write_json,
)
from grpo_sweeps.benchmarks.shape_cases import FORCED, LAYOUTS, case_of, draw, errors_of
from grpo_sweeps.engine.gram.layout import HALF_TYPES
from grpo_sweeps.engine.gram.linear import MAX_FUSED_ROWS, kernels
from grpo_sweeps.types import ConfigError

CUDA_WORKERS = 8  # processes that share the card: a shape's kernel is compiled by one core
ALLOWED = {torch.float64: 16.0, torch.float32: 16.0, torch.float16: 4.0, torch.bfloat16: 4.0}  # machine epsilons
CHUNK = 10  # shapes that a process takes at a time
REFERENCE = ("blocks", "reference")  # where a kernel could not take the shape


def run(options: ShapesOptions, command: str) -> int:
    """Print a line per entry and path, and every shape that failed; the exit code, 1 where one did."""
    check_choice("dtype", options.dtype, list(DTYPES))
    check_positive(count=options.count, tokens=options.tokens)
    if options.work < 1e4:
        raise ConfigError(f"bench: work={options.work:g}: allowed are numbers from 1e4")
    for key, least in (("seed", 0), ("workers", 0), ("index", -1)):
        if getattr(options, key) < least:
            raise ConfigError(f"bench: {key}={getattr(options, key)}: allowed are whole numbers from {least}")
    device = device_of(options.device)
    begun = time.perf_counter()
    results = list(measured(options, device))
    result = environment("shapes", command, options, device)
    result |= summary(results, ALLOWED[DTYPES[options.dtype]])
    result["seconds"] = time.perf_counter() - begun
    result["shapes"] = results
    write_json(options.json, result)
    print_table(result)
    return int(bool(result["crashes"] or result["beyond"]))


def measured(options: ShapesOptions, device: torch.device) -> Iterator[dict[str, Any]]:
    """One result per shape, in order."""
    indices = range(options.count) if options.index < 0 else range(options.index, options.index + 1)
    chunks = [indices[low : low + CHUNK] for low in range(0, len(indices), CHUNK)]
    workers = min(len(chunks), options.workers or (CUDA_WORKERS if device.type == "cuda" else 1))
    if device.type == "cuda" and len(indices) > CHUNK:
        compile_fused(DTYPES[options.dtype], device)
    if workers == 1:
        for chunk in chunks:
            yield from one_chunk(options, chunk)
        return
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        for results in pool.map(one_chunk, [options] * len(chunks), chunks):
            yield from results


def compile_fused(dtype: torch.dtype, device: torch.device) -> None:
    """Compile every variant of the fused kernel before the processes start, so that they find it in the cache
    folder."""
    fused: Any = kernels("fused") if dtype in HALF_TYPES else None
    if fused is None or torch.cuda.get_device_capability(device)[0] != 9:
        return
    launches = set()
    for layout in LAYOUTS:
        for units in (layout, (sum(layout),)):
            last = len(units) - 1
            launches |= {(size, k > 0, k < last) for k, size in enumerate(units) if max(units) <= MAX_FUSED_ROWS}
    variants = [
        tuple(fused.options(size, dtype, first, read, write))
        for size, read, write in sorted(launches)
        for first in (True, False)
    ]
    with ThreadPoolExecutor() as pool:
        list(pool.map(fused.binary, variants))


def one_chunk(options: ShapesOptions, indices: Sequence[int]) -> list[dict[str, Any]]:
    """Results of some shapes in this process."""
    device = device_of(options.device)
    torch.backends.cuda.matmul.allow_tf32 = False
    return [one_shape(options, index, device) for index in indices]


def one_shape(options: ShapesOptions, index: int, device: torch.device) -> dict[str, Any]:
    """{"path", "gram", "gradient", "wide"} or {"crash"} beside the shape itself."""
    dtype = DTYPES[options.dtype]
    shape = draw(options.seed, index, options.tokens, options.work, dtype, device)
    result: dict[str, Any] = asdict(shape) | {"text": str(shape), "padded": min(shape.lengths) < shape.T}
    begun = time.perf_counter()
    try:
        errors, path = errors_of(case_of(shape, dtype, device, options.seed))
        result |= asdict(errors) | {"path": path}
        synchronize(device)  # an error of a kernel shows here at the latest
    except Exception as error:  # whatever it is, it would have ended a run
        result["crash"] = one_line(error)
    result["seconds"] = time.perf_counter() - begun
    return result


def summary(results: Sequence[dict[str, Any]], allowed: float) -> dict[str, Any]:
    """Worst errors and shares by entry and path; crashes, and shapes beyond the allowed number of epsilons."""
    crashes = [r for r in results if "crash" in r]
    good = [r for r in results if "crash" not in r]
    beyond = [r for r in good if not max(r["gram"], r["gradient"]) <= allowed]
    parts: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for r in good:
        parts[f"{r['entry']} {r['path']}"].append(r)
    paths: dict[str, int] = defaultdict(int)
    for r in good:
        paths[r["path"]] += 1
    return {
        "count": len(results),
        "allowed": allowed,
        "crashes": len(crashes),
        "beyond": len(beyond),
        "failed": [{"shape": r["text"], "error": r["crash"]} for r in crashes]
        + [{"shape": r["text"], "error": f"{r['gram']:.3g} and {r['gradient']:.3g} epsilons"} for r in beyond],
        "worst": worst(good),
        "share_by_path": {path: count / max(1, len(good)) for path, count in sorted(paths.items())},
        "share_of_reference": reference_share(good),
        "parts": {key: worst(part) | {"count": len(part)} for key, part in sorted(parts.items())},
    }


def reference_share(results: Iterable[dict[str, Any]]) -> float:
    """Share of shapes that no kernel took, among those whose entry has a kernel and whose form was not forced."""
    free = [r for r in results if r["path"] not in ("scatter", "autograd") and r["entry"] not in FORCED]
    return sum(r["path"] in REFERENCE for r in free) / max(1, len(free))


def worst(results: Sequence[dict[str, Any]]) -> dict[str, float]:
    return {key: max((r[key] for r in results), default=0.0) for key in ("gram", "gradient", "wide")}


def print_table(result: dict[str, Any]) -> None:
    o = result["options"]
    print(f"{result['count']} shapes of seed {o['seed']}, {o['dtype']}, {result['device']}, {result['seconds']:.0f} s")
    print("worst errors in epsilons: of K_ij over sqrt(K_ii K_jj), of the weighted gradient over sum |w_i| |psi_i|;")
    print("against float64 of the same inputs, and in the last column of K_ij where the logits are float64 as well")
    print(f"{'entry':<16}{'path':<12}{'shapes':>8}{'K_ij':>10}{'gradient':>10}{'logits':>10}")
    for key, part in result["parts"].items():
        entry, path = key.split()
        logits = f"{part['wide']:>10.2f}" if part["wide"] else f"{'-':>10}"
        print(f"{entry:<16}{path:<12}{part['count']:>8}{part['gram']:>10.2f}{part['gradient']:>10.2f}{logits}")
    total = result["worst"]
    shares = ", ".join(f"{path} {100 * share:.1f}%" for path, share in result["share_by_path"].items())
    print(f"worst of all: {total['gram']:.2f} and {total['gradient']:.2f}; allowed are {result['allowed']:g} each")
    print(f"shapes by path: {shares}; where a kernel could serve, the reference took "
          f"{100 * result['share_of_reference']:.1f}%")  # fmt: skip
    print(f"crashes: {result['crashes']}; beyond the allowed error: {result['beyond']}")
    for failed in result["failed"]:
        print(f"  {failed['shape']}: {failed['error']}")
