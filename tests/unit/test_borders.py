"""The borders between the parts of the package, read from the source with `ast`."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "grpo_sweeps"
PLUGINS = ROOT / "hydra_plugins"
ENTRY_POINTS = {
    "run",
    "status",
    "cancel",
    "sync",
    "bench",
    "theory",
    "pretrain_tiny",
    "convert",
    "check",
    "verify",
    "diff",
}

LEAVES = {
    "types",
    "estimators",
    "spectra",
    "maths",
    "tasks",
    "rewards",
    "models",
}
GROUND = {"types", "files", "paths", "text", "redaction"}
# The rooms of report/, from the ground up: each may import those before it.
REPORT_ROOMS = ("measure", "read", "tables", "claims", "design", "figures")
# What each part may import from the package, itself aside. Entry points may import everything.
MAY_IMPORT = {
    "types": set(),
    "files": set(),
    "text": set(),
    "redaction": set(),
    "paths": {"types", "text"},
    "machine": {"types", "paths"},
    "cli": {"types", "paths", "machine", "text", "redaction"},
    "estimators": {"types"},
    "spectra": {"types"},
    "maths": {"types"},
    "rewards": {"types"},
    "tasks": {"types", "rewards"},
    "models": {"types"},
    "config": {"types", "paths", "text", "estimators", "rewards"},
    "engine": {*LEAVES, "config", "files", "text"},
    "tracking": {*LEAVES, "config", "files", "text", "redaction"},
    "loop": {*LEAVES, "paths", "config", "engine", "tracking", "text", "redaction"},
    "exact": {"types", "estimators", "spectra"},
    "paper": set(),
    "publish": {"types", "files", "spectra", "maths", "text"},
    "science": {*LEAVES, "paper", "exact", "publish"},
    "credit": {*LEAVES, *GROUND, "config", "engine", "loop", "tracking", "sweep", "publish"},
    "control": {*LEAVES, *GROUND, "config", "engine", "loop", "tracking", "publish"},
    "export": {*LEAVES, *GROUND, "config", "engine", "tracking", "sweep", "publish"},
    "benchmarks": {*LEAVES, *GROUND, "cli", "config", "engine", "loop", "tracking"},
    "sweep": {*LEAVES, *GROUND, "machine", "cli", "config", "tracking", "loop"},
    "report": {*LEAVES, *GROUND, "paper", "config", "tracking", "publish"},
    "hydra_plugins": {*LEAVES, *GROUND, "cli", "config", "tracking", "sweep"},
}
HYDRA = {"hydra", "omegaconf", "submitit"}
HEAVY = ("torch", "transformers", "datasets", "mlflow")
MAX_FUNCTION_LINES = 60


@dataclass(frozen=True)
class Import:
    """One imported module, where, and whether it runs when the importing module is loaded."""

    file: Path
    line: int
    module: str
    top_level: bool

    def __str__(self) -> str:
        return f"{self.file.relative_to(ROOT)}:{self.line} imports {self.module}"


def source_files() -> list[Path]:
    return sorted(path for folder in (PACKAGE, PLUGINS) for path in folder.rglob("*.py"))


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def part_named(name: str) -> str:
    """The part that a module directly below the package belongs to: `spectra_nulls` is a further file of `spectra`."""
    return next((part for part in MAY_IMPORT if name.startswith(f"{part}_")), name)


def part_of(path: Path) -> str:
    """Name of the part a file belongs to: the first component below the package, without .py."""
    relative = path.relative_to(ROOT)
    if relative.parts[0] == "hydra_plugins":
        return "hydra_plugins"
    return part_named(relative.parts[1].removesuffix(".py"))


def is_entry_point(path: Path) -> bool:
    return path.name == "__main__.py" or (path.parent == PACKAGE and path.stem in ENTRY_POINTS)


def _is_type_checking(test: ast.expr) -> bool:
    return "TYPE_CHECKING" in {getattr(test, "id", None), getattr(test, "attr", None)}


def _modules(node: ast.Import | ast.ImportFrom, path: Path) -> list[str]:
    """Absolute names of what a statement imports; `from a import b` counts as both a and a.b."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    base = node.module or ""
    if node.level:
        package = path.relative_to(ROOT).parts[: -node.level]
        base = ".".join([*package, *([node.module] if node.module else [])])
    return [base, *(f"{base}.{alias.name}" for alias in node.names)]


