"""Digests of what makes a run: Python code, problems and the files of a model. Imports nothing heavy, runs no code.

The digest of a Python file is that of its syntax tree without docstrings: comments, blank lines, line endings and
formatting do not count, and the version of Python does not either. A file that is not Python counts by its bytes.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import json
import os
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

from grpo_sweeps.files import write_text
from grpo_sweeps.models import tiny_path
from grpo_sweeps.types import Problem, TaskData

PACKAGE = Path(__file__).resolve().parents[1]
OWN = ("grpo_sweeps", "hydra_plugins")
FOLDERS = ("grpo_sweeps", "hydra_plugins/grpo_launcher")  # beside which others may have installed plugins of theirs
# What no run imports: reading records, exact policies, what tells of runs. Their code does not make a run.
NOT_OF_A_RUN = (
    "report", "science", "credit", "control", "export", "publish", "benchmarks", "exact", "paper.py", "__main__.py",
    "bench.py", "cancel.py", "check.py", "convert.py", "diff.py", "pretrain_tiny.py", "status.py", "sync.py",
    "theory.py",
)  # fmt: skip
CODE = (".py", ".cu", ".cuh")
LENGTH = 16  # hexadecimal digits of a digest
CACHE = "syntax.json"  # in __pycache__: SHA-256 of a file -> digest of its syntax tree

MODEL_FILES = (
    "config.json", "generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*",
    "merges.txt", "chat_template*", "*.model",
)  # fmt: skip
WEIGHTS = ("*.safetensors", "*.safetensors.index.json")
OFFLINE = "local_files_only"
WHOLE = 2**24  # bytes up to which a model's file is read whole
BLOCKS, BLOCK = 64, 4096  # of a larger file: so many blocks of so many bytes, evenly spread

_NO_MEANING = frozenset({"ctx", "kind", "type_comment", "type_ignores"})  # fields that say nothing new


def of_bytes(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:LENGTH]


def of_source(content: bytes, name: str = "code.py") -> str:
    """The digest of a source file; of its bytes, with line ends as \\n, where it is not Python that can be parsed."""
    if name.endswith(".py"):
        with suppress(SyntaxError, ValueError, RecursionError, MemoryError):
            return of_bytes("".join(_pieces(ast.parse(content))).encode("ascii"))
    return of_bytes(content.replace(b"\r\n", b"\n"))


def _pieces(tree: ast.AST) -> Iterator[str]:
    """The tree as text: types, names of fields, values; nothing of what is empty, so that fields that a later Python
    adds change nothing."""
    left: list[Any] = [tree]
    while left:
        item = left.pop()
        if isinstance(item, str):
            yield item
        elif isinstance(item, ast.AST):
            yield f"{type(item).__name__}("
            left.append(")")
            for name, value in reversed(list(ast.iter_fields(item))):
                if name in _NO_MEANING or value is None or value == []:
                    continue
                left += [_laid_out(name, value), f"{name}="]
        else:  # a list
            yield "["
            left.append("]")
            left += [_laid_out("", part) for part in reversed(item)]


def _laid_out(name: str, value: Any) -> Any:
    """A node or a list for the next round, anything else as text; a block of statements without its bare strings."""
    if isinstance(value, ast.AST):
        return value
    if isinstance(value, list):
        kept = [part for part in value if not _is_docstring(part)]
        return kept if kept or name != "body" else [ast.Pass()]
    return f"{type(value).__name__}:{value:x}," if type(value) is int else f"{type(value).__name__}:{value!a},"


def _is_docstring(node: Any) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


# The package


@dataclass(frozen=True)
class Code:
    """The package's own code: the digest of what it says, and that of its bytes, which takes no parsing."""

    syntax: str = ""
    raw: str = ""


_package: list[Code] = []  # once per process: what has been imported is what runs, whatever the files say by then


def of_package(known: Iterable[Code] = ()) -> Code:
    """The package's own code; empty where it cannot be read. known: of records, which spare the parsing of the same
    bytes."""
    if not _package:
        cache = Path(importlib.util.cache_from_source(str(PACKAGE / "__init__.py"))).with_name(CACHE)
        try:
            _package.append(of_folder(PACKAGE.parent, known, None if sys.dont_write_bytecode else cache))
        except OSError:
            return Code()
    return _package[0]


