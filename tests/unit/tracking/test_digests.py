"""Digests: 200 harmless changes are named 0 times, a change that can act every time."""

from __future__ import annotations

import ast
import importlib
import json
import os
import random
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from grpo_sweeps.models import tiny_path
from grpo_sweeps.tracking import digests
from grpo_sweeps.tracking.digests import Code, code_files, of_data, of_file, of_folder, of_function, of_model, of_source
from grpo_sweeps.types import Problem, TaskData
from tests.unit.test_borders import ALL_IMPORTS, PACKAGE, import_graph, source_files

ROOT = Path(__file__).resolve().parents[3]
MODULE = '''"""Doc."""
import numpy as np
LIMIT: float = 0.5
"""of an attribute"""
class Reward:
    """Doc."""
def reward(completion, problem, seed, *, names=("a", "b"), **more):
    """Doc."""
    if len(completion) > 3 and not problem.id:
        return f"{LIMIT:.2f}" + 'x'
    return {**more, "a": [1, 2.0, 10**3, None, True, b"z"]}
'''


def touched(text: str, draw: random.Random) -> str:
    return text


def commented(text: str, draw: random.Random) -> str:
    lines = text.split("\n")
    return "\n".join(["# first", *lines, "    # last"])


def redocumented(text: str, draw: random.Random) -> str:
    return f'"""Other words: {draw.random()}."""\n{text}' if not text.startswith(('"""', "from __future__")) else text


def spaced(text: str, draw: random.Random) -> str:
    return f"\n\n\n{text}\n\n"


def other_line_ends(text: str, draw: random.Random) -> str:
    return text.replace("\n", "\r\n")


def reformatted(text: str, draw: random.Random) -> str:
    return ast.unparse(ast.parse(text))


def undocumented(text: str, draw: random.Random) -> str:
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node):
            node.body = node.body[1:] or [ast.Pass()]
    return ast.unparse(tree)


KINDS: tuple[Callable[[str, random.Random], str], ...] = (
    touched, commented, redocumented, spaced, other_line_ends, reformatted, undocumented,
)  # fmt: skip


def checkout(place: Path) -> Path:
    for name in digests.FOLDERS:
        shutil.copytree(ROOT / name, place / name, ignore=shutil.ignore_patterns("__pycache__", "tiny"))
    (place / "hydra_plugins" / "another").mkdir()
    (place / "hydra_plugins" / "another" / "launcher.py").write_text("PLUGIN = 'of somebody else'\n")
    return place


def test_of_200_harmless_changes_none_is_named(tmp_path: Path) -> None:
    """The checkout is copied to another path, and changed in one file at a time."""
    first = of_folder(checkout(tmp_path / "one"), cache=tmp_path / "cache" / "one.json")
    assert first.syntax == digests.of_package().syntax, "another user's checkout, without git"
    draw, cache = random.Random(17), tmp_path / "cache" / "one.json"
    files = [path for path in code_files(tmp_path / "one") if path.suffix == ".py"]
    named = 0
    for change in range(200):
        path = draw.choice(files)
        before = path.read_bytes()
        if change % 10 == 0:
            (tmp_path / "one" / "README.md").write_text(str(change))
            (tmp_path / "one" / "grpo_sweeps" / "report" / "remarks.py").write_text(f"CHANGE = {change}\n")
        changed = KINDS[change % len(KINDS)](before.decode(), draw)
        path.write_bytes(changed.encode())
        named += of_folder(tmp_path / "one", cache=cache).syntax != first.syntax
        path.write_bytes(before)
    assert named == 0


def test_a_change_that_acts_is_named_wherever_it_is(tmp_path: Path) -> None:
    root, cache = checkout(tmp_path / "one"), tmp_path / "cache.json"
    first = of_folder(root, cache=cache).syntax
    for path in random.Random(3).sample([path for path in code_files(root) if path.suffix == ".py"], 30):
        before = path.read_text()
        path.write_text(f"{before}\nMORE = 1\n")
        assert of_folder(root, cache=cache).syntax != first, path
        path.write_text(before)
    moved = root / "grpo_sweeps" / "estimators" / "group.py"
    moved.rename(moved.with_name("groups.py"))
    assert of_folder(root, cache=cache).syntax != first