def imports(path: Path, tree: ast.Module) -> Iterator[Import]:
    """Every import of a file, those in functions included, those only for type checkers left out."""

    def walk(node: ast.AST, top_level: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import | ast.ImportFrom):
                for module in _modules(child, path):
                    yield Import(path, child.lineno, module, top_level)
            elif isinstance(child, ast.If) and _is_type_checking(child.test):
                for other in child.orelse:
                    yield from walk(other, top_level)
            else:
                inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
                yield from walk(child, top_level and not inside)

    yield from walk(tree, True)


ALL_IMPORTS = [found for path in source_files() for found in imports(path, tree_of(path))]


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def import_graph(files: Iterable[Path], found: Iterable[Import]) -> dict[str, set[str]]:
    """For each module those of `files` that it imports, at its top or in a function.

    `from a import b` is an edge to a.b where that is a module, and to a where it is a name in a.
    """
    graph: dict[str, set[str]] = {module_name(path): set() for path in files}
    statements: dict[tuple[Path, int], list[str]] = {}
    for one in found:
        statements.setdefault((one.file, one.line), []).append(one.module)
    for (file, _), (base, *names) in statements.items():
        inside = [name for name in names if name.startswith(f"{base}.")]
        only_modules = bool(inside) and all(name in graph for name in inside)
        graph[module_name(file)] |= {name for name in (() if only_modules else (base,)) if name in graph}
        graph[module_name(file)] |= {name for name in names if name in graph}
    return graph


def cycles(graph: Mapping[str, set[str]]) -> set[frozenset[str]]:
    """The sets of nodes that all reach one another."""

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        left = [start]
        while left:
            further = graph[left.pop()] - seen
            seen |= further
            left += further
        return seen

    reach = {node: reached(node) for node in graph}
    return {frozenset(other for other in reach[node] if node in reach[other]) for node in graph if node in reach[node]}


def complain(found: list[Import]) -> str:
    return "\n".join(str(one) for one in found)


def test_there_is_something_to_check() -> None:
    parts = {part_of(path) for path in source_files()}
    assert {"types", "estimators", "engine", "loop", "tracking", "sweep", "report", "hydra_plugins"} <= parts
    assert any(found.module == "torch" for found in ALL_IMPORTS)
    assert any(found.module.startswith("hydra") for found in ALL_IMPORTS)
    assert any(found.module.startswith("mlflow") for found in ALL_IMPORTS)


def test_the_reading_of_imports_itself() -> None:
    source = (
        "import a.b\n"
        "from ..types import Problem\n"
        "if TYPE_CHECKING:\n    import unseen\n"
        "try:\n    import tried\nexcept ImportError:\n    pass\n"
        "class C:\n    import classy\n    def f(self):\n        import late\n"
    )
    found = {one.module: one.top_level for one in imports(PACKAGE / "loop" / "step.py", ast.parse(source))}
    at_top = {"a.b", "grpo_sweeps.types", "grpo_sweeps.types.Problem", "tried", "classy"}
    assert found == {**dict.fromkeys(at_top, True), "late": False}


def test_imports_point_inwards() -> None:
    wrong = []
    for found in ALL_IMPORTS:
        names = found.module.split(".")
        part = part_of(found.file)
        if names[0] != "grpo_sweeps" or len(names) < 2 or is_entry_point(found.file) or part == "__init__":
            continue
        target = part_named(names[1])
        if target in MAY_IMPORT or target in ENTRY_POINTS:  # anything else is a name in the package's __init__
            allowed = MAY_IMPORT.get(part)
            assert allowed is not None, f"{found.file} belongs to no known part: give it a line in MAY_IMPORT"
            if target != part and target not in allowed:
                wrong.append(found)
    assert not wrong, complain(wrong)


