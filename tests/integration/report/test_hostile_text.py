"""Names, problems, completions and errors that others wrote, through every way out: raw in none of them.

One list of texts, in every place of a sweep that takes them, and what each format must have made of them.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import logging
import re
import socket
import subprocess
import sys
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, replace
from html.parser import HTMLParser
from pathlib import Path

import pandas as pd
import pytest
import yaml

from grpo_sweeps import cancel, run, status, sync, theory, verify
from grpo_sweeps.cli import say
from grpo_sweeps.config import to_mapping
from grpo_sweeps.control.__main__ import main as control
from grpo_sweeps.credit import page as credit_page
from grpo_sweeps.credit.__main__ import main as credit
from grpo_sweeps.loop.progress import RunProgress
from grpo_sweeps.publish import formats
from grpo_sweeps.report.__main__ import main as report
from grpo_sweeps.sweep.execute import _logged_to, execute
from grpo_sweeps.tracking.mlflow_store import Store
from grpo_sweeps.tracking.status import read_status, write_status
from tests.composing import run_config

pytestmark = pytest.mark.integration

ROOT = Path(__file__).resolve().parents[3]
BELL, ESCAPE, OVERRIDE = "\x07", "\x1b]0;owned\x07", "\u202e"
TEXTS = [
    "<script>alert(1)</script>", "<img src=x onerror=alert(1)>", "[red]x[/red]", ESCAPE, "\x1b[31m", BELL, "a|b",
    "two\nlines", "`rm`", "$x_1$", "&amp", "50%", "\\input{/etc/passwd}", "[a](javascript:alert(1))", "{{ 7*7 }}",
    OVERRIDE, "\x9b31m",
]  # fmt: skip
HOSTILE = "=cmd()" + " ".join(TEXTS)
SWEEP = HOSTILE.replace("/", "") + ".d"  # a folder's name: all but the slash
TAGS = {
    "html", "head", "meta", "title", "style", "body", "main", "section", "article", "header", "nav", "h1", "h2", "h3",
    "h4", "p", "a", "ul", "ol", "li", "dl", "dt", "dd", "table", "caption", "thead", "tbody", "tr", "th", "td",
    "figure", "figcaption", "img", "details", "summary", "code", "pre", "span", "strong", "em", "b", "div", "small",
    "footer", "br",
}  # fmt: skip


@dataclass(frozen=True)
class Made:
    """A folder of runs with one hostile sweep, and its report."""

    runs: Path
    out: Path

    def text(self, name: str) -> str:
        return (self.out / name).read_text()


@pytest.fixture(scope="module")
def made(write, tmp_path_factory) -> Made:
    place = tmp_path_factory.mktemp("hostile")
    for R in (2, 4):
        for reward in ("a", "b"):
            folder = write(
                place / "runs", SWEEP, R, 0, steps=8, text=HOSTILE, prompt_id=HOSTILE, config={"seed": reward},
                status={"state": "failed", "error": f"ValueError: {HOSTILE}", "notes": [HOSTILE], "command": HOSTILE,
                        "name": f"{HOSTILE} {reward} {R}", "host": socket.gethostname()},
            )  # fmt: skip
            config = yaml.safe_load((folder / "config.yaml").read_text()) | {"seed": 0}
            config["reward"]["_target_"] = f"my.{HOSTILE}" if reward == "a" else "other.reward"
            config["model"]["name"] = config["task"]["name"] = config["task"]["prompt"] = HOSTILE
            (folder / "config.yaml").write_text(yaml.safe_dump(config))
    assert report([f"runs_dir={place / 'runs'}", f"out={place / 'out'}"]) == 0
    return Made(place / "runs", place / "out")


# A task whose problems are hostile in all that may be any text, told apart by a number. An answer must be one.
TASK = f"""
from grpo_sweeps.types import Problem, TaskData

def hostile() -> TaskData:
    problems = [Problem(f"{{i}} {{TEXT}}", f"{{i}} {{TEXT}}", "3", solution=TEXT) for i in range(6)]
    return TaskData(tuple(problems[:4]), tuple(problems[4:]))

