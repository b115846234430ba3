"""What is private of torch is used in one file, and that file sees when torch has changed."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from grpo_sweeps.engine.gram import GradientGram, GramError, torch_private

ROOT = Path(__file__).parents[3]
HOME = ROOT / "grpo_sweeps" / "engine" / "gram" / "torch_private.py"
SOURCES = sorted(path for folder in ("grpo_sweeps", "hydra_plugins") for path in (ROOT / folder).rglob("*.py"))
# No underscore attribute of nn.Module is tolerated elsewhere. `__dict__`, where a stand-in forward is put, belongs to
# Python, `__torch_function__` is torch's public protocol, and `_gradient_checkpointing_func` belongs to transformers.


def private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def attributes(tree: ast.AST) -> Iterator[tuple[int, str, ast.expr]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and private(node.attr):
            yield node.lineno, node.attr, node.value


def known() -> set[str]:
    """Every private name of torch that the one file names, as an attribute or in a string."""
    tree = ast.parse(HOME.read_text(encoding="utf-8"))
    strings = [n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    found = {part for text in strings if " " not in text for part in text.split(".") if private(part)}
    return found | {name for _, name, _ in attributes(tree)}


def of_torch(value: ast.expr, aliases: set[str]) -> bool:
    """Is this torch itself, or something reached from it by dots?"""
    while isinstance(value, ast.Attribute):
        value = value.value
    return isinstance(value, ast.Name) and value.id in aliases


def uses(tree: ast.AST, names: set[str]) -> list[tuple[int, str]]:
    """Private names of torch: below it, imported from it, and `names` of any object but self or in a string."""
    aliases, found = {"torch"}, []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            aliases |= {(a.asname or a.name).split(".")[0] for a in node.names if a.name.split(".")[0] == "torch"}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            aliases |= {a.asname or a.name for a in node.names}
            words = [*(node.module or "").split("."), *(a.name for a in node.names)]
            found += [(node.lineno, word) for word in words if private(word)]
        elif isinstance(node, ast.Constant) and node.value in names:
            found.append((node.lineno, str(node.value)))
    for line, name, value in attributes(tree):
        own = isinstance(value, ast.Name) and value.id in ("self", "cls")
        if of_torch(value, aliases) or (name in names and not own):
            found.append((line, name))
    return sorted(found)


def test_the_reading_of_private_names_itself() -> None:
    source = (
        "import torch\nfrom torch.nn import functional as F\nfrom torch.utils.checkpoint import _Stop\n"
        "torch._C.f()\nF._g\nmodule._parameters\nself._parameters\nvars(m)['_forward_hooks']\nother._mine\n"
    )
    found = uses(ast.parse(source), {"_parameters", "_forward_hooks"})
    assert found == [(3, "_Stop"), (4, "_C"), (5, "_g"), (6, "_parameters"), (8, "_forward_hooks")]
    assert {"_C", "_parameters", "_is_view", "_base", "_version", "_unsafe_view", "_forward_hooks"} <= known()


def test_private_names_of_torch_stay_in_one_file() -> None:
    names = known()
    wrong = [
        f"{path.relative_to(ROOT)}:{line} {name}"
        for path in SOURCES
        if path != HOME
        for line, name in uses(ast.parse(path.read_text(encoding="utf-8")), names)
    ]
    assert not wrong, "\n".join(wrong)


@pytest.fixture
def untried() -> Iterator[None]:
    torch_private.trial.cache_clear()
    yield
    torch_private.trial.cache_clear()


SENTENCE = (
    rf"^torch {torch.__version__.replace('+', '.')}: .*it was run with torch 2\.11 to 2\.13: install one of these"
)
AWAY = {
    "torch._C._will_engine_execute_node": (torch._C, "_will_engine_execute_node"),
    "torch.utils.checkpoint._StopRecomputationError": (torch.utils.checkpoint, "_StopRecomputationError"),
    "torch._foreach_copy_": (torch, "_foreach_copy_"),
}


@pytest.mark.parametrize("name", AWAY)
def test_a_name_that_is_away_is_told_in_a_sentence(name: str, untried: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(*AWAY[name])
    with pytest.raises(GramError, match=SENTENCE) as told:
        GradientGram(nn.Linear(2, 2))
    assert f"{name} is not there" in str(told.value) and len(str(told.value).splitlines()) == 1


CHANGED = {
    "will_run": (torch._C, "_will_engine_execute_node", lambda node: True),
    "saved_tensors_stay": (torch._C._autograd, "_top_saved_tensors_default_hooks", lambda ignored: None),
    "unviewed": (torch, "_foreach_copy_", lambda into, values: None),
    "torch_functions_off": (torch._C, "DisableTorchFunctionSubclass", torch.enable_grad),
}


@pytest.mark.parametrize("name", CHANGED)
def test_a_name_that_does_something_else_is_told(name: str, untried: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*CHANGED[name])
    with pytest.raises(GramError, match=SENTENCE) as told:
        torch_private.trial()
    assert f"torch_private.{name} " in str(told.value)


def test_the_trial_leaves_everything_as_it_was(untried: None) -> None:
    state = torch.get_rng_state()
    with torch.no_grad():
        torch_private.trial()
    assert torch.equal(torch.get_rng_state(), state)


def test_the_range_that_was_run_holds_the_pins() -> None:
    """constraints.txt names what the tests here run, pyproject.toml the lowest version that may be installed."""
    low, high = torch_private.VERSIONS_RUN
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    (pinned,) = [line.split("==")[1] for line in pins if line.startswith("torch==")]
    assert pinned.startswith(f"{high}.")
    assert f'"torch>={low}"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
