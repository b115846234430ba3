"""The folder that a report is: one page that opens from the file system with no network, and the files beside it.

A page extends `base.html.j2`. Figures stand on it as inline SVG images, a content policy forbids every other source and
all scripts, and Jinja2 escapes every value: completions, names and error messages are text that a model or a stranger
wrote. A manifest says which code and which command made the folder.
"""

from __future__ import annotations

import base64
import json
import math
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from grpo_sweeps.files import REPORT_MANIFEST, files_of_report, write_bytes
from grpo_sweeps.publish.drawing import Plot
from grpo_sweeps.text import visible

PACKAGES = ("grpo_sweeps", "numpy", "pandas", "scipy", "matplotlib", "seaborn")


@dataclass(frozen=True)
class Section:
    """A section of a page that is a table with words.

    name: its anchor. before, after: paragraphs. files: of the folder, linked below the table.
    """

    name: str
    title: str
    before: tuple[str, ...]
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    after: tuple[str, ...] = ()
    files: tuple[str, ...] = ()


def from_template(package: str, template: str, **values: Any) -> str:
    """The page that a template of `package` makes of the values; it may extend and include those of publish/."""
    environment = Environment(
        loader=ChoiceLoader([PackageLoader(package, ""), PackageLoader("grpo_sweeps.publish", "")]),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_visible,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(template).render(**values)


def _visible(value: Any) -> Any:
    """What a template prints: every text in its visible form; finished markup and numbers as they are."""
    return visible_text(value, len(value)) if isinstance(value, str) and not isinstance(value, Markup) else value


def visible_text(text: str, cut: int) -> str:
    """Text without the characters that could hide or reorder what stands on the page, cut with a note.

    Control and format characters (category C, such as a right-to-left override) are shown by their code point.

    >>> visible_text("a\\u202eb\\n", 10)
    'a[U+202E]b\\n'
    """
    return visible(text if len(text) <= cut else text[:cut] + f" … ({len(text) - cut} more characters)")


def inlined(plot: Plot, images: Mapping[str, bytes]) -> dict[str, Any]:
    """A figure for a page: its panels as data, so that the page asks for no file."""
    panels = []
    for i, panel in enumerate(plot.panels, start=1):
        data = base64.b64encode(images[f"{plot.name}_{i}.svg"]).decode("ascii")
        panels.append({"title": panel.title, "alt": panel.alt, "src": f"data:image/svg+xml;base64,{data}"})
    return {"name": plot.name, "title": plot.title, "caption": plot.caption, "panels": panels}


def files_of(texts: Mapping[str, str], images: Mapping[str, bytes]) -> dict[str, bytes]:
    """{file name: content} of what goes into the folder: the figures and the texts. SVG panels stand on the page."""
    files = {name: content for name, content in images.items() if not name.endswith(".svg")}
    return files | {name: text.encode("utf-8") for name, text in texts.items()}


def with_manifest(files: Mapping[str, bytes], record: Mapping[str, Any]) -> dict[str, bytes]:
    """The files and manifest.json, which holds the record and lists every file, itself included."""
    listed = {**record, "files": sorted([*files, REPORT_MANIFEST])}
    return {**files, REPORT_MANIFEST: (json.dumps(listed, indent=1) + "\n").encode("ascii")}


def write(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write the files, each whole or not at all, and remove those of an earlier report in this folder that are none of
    these: a figure that is no longer drawn would be taken for this report's.

    Raises:
        OSError: where the folder cannot be made or written to.
    """
    folder.mkdir(parents=True, exist_ok=True)
    before = files_of_report(folder)
    for name, content in files.items():
        write_bytes(folder / name, content)
    for name in set(before) - set(files):
        (folder / name).unlink(missing_ok=True)


def versions() -> dict[str, str]:
    """Versions of what computed the report."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def utc(seconds: float | None) -> str | None:
    """A time in seconds since 1970 as text, in UTC; None where it is not known."""
    if seconds is None or math.isnan(seconds):
        return None
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")


def now() -> str:
    """The present time as text, in UTC."""
    return datetime.now(UTC).isoformat(timespec="seconds")
