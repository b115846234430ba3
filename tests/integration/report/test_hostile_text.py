"""Names, problems, completions and errors that others wrote, through every way out: raw in none of them.

One list of texts, in every place of a sweep that takes them, and what each format must have made of them.
"""

from __future__ import annotations

import ast
import io
import json
import logging
import re
import socket
import sys
import unicodedata
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path

import pandas as pd
import pytest
import yaml

from grpo_sweeps import status, sync, verify
from grpo_sweeps.cli import say
from grpo_sweeps.loop.progress import RunProgress
from grpo_sweeps.publish import formats
from grpo_sweeps.report.__main__ import main as report
from grpo_sweeps.sweep.execute import _logged_to
from grpo_sweeps.tracking.mlflow_store import Store

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
    "figure", "figcaption", "img", "details", "summary", "code", "pre", "span", "strong", "em", "div", "small",
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


def test_no_file_of_a_report_holds_what_a_terminal_obeys(made: Made) -> None:
    texts = [path for path in made.out.iterdir() if path.suffix not in (".png", ".pdf")]
    assert {path.suffix for path in texts} == {".html", ".md", ".csv", ".tex", ".json"}
    for path in texts:
        assert_no_control(path.read_text(), path.name)
        assert "\nlines" not in path.read_text() or path.suffix == ".html", path.name


def test_the_page_has_its_own_tags_and_attributes_alone(made: Made) -> None:
    text = made.text("index.html")
    page = Parsed(text)
    assert page.tags <= TAGS, page.tags - TAGS
    assert not {name for name in page.attributes if name.startswith("on")}
    assert "<script>alert(1)</script>" in "".join(page.words)  # it is there to be read
    assert "[U+202E]" in text and "[U+001B]" in text and "{{ 7*7 }}" in text


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


def test_no_cell_of_a_table_is_a_formula(made: Made) -> None:
    for path in made.out.glob("*.csv"):
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
@pytest.mark.parametrize("command", ["status", "verify", "sync", "report"])
def test_a_terminal_obeys_no_name(
    made: Made, command: str, terminal: bool, tmp_path: Path, template: Path, monkeypatch: pytest.MonkeyPatch
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
    else:
        (tmp_path / "mlflow.db").write_bytes(template.read_bytes())
        sync.main([*words, f"uri=sqlite:///{tmp_path}/mlflow.db", f"experiment={'e' * 8}"])
    said = out.getvalue() + err.getvalue()
    assert said
    own = re.sub(r"\x1b\[[0-9;]*m", "", out.getvalue()) + err.getvalue() if terminal else said  # rich's own colours
    assert_no_control(own, command)
    if command == "status":
        assert "[red]x[/red]" in own


def test_the_copy_in_mlflow_has_plain_names_and_tags(made: Made, tmp_path: Path, template: Path) -> None:
    (tmp_path / "mlflow.db").write_bytes(template.read_bytes())
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    assert sync.main([f"runs_dir={made.runs}", f"uri={uri}", "experiment=hostile"]) == 0
    store = Store(uri, "hostile")
    runs = store.client.search_runs([store.experiment_id])
    assert len(runs) == 5
    for run in runs:
        assert_no_control(run.info.run_name, "name")
        for key, value in run.data.tags.items():
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