def of_folder(root: Path, known: Iterable[Code] = (), cache: Path | None = None) -> Code:
    """The code of the package whose folders lie in `root`: every file that a run can import, by its path in there.

    cache: a file that keeps the digests of files that were parsed before.
    """
    files, hashes = _files_and_hashes(root)
    raw = joined(hashes)
    if same := next((code for code in known if code.raw == raw and code.syntax), None):
        return same
    parsed = _read_cache(cache)
    trees = {hashes[name]: parsed.get(hashes[name]) or of_source(content, name) for name, content in files.items()}
    if cache is not None and trees.keys() - parsed.keys():
        with suppress(OSError):  # an installation of somebody else: parsed again by every process
            cache.parent.mkdir(exist_ok=True)
            write_text(cache, json.dumps({"format": LENGTH, "trees": trees}))
    return Code(joined({name: trees[key] for name, key in hashes.items()}), raw)


def raw_of_package() -> str:
    """The digest of the bytes of the package's code, which takes no parsing; empty where they cannot be read."""
    try:
        return joined(_files_and_hashes(PACKAGE.parent)[1])
    except OSError:
        return ""


def _files_and_hashes(root: Path) -> tuple[dict[str, bytes], dict[str, str]]:
    """{path below `root`: content} and {path: its SHA-256} of the files of code."""
    files = {path.relative_to(root).as_posix(): path.read_bytes() for path in code_files(root)}
    return files, {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}


def code_files(root: Path) -> list[Path]:
    """The files of code below `root` that a run can import, sorted by their path in there."""
    found = []
    for own in FOLDERS:
        for folder, folders, names in os.walk(root / own):
            place = Path(folder).relative_to(root / own)
            left_out = NOT_OF_A_RUN if place == Path() and own == FOLDERS[0] else ()
            folders[:] = [name for name in folders if name not in ("__pycache__", "_data", *left_out)]
            found += [Path(folder) / name for name in names if name.endswith(CODE) and name not in left_out]
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())


def _read_cache(cache: Path | None) -> dict[str, str]:
    try:
        content = json.loads(cache.read_text(encoding="utf-8")) if cache is not None else {}
        return dict(content["trees"]) if content.get("format") == LENGTH else {}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}


# Functions of the user's own

_functions: dict[str, tuple[object, dict[str, str]]] = {}  # module -> (the loaded one, digests of its files)


def of_function(target: str) -> dict[str, str]:
    """{module: digest} of the module of a dotted path and, followed through its imports, of all that lie outside the
    package and installed packages; empty for a function of the package, and where the module is not found.

    Kept as long as the same module is loaded: what has been imported is what runs, whatever the file says by then.
    """
    module = target.rpartition(".")[0]
    if not module or module.partition(".")[0] in OWN:
        return {}
    loaded = sys.modules.get(module)
    if loaded is not None and module in _functions and _functions[module][0] is loaded:
        return dict(_functions[module][1])
    found = _followed(module)
    _functions[module] = (loaded, found)
    return dict(found)


def _followed(root: str) -> dict[str, str]:
    """The digests of a module's file and of those that it imports, by module."""
    found, seen = dict[str, str](), set[str]()
    left = [root]
    while left:
        name = left.pop()
        if name in seen or not name:
            continue
        seen.add(name)
        first = name.partition(".")[0]
        if first in OWN or first in sys.stdlib_module_names:
            continue
        spec = _spec(name)
        path = Path(spec.origin) if spec is not None and spec.has_location and spec.origin else None
        installed = path is not None and _is_installed(path)
        if spec is None or (installed and name != root):
            continue
        if not installed:
            left.append(name.rpartition(".")[0])  # the package around it runs first
        if path is None:
            continue
        with suppress(OSError):
            content = path.read_bytes()
            found[name] = of_source(content, path.name)
            left += [] if installed else _imports(content, name, bool(spec.submodule_search_locations))
    return dict(sorted(found.items()))


def _spec(name: str) -> ModuleSpec | None:
    """Where a module is, without running its code or that of the packages around it; None where it is not found."""
    loaded = getattr(sys.modules.get(name), "__spec__", None)
    if isinstance(loaded, ModuleSpec):
        return loaded
    places: Sequence[str] | None = None
    if parent := name.rpartition(".")[0]:
        around = _spec(parent)
        if around is None or around.submodule_search_locations is None:
            return None
        places = list(around.submodule_search_locations)
    for finder in sys.meta_path:
        with suppress(Exception):  # a finder of somebody else's
            if spec := finder.find_spec(name, places):
                return spec
    return None