def test_the_finding_of_cycles_itself() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": {"e"}, "e": set(), "f": {"f"}}
    assert cycles(graph) == {frozenset("bc"), frozenset("f")}
    here = PACKAGE / "loop" / "step.py"
    source = "from grpo_sweeps import config\nfrom ..types import Problem\ndef f():\n    from . import inner, missing\n"
    files = [
        here,
        *(PACKAGE / name for name in ("__init__.py", "config.py", "types.py", "loop/__init__.py", "loop/inner.py")),
    ]
    graph = import_graph(files, imports(here, ast.parse(source)))
    assert graph["grpo_sweeps.loop.step"] == {
        f"grpo_sweeps.{name}" for name in ("config", "types", "loop", "loop.inner")
    }


def test_no_module_imports_itself_by_way_of_others() -> None:
    found = cycles(import_graph(source_files(), ALL_IMPORTS))
    assert not found, "\n".join(" <-> ".join(sorted(one)) for one in found)


@pytest.mark.parametrize("name", sorted(GROUND))
def test_the_ground_floor_is_light(name: str) -> None:
    path = PACKAGE / f"{name}.py"
    allowed = {*sys.stdlib_module_names, "grpo_sweeps", "yaml", "numpy"}
    wrong = [
        found
        for found in imports(path, tree_of(path))
        if found.module.split(".")[0] not in allowed
        or (
            found.module.startswith("grpo_sweeps")
            and not found.module.startswith(("grpo_sweeps.types", "grpo_sweeps.text"))
        )
    ]
    assert not wrong, complain(wrong)


def test_what_is_imported_is_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    declared = [
        *project["dependencies"],
        *extras["lora"],
        *extras["gguf"],
        *extras["gpu"],
        *extras["bench"],
        *extras["math"],
    ]
    names = {re.split(r"[^A-Za-z0-9_-]", line)[0].lower().replace("-", "_") for line in declared}
    names |= {"hydra", "yaml", *sys.stdlib_module_names, "grpo_sweeps", "hydra_plugins"}
    wrong = [found for found in ALL_IMPORTS if found.module.split(".")[0] not in names]
    assert not wrong, complain(wrong)


@pytest.mark.parametrize("part", ["estimators", "objective", "spectra", "tasks", "rewards"])
def test_functions_of_the_mathematics_know_no_configuration(part: str) -> None:
    forbidden = ("grpo_sweeps.config", *HYDRA, "yaml", "mlflow")
    wrong = [found for found in ALL_IMPORTS if part_of(found.file) == part and found.module.startswith(forbidden)]
    assert not wrong, complain(wrong)


def test_hydra_stays_in_configuration_sweep_and_entry_points() -> None:
    wrong = [
        found
        for found in ALL_IMPORTS
        if found.module.split(".")[0] in HYDRA
        and part_of(found.file) not in {"cli", "config", "machine", "sweep", "hydra_plugins"}
        and not is_entry_point(found.file)
    ]
    assert not wrong, complain(wrong)


def test_the_typed_configuration_is_read_without_hydra() -> None:
    """config/ knows no Hydra, and imports OmegaConf where a composed config comes in."""
    wrong = [
        found
        for found in ALL_IMPORTS
        if part_of(found.file) == "config"
        and found.module.split(".")[0] in HYDRA
        and (found.top_level or found.module.startswith("hydra"))
    ]
    assert not wrong, complain(wrong)


def test_mlflow_stays_in_tracking_and_is_imported_when_used() -> None:
    wrong = [
        found
        for found in ALL_IMPORTS
        if found.module.split(".")[0] == "mlflow" and (found.top_level or part_of(found.file) != "tracking")
    ]
    assert not wrong, complain(wrong)


def test_the_files_of_one_tracker_are_known_to_that_tracker_alone() -> None:
    own = "grpo_sweeps.tracking.mlflow_"
    wrong = [
        found for found in ALL_IMPORTS if found.module.startswith(own) and not found.file.stem.startswith("mlflow_")
    ]
    assert not wrong, complain(wrong)