def test_no_run_imports_what_is_left_out() -> None:
    """`NOT_OF_A_RUN`, by the imports of what a job and a command start with."""
    graph = import_graph(source_files(), ALL_IMPORTS)
    left = ["grpo_sweeps.run", "grpo_sweeps.sweep.job", "grpo_sweeps.loop.train"]
    left += [name for name in graph if name.startswith(("hydra_plugins", "grpo_sweeps.engine", "grpo_sweeps.tasks"))]
    left += [name for name in graph if name.startswith(("grpo_sweeps.rewards", "grpo_sweeps.estimators"))]
    seen: set[str] = set()
    while left:
        name = left.pop()
        if name not in seen:
            seen.add(name)
            left += graph[name]
    out = {f"grpo_sweeps.{name.removesuffix('.py')}" for name in digests.NOT_OF_A_RUN}
    found = {name for name in seen if name in out or any(name.startswith(f"{one}.") for one in out)}
    assert not found
    assert {path.relative_to(ROOT).parts[1] for path in code_files(ROOT)} > {"loop", "engine", "estimators", "types.py"}
    assert all((PACKAGE / name).exists() for name in digests.NOT_OF_A_RUN)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("0.5", "0.50001"), ("> 3", ">= 3"), ("'x'", "'y'"), ("and not", "or not"), ('"b")', '"c")'), ("None", "0"),
        ("True", "1"), ("2.0", "2"), ("**more, ", ""), (":.2f", ":.3f"), ("b\"z\"", "'z'"), ("10**3", "10*3"),
    ],
)  # fmt: skip
def test_each_part_of_a_function_counts(old: str, new: str) -> None:
    assert old in MODULE
    assert of_source(MODULE.replace(old, new).encode()) != of_source(MODULE.encode())


def test_the_digest_of_a_source_is_known_and_does_not_depend_on_pythons_version() -> None:
    """By types, names of fields and values that Python 3.11 to 3.13 share: a golden value holds them to it."""
    assert of_source(MODULE.encode()) == GOLDEN
    for kind in KINDS:
        assert of_source(kind(MODULE, random.Random(0)).encode()) == GOLDEN
    assert of_source(b"def broken(:\r\n") == of_source(b"def broken(:\n") != of_source(b"def broken (:\n")
    deep = "x = " + "+".join(["1"] * 20_000)
    assert of_source(deep.encode()) and of_source(b"\xff\xfe")


GOLDEN = "c395b56161eaeaae"


def test_the_cache_spares_the_parsing_and_a_damaged_one_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, cache = checkout(tmp_path / "one"), tmp_path / "deep" / "cache.json"
    first = of_folder(root, cache=cache)
    for content in ("", "[]", '{"format": 1}', json.dumps({"format": digests.LENGTH, "trees": [1, 2]})):
        cache.write_text(content)
        assert of_folder(root, cache=cache) == first
    monkeypatch.setattr(digests, "of_source", lambda *_: pytest.fail("parsed again"))
    assert of_folder(root, cache=cache) == first
    assert of_folder(root, known=[Code("of a record", first.raw)]) == Code("of a record", first.raw)


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A reward in a package of the user's own, with files around it."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "mine" / "deep").mkdir(parents=True)
    files = {
        "mine/__init__.py": "SCALE = 2\n",
        "mine/deep/__init__.py": "",
        "mine/deep/rewards.py": "import json, numpy, torch\nfrom ..words import GOOD\nfrom mine import late\n"
        "def reward(c, p, s):\n    from . import lazy\n    from other_module import missing\n",
        "mine/words.py": "from grpo_sweeps.types import Problem\nimport mine.deep.rewards\nGOOD = 'a'\n",
        "mine/late.py": "",
        "mine/deep/lazy.py": "raise RuntimeError('imported')\n",
        "mine/unused.py": "",
        "other_module.py": "import yaml\nmissing = 1\n",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] in ("mine", "other_module")]:
        del sys.modules[name]


def test_imports_are_followed_through_the_users_own_files_alone(own: Path) -> None:
    found = of_function("mine.deep.rewards.reward")
    assert list(found) == [
        "mine", "mine.deep", "mine.deep.lazy", "mine.deep.rewards", "mine.late", "mine.words", "other_module",
    ]  # fmt: skip
    assert not any(name.startswith(("mine", "other_module")) for name in sys.modules), "nothing was imported"
    (own / "other_module.py").write_text("import yaml\nmissing = 2\n")
    again = of_function("mine.deep.rewards.reward")
    assert [name for name in found if found[name] != again[name]] == ["other_module"]
    assert of_function("grpo_sweeps.rewards.exact_match.strict") == of_function("no_such_module.f") == {}
    assert list(of_function("yaml.nodes.Node")) == ["yaml.nodes"], "an installed one: the file alone"