def _imports(content: bytes, module: str, is_package: bool) -> list[str]:
    """Absolute names of the modules that a source may import; `from a import b` names a and a.b."""
    try:
        tree = ast.parse(content)
    except (SyntaxError, ValueError):
        return []
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            around = module.split(".") if is_package else module.split(".")[:-1]
            around = around[: len(around) - node.level + 1] if node.level else []
            base = ".".join([*around, *([node.module] if node.module else [])])
            found += [base, *(f"{base}.{alias.name}" for alias in node.names if base)]
    return found


def _is_installed(origin: Path) -> bool:
    """True for a file of an installed package: one in a folder of the interpreter, or beside what pip wrote there."""
    return any(place in origin.parents for place in _installed(tuple(sys.path)))


@functools.lru_cache(4)
def _installed(search: tuple[str, ...]) -> list[Path]:
    kinds = ("purelib", "platlib", "stdlib", "platstdlib")
    found = [Path(sysconfig.get_path(kind)) for kind in kinds]
    for place in filter(None, search):
        path = Path(place)
        if path.name in ("site-packages", "dist-packages") or next(path.glob("*.dist-info"), None):
            found.append(path)
    return found


# Data and models


def of_data(data: TaskData) -> dict[str, str]:
    """{"train": "8192 problems, <digest>", "held_out": ...}, by id, question, answer, solution, columns, in order."""
    return {key: f"{len(half)} problems, {_of_problems(half)}" for key, half in _halves(data)}


def _halves(data: TaskData) -> tuple[tuple[str, Sequence[Problem]], ...]:
    return ("train", data.train), ("held_out", data.held_out)


def _of_problems(problems: Iterable[Problem]) -> str:
    """repr tells ("a", "bc") from ("ab", "c"), and quickly. Problems without columns have the digest of before there
    were any."""
    digest = hashlib.sha256()
    for one in problems:
        parts = (one.id, one.question, one.answer, one.solution)
        more = (json.dumps(dict(one.columns), sort_keys=True, default=str),) if one.columns else ()
        digest.update(f"{(*parts, *more)!r}\n".encode("utf-8", "surrogatepass"))
    return digest.hexdigest()[:LENGTH]


def of_model(path: str, revision: str | None = None, random: bool = False) -> dict[str, str]:
    """{file: digest} of a folder or a GGUF file; {"revision": commit} of a hub's model that is in the cache; empty
    where nothing is here yet. random: the weights are drawn, so that only the other files count."""
    try:
        place = tiny_path() if path == "embedded" else Path(path).expanduser()
        if place.is_file():
            return {place.name: of_file(place)}
        if place.is_dir():
            patterns = (*MODEL_FILES, *(() if random else WEIGHTS))
            files = sorted({file for pattern in patterns for file in place.glob(pattern) if file.is_file()})
            return {file.name: of_file(file) for file in files}
    except OSError:
        return {}
    return _of_hub(path, revision)


def _of_hub(path: str, revision: str | None) -> dict[str, str]:
    try:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(path, "config.json", revision=revision)
    except (ImportError, ValueError):  # HFValidationError is a ValueError: not the name of a hub's model
        return {}
    return {"revision": Path(found).parent.name} if isinstance(found, str) else {}


def of_file(path: Path) -> str:
    """The digest of a model's file: JSON by what it says; a file of up to WHOLE bytes whole; of a larger one its size,
    its first and last block (a safetensors header is in the first ones) and others between them."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        if size <= WHOLE:
            content = file.read()
            if path.suffix == ".json":
                with suppress(ValueError, RecursionError):
                    content = json.dumps(_without_circumstances(json.loads(content)), sort_keys=True).encode()
            return of_bytes(content)
        digest = hashlib.sha256(f"{size}\n".encode())
        for block in range(BLOCKS):
            file.seek((size - BLOCK) * block // (BLOCKS - 1))
            digest.update(file.read(BLOCK))
        if path.suffix == ".safetensors":
            file.seek(0)
            digest.update(file.read(min(WHOLE, 8 + int.from_bytes(file.read(8), "little"))))
    return digest.hexdigest()[:LENGTH]


def _without_circumstances(content: Any) -> Any:
    """A file's JSON as though it had been saved online: transformers notes beside a tokenizer's settings that the hub
    was out of reach (HF_HUB_OFFLINE), on which no token depends."""
    return {**content, OFFLINE: False} if isinstance(content, dict) and OFFLINE in content else content


def joined(parts: Mapping[str, str]) -> str:
    """One digest of several, by name; "" of none."""
    return of_bytes(json.dumps(dict(parts), sort_keys=True).encode()) if parts else ""