def test_report_needs_neither_engine_nor_loop() -> None:
    forbidden = ("grpo_sweeps.engine", "grpo_sweeps.loop")
    wrong = [found for found in ALL_IMPORTS if part_of(found.file) == "report" and found.module.startswith(forbidden)]
    assert not wrong, complain(wrong)


def test_the_rooms_of_the_report_stand_on_one_another() -> None:
    wrong = []
    for found in ALL_IMPORTS:
        place, names = found.file.relative_to(PACKAGE.parent).parts, found.module.split(".")
        if place[:2] == ("grpo_sweeps", "report") and place[2] in REPORT_ROOMS and names[:2] == list(place[:2]):
            below = REPORT_ROOMS[: REPORT_ROOMS.index(place[2]) + 1]
            wrong += [found] if len(names) > 2 and names[2] not in below else []
    assert not wrong, complain(wrong)


def test_the_array_of_the_mathematics_is_named_in_one_place() -> None:
    """`Array` is an alias of types.py: a second one, or one passed on by another module, could come to mean another."""
    made = {
        path
        for path in source_files()
        for node in tree_of(path).body
        if isinstance(node, ast.Assign) and any(getattr(target, "id", "") == "Array" for target in node.targets)
    }
    assert made == {PACKAGE / "types.py"}
    wrong = [found for found in ALL_IMPORTS if found.module.endswith(".Array") and "types" not in found.module]
    assert not wrong, complain(wrong)


def test_the_papers_words_need_nothing() -> None:
    path = PACKAGE / "paper.py"
    wrong = [
        found for found in imports(path, tree_of(path)) if found.module.split(".")[0] not in sys.stdlib_module_names
    ]
    assert not wrong, complain(wrong)


def test_the_plugin_namespace_stays_open_to_others() -> None:
    assert not (PLUGINS / "__init__.py").exists(), "an __init__.py here would hide the plugins of other packages"


def test_estimators_are_free_of_torch() -> None:
    """But for the call of a user's own that was written for tensors."""
    folder = PACKAGE / "estimators"
    wrong = [
        found
        for found in ALL_IMPORTS
        if folder in found.file.parents
        and found.module.split(".")[0] in HEAVY
        and (found.top_level or found.file.stem != "foreign")
    ]
    assert not wrong, complain(wrong)


def text_files() -> list[Path]:
    folders = ("grpo_sweeps", "hydra_plugins", "conf", "sweeps", "tests", "examples", "docs", "reports", ".ci")
    suffixes = {".py", ".yaml", ".md", ".toml", ".txt", ".json", ".html", ".csv", ".tex", ""}
    files = [path for path in ROOT.iterdir() if path.is_file() and path.name != ".git"]  # a file in a linked worktree
    files += [path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()]
    return [path for path in files if path.suffix in suffixes and "__pycache__" not in path.parts]


def test_no_file_names_a_place_of_one_machine() -> None:
    words = ["/" + "work/", "/tmp/" + "ven", "/opt/" + "pypi", "/" + "root/", "pypi" + ".org", "python" + "hosted"]
    wrong = []
    for path in text_files():
        text = path.read_text(encoding="utf-8", errors="replace")
        wrong += [f"{path.relative_to(ROOT)} contains {word}" for word in words if word in text]
    assert not wrong, "\n".join(wrong)


def code_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines from `def` to the end, less the docstring: a definition may be explained at length."""
    assert node.end_lineno is not None
    length = node.end_lineno - node.lineno + 1
    first = node.body[0]
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
        assert first.end_lineno is not None
        length -= first.end_lineno - first.lineno + 1
    return length


def test_functions_fit_a_screen() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}: {code_lines(node)} lines"
        for path in source_files()
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and code_lines(node) > MAX_FUNCTION_LINES
    ]
    assert not wrong, f"more than {MAX_FUNCTION_LINES} lines:\n" + "\n".join(wrong)