TEXT = {HOSTILE!r}
"""


@dataclass(frozen=True)
class Written:
    """What a command has written into a folder, and what it said to a pipe."""

    folder: Path
    said: str


def written(command, words: Sequence[str], folder: Path) -> Written:
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        assert command([*words, f"out={folder}"]) == 0
    return Written(folder, said.getvalue())


@pytest.fixture(scope="module")
def of_report(made: Made) -> Written:
    return Written(made.out, "")


@pytest.fixture(scope="module")
def of_credit(tmp_path_factory) -> Written:
    """The credit of a trained run whose problems, completions, names and command are hostile."""
    place = tmp_path_factory.mktemp("credit")
    (place / "hostile_task.py").write_text(TASK)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(place))
        patch.setattr(credit_page, "pieces", lambda tokenizer, ids, edges: [HOSTILE] * (len(edges) - 1))
        config = run_config(
            "R=2", "sweep=one", f"runs_dir={place / 'runs'}", "tracking=local", "task=custom", "trainer.device=cpu",
            "task._target_=hostile_task.hostile", "task.prompt='{question}'", "rollout.max_new_tokens=8",
            "trainer.steps=1", "trainer.prompts=2", "trainer.eval_every=0",
        )  # fmt: skip
        run_dir = place / "runs" / SWEEP / ("0" * 12)
        assert execute(to_mapping(config), run_dir, name="R=2 seed=0").ok
        write_status(run_dir, replace(read_status(run_dir), name=HOSTILE, command=HOSTILE))
        named = yaml.safe_load((run_dir / "config.yaml").read_text())
        named["model"]["name"] = named["task"]["name"] = HOSTILE
        (run_dir / "config.yaml").write_text(yaml.safe_dump(named))
        few = ["prompts=2", "rollouts=1", "continuations=3", "every=4", "device=cpu"]
        return written(credit, [f"sweep={SWEEP}", f"runs_dir={place / 'runs'}", *few], place / SWEEP)


@pytest.fixture(scope="module")
def of_theory(tmp_path_factory) -> Written:
    few = ["policies=1", "prompts=2", "draws=1000", "steps=10"]
    return written(theory.main, few, tmp_path_factory.mktemp("theory") / SWEEP / "api_key=s3cret")


@pytest.fixture(scope="module")
def of_control(tmp_path_factory) -> Written:
    """The control of a task whose problems, solutions and name are hostile."""
    place = tmp_path_factory.mktemp("control")
    (place / "hostile_task_of_control.py").write_text(TASK)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(place))
        words = [
            "R=2", "groups=2", "tracking=local", "task=custom", "trainer.device=cpu", "trainer.eval_every=0",
            "trainer.prompts=2", "task._target_=hostile_task_of_control.hostile", "task.prompt='{question}'",
            f"task.name='{HOSTILE}'", "rollout.max_new_tokens=8",
        ]  # fmt: skip
        return written(control, words, place / SWEEP)


SUFFIXES = {
    "report": {".html", ".md", ".csv", ".tex", ".json"}, "credit": {".html", ".csv", ".json"},
    "theory": {".html", ".md", ".csv"}, "control": {".html", ".md", ".csv", ".json"},
}  # fmt: skip


@pytest.fixture(params=SUFFIXES)
def pages(request: pytest.FixtureRequest) -> tuple[str, Written]:
    """Each command that writes a page, by name, and what it wrote."""
    return request.param, request.getfixturevalue(f"of_{request.param}")


def assert_no_control(text: str, where: object) -> None:
    """Nothing that a terminal obeys or that reorders what is seen."""
    found = {f"U+{ord(c):04X}" for c in text if unicodedata.category(c) in ("Cc", "Cf") and c not in "\n\t"}
    assert not found, (where, found)


class Parsed(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_data(self, data):
        self.words.append(data)


def test_every_command_that_writes_a_page_is_among_these() -> None:
    """By who calls the one function that writes such a folder."""
    callers = set()
    for path in (ROOT / "grpo_sweeps").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module == "grpo_sweeps.publish.page":
                callers |= {path.parent.name} if "write" in [one.name for one in node.names] else set()
    assert {"theory" if name == "science" else name for name in callers} == SUFFIXES.keys()


def test_no_file_of_a_report_holds_what_a_terminal_obeys(pages: tuple[str, Written]) -> None:
    name, made = pages
    texts = [path for path in made.folder.iterdir() if path.suffix not in (".png", ".pdf")]
    assert {path.suffix for path in texts} == SUFFIXES[name]
    for path in texts:
        assert_no_control(path.read_text(), path.name)
        assert "\nlines" not in path.read_text() or path.suffix == ".html", path.name


def test_the_page_has_its_own_tags_and_attributes_alone(pages: tuple[str, Written]) -> None:
    text = (pages[1].folder / "index.html").read_text()
    page = Parsed(text)
    assert page.tags <= TAGS, page.tags - TAGS
    assert not {name for name in page.attributes if name.startswith("on")}
    assert "<script>alert(1)<" in "".join(page.words)  # it is there to be read
    assert "[U+202E]" in text and "[U+001B]" in text and "{{ 7*7 }}" in text
    assert "s3cret" not in text


def test_what_is_said_of_a_page_is_plain(of_credit: Written, of_theory: Written, of_control: Written) -> None:
    for said in (of_credit.said, of_theory.said, of_control.said):
        assert "[red]x[red]" in said and "index.html" in said
        assert_no_control(said, "said")


def test_markdown_begins_nothing(made: Made) -> None:
    seen = ""
    for path in made.out.glob("*.md"):
        text = path.read_text()
        seen += text
        assert "<script" not in text and "<img" not in text, path.name
        assert not re.search(r"(?<!\\)`rm", text) and not re.search(r"(?<!\\)\$x", text), path.name
        assert "](javascript" not in text, path.name
        assert not [line for line in text.splitlines() if line.startswith("|") and re.search(r"a(?<!\\)\|b", line)]
    assert "&lt;script" in seen


def test_no_cell_of_a_table_is_a_formula(pages: tuple[str, Written]) -> None:
    for path in pages[1].folder.glob("*.csv"):
        frame = pd.read_csv(path, dtype=str, keep_default_na=False)
        cells = [*frame.columns, *(cell for name in frame for cell in frame[name])]
        for cell in cells:
            number = re.fullmatch(r"[-+]?[\d.]+(e[-+]?\d+)?", cell) is not None
            assert number or not cell.lstrip().startswith(formats.FORMULA_STARTS), (path.name, cell)
    table = formats.csv(pd.DataFrame({HOSTILE: [HOSTILE, " @x", "+1", "-x", "\t=1"], "n": [-1.5, 2.0, 0.0, 1.0, 1.0]}))
    assert table.startswith("'=cmd()") and "'=cmd()" in table.splitlines()[1] and "-1.5" in table
    assert [line[0] for line in table.splitlines()[2:]] == ["'"] * 4


def test_latex_is_text(made: Made) -> None:
    tex = made.text("table1.tex")
    assert "\\input" not in tex and re.search(r"\\label\{tab:[A-Za-z0-9:.-]+\}", tex)
    table = formats.latex([HOSTILE, "b"], [[HOSTILE, "1"], ["[2pt] x", "2"], ["*", "3"]], HOSTILE, HOSTILE)
    assert_no_control(table, "latex")
    body = table[table.index(r"\caption") :]
    for bare in (r"(?<!\\)\$x", r"(?<!\\)&amp", r"50(?<!\\)%", r"\\input", r"\\\\\s*\[", r"\\\\\s*\*"):
        assert not re.search(bare, body), bare
    assert r"50\%" in body and r"\textbackslash{}input\{/etc/passwd\}" in body


def test_figures_draw_letters_and_not_formulas(made: Made) -> None:
    """A formula that cannot be parsed would stop the report; names of arms are in the legends."""
    from grpo_sweeps.publish.drawing import Panel, Plot, render

    def draw(ax):
        ax.plot([0, 1], [0, 1], label=HOSTILE + r" $\frac{$")
        ax.set_xlabel(HOSTILE)
        ax.legend()

    files = render(Plot("f", "t", "c", (Panel(HOSTILE, "alt", draw),)))
    svg = files["f_1.svg"].decode()
    assert "<script" not in svg and "<img" not in svg
    assert_no_control(svg, "svg")


@pytest.mark.parametrize("terminal", [False, True], ids=["pipe", "terminal"])
@pytest.mark.parametrize("command", ["status", "verify", "sync", "report", "cancel", "run"])
def test_a_terminal_obeys_no_name(
    made: Made, command: str, terminal: bool, tmp_path: Path, template: Path, write, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, err = io.StringIO(), io.StringIO()
    out.isatty = lambda: terminal  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    monkeypatch.setenv("COLUMNS", "4000")
    monkeypatch.setenv("TERM", "xterm")
    words = [f"runs_dir={made.runs}"]
    if command == "status":
        assert status.main(words) == 0
    elif command == "verify":
        verify.main([*words, "copies=false"])
    elif command == "report":
        report([*words, f"out={tmp_path / 'out'}"])
    elif command == "cancel":
        with subprocess.Popen(["sleep", "60"]) as stranger:  # is left alone, and named with its run
            running = {"state": "running", "name": HOSTILE, "host": socket.gethostname(), "pid": stranger.pid}
            write(tmp_path / "runs", SWEEP, 2, 0, steps=1, status=running)
            assert cancel.main([f"sweep={SWEEP}", f"runs_dir={tmp_path / 'runs'}"]) == 1
            stranger.kill()
    elif command == "run":
        monkeypatch.chdir(tmp_path)
        prompts = f"task.prompt='{HOSTILE} {{question}}','b {{question}}'"  # an axis: names say what varies
        assert run.main(["-m", "R=2", "sweep=s", "dry_run=true", "tracking=local", "trainer.device=cpu", prompts]) == 0
    else:
        (tmp_path / "mlflow.db").write_bytes(template.read_bytes())
        sync.main([*words, f"uri=sqlite:///{tmp_path}/mlflow.db", f"experiment={'e' * 8}"])
    said = out.getvalue() + err.getvalue()
    assert said
    own = re.sub(r"\x1b\[[0-9;]*m", "", out.getvalue()) + err.getvalue() if terminal else said  # rich's own colours
    assert_no_control(own, command)
    if command in ("status", "cancel", "run"):
        assert "[red]x[/red]" in own


def test_the_copy_in_mlflow_has_plain_names_and_tags(made: Made, tmp_path: Path, template: Path) -> None:
    (tmp_path / "mlflow.db").write_bytes(template.read_bytes())
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    assert sync.main([f"runs_dir={made.runs}", f"uri={uri}", "experiment=hostile"]) == 0
    store = Store(uri, "hostile")
    runs = store.client.search_runs([store.experiment_id])
    assert len(runs) == 5
    for one in runs:
        assert_no_control(one.info.run_name, "name")
        for key, value in one.data.tags.items():
            assert key.startswith("grpo_sweeps.") or not re.search("[\x00-\x1f\u202e]", value), key


@pytest.mark.parametrize("terminal", [False, True], ids=["lines", "bar"])
def test_the_progress_of_a_run_shows_its_name_plainly(terminal: bool) -> None:
    stream = io.StringIO()
    stream.isatty = lambda: terminal  # type: ignore[method-assign]
    name = f"[red]{OVERRIDE}{BELL}x\n"
    with RunProgress(name, 2, stream=stream) as progress:
        progress.step(1, {"reward": 0.5})
        progress.evaluated(1, {"eval/reward": 0.5})
    said = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue()).replace("\r", "")
    assert_no_control(said, "progress")
    assert "[red]" in said


def test_a_log_line_and_a_sentence_are_plain(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with _logged_to(tmp_path / "log.txt") as log:
        log.info("%s", HOSTILE)
        logging.getLogger("somebody.else").warning("%s", HOSTILE)
    assert_no_control((tmp_path / "log.txt").read_text(), "log")
    capsys.readouterr()  # what another test's handlers say
    say(f"error: {HOSTILE}")
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert_no_control(said, "say")


def test_machine_readable_output_is_ascii(made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    assert status.main([f"runs_dir={made.runs}", "json=true"]) == 0
    out = capsys.readouterr().out
    assert out.isascii() and len(json.loads(out)) == 4
    assert made.text("manifest.json").isascii() and json.loads(made.text("manifest.json"))["sweep"] == SWEEP


MAY_PRINT = {"text.py", "pretrain_tiny.py"}


def test_nothing_prints_but_the_one_function() -> None:
    """Text that is not JSON goes out by `text.show` (or `cli.say`); programs that show no names are named above."""
    wrong = []
    for path in sorted((ROOT / "grpo_sweeps").rglob("*.py")):
        if path.name in MAY_PRINT or "benchmarks" in path.parts:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
                argument = ast.unparse(node.args[0]) if node.args else ""
                if not argument.startswith("json.dumps("):
                    wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}: print({argument})")
    assert not wrong, "\n".join(wrong)