def test_what_has_been_imported_is_what_runs(own: Path) -> None:
    (own / "mine" / "deep" / "lazy.py").write_text("")
    importlib.import_module("mine.deep.rewards")
    first = of_function("mine.deep.rewards.reward")
    (own / "mine" / "deep" / "rewards.py").write_text("def reward(c, p, s):\n    return 1.0\n")
    assert of_function("mine.deep.rewards.reward") == first
    del sys.modules["mine.deep.rewards"]
    importlib.invalidate_caches()
    assert of_function("mine.deep.rewards.reward") != first


def test_problems_count_by_all_that_they_say_in_order() -> None:
    a, b = Problem("1", "q", "a", "s"), Problem("2", "q2", "a")
    first = of_data(TaskData((a, b), (Problem("3", "q3", "a"),)))
    assert first["train"].startswith("2 problems, ") and first["held_out"].startswith("1 problems, ")
    others = [
        (b, a),
        (a,),
        (a, Problem("2", "q2", "b")),
        (a, Problem("2", "q2", "a", "w")),
        (Problem("1q", "", "a"), b),
    ]
    assert len({of_data(TaskData(train, ()))["train"] for train in ((a, b), *others)}) == len(others) + 1


def test_a_models_files_count_and_what_is_beside_them_does_not(tmp_path: Path) -> None:
    shutil.copytree(tiny_path(), tmp_path / "model")
    folder = tmp_path / "model"
    first = of_model(str(folder))
    assert first == of_model("embedded") and "pretrain_log.json" not in first
    assert of_model(str(folder), random=True).keys() == first.keys() - {"model.safetensors"}
    (folder / "tokenizer.json").write_text("{}")
    assert [name for name, one in of_model(str(folder)).items() if one != first[name]] == ["tokenizer.json"]
    gguf = tmp_path / "x.gguf"
    gguf.write_bytes(b"1")
    assert list(of_model(str(gguf))) == ["x.gguf"]
    assert of_model("nobody/nothing") == of_model(str(tmp_path / "absent" / "deep" / "er")) == {}


def test_a_hubs_model_is_told_by_the_commit_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    config = tmp_path / "snapshots" / ("c" * 40) / "config.json"
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_, **__: str(config))
    assert of_model("some/model") == {"revision": "c" * 40}


def test_of_a_large_file_size_header_and_blocks_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests, "WHOLE", 2**16)
    path = tmp_path / "model.safetensors"
    header = b" " * 9000
    content = bytearray(len(header).to_bytes(8, "little") + header + random.Random(0).randbytes(2**20))
    path.write_bytes(content)
    first = of_file(path)
    for place in (20, 8999, 2**20 // 2 // 4096 * 4096, len(content) - 1):
        changed = bytearray(content)
        changed[place : place + 20_000] = bytes(20_000)[: len(content) - place]
        path.write_bytes(changed[: len(content)])
        assert of_file(path) != first, place
    path.write_bytes(content + b"1")
    assert of_file(path) != first
    path.write_bytes(content)
    os.utime(path, (1, 1))
    assert of_file(path) == first


def test_a_model_that_was_saved_offline_is_the_same(tmp_path: Path) -> None:
    """transformers writes whether the hub was out of reach into tokenizer_config.json."""
    path = tmp_path / "tokenizer_config.json"
    online = {"eos_token": "</s>", "local_files_only": False}
    found = []
    for content in (online, {**online, "local_files_only": True}, {**online, "eos_token": "<e>"}):
        path.write_text(json.dumps(content))
        found.append(of_model(str(tmp_path)))
    assert found[0] == found[1] != found[2]


def test_the_digests_of_a_start_cost_little(tmp_path: Path) -> None:
    """Of the tiny model and its task, as a job computes them: the package's bytes are those of its record."""
    code = digests.of_package()
    began = time.process_time()
    assert of_folder(ROOT, known=[code]).syntax == code.syntax
    of_model("embedded")
    assert time.process_time() - began < 0.5, "about 0.02 s where nothing else runs"
