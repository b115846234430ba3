"""The pictures of a sweep, drawn anew only where a record, the code or the look has changed since they were drawn."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from importlib.metadata import version

import matplotlib
import pyarrow as pa

from grpo_sweeps.publish.drawing import Plot, rendered
from grpo_sweeps.report.read.kept import Kept, files_below, signature
from grpo_sweeps.report.read.query import Sweep
from grpo_sweeps.tracking.digests import raw_of_package

FILE = "figures.parquet"


def drawn(sweep: Sweep, plots: Sequence[Plot]) -> dict[str, bytes]:
    """{file name: content} of the figures, as `rendered` gives them."""
    kept, look = Kept(sweep.path), repr(sorted(matplotlib.rcParams.items(), key=str))
    key = {
        "files": _files(sweep), "runs": sweep.runs[["run", "arm"]].to_numpy().tolist(),
        "code": raw_of_package(), "plots": [plot.name for plot in plots],
        "matplotlib": matplotlib.__version__, "seaborn": version("seaborn"),
        "look": hashlib.sha256(look.encode()).hexdigest(),
    }  # fmt: skip
    if found := kept.read(FILE, key):
        return dict(zip(found[0]["name"].to_pylist(), found[0]["content"].to_pylist(), strict=True))
    images = rendered(plots)
    if key["files"] == _files(sweep):
        kept.write(FILE, key, pa.table({"name": list(images), "content": pa.array(list(images.values()), pa.binary())}))
    return images


def _files(sweep: Sweep) -> list[tuple[str, int, int]]:
    return [file for path in sweep.paths for file in signature(files_below(path))]
