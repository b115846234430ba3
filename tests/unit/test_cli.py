"""Every command alike: --help, --version, one sentence for a bad word; the list of commands and what starts one."""

from __future__ import annotations

import importlib
import os
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_sweeps import __main__ as entry
from grpo_sweeps import __version__, cli
from grpo_sweeps.benchmarks.options import OPTIONS
from grpo_sweeps.types import ConfigError

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "grpo_sweeps"
VERSION = f"grpo_sweeps {__version__}\n"
# What stands before the words, a bad value of each command, and what the sentence about it allows.
BEFORE = {"bench": ["gram"]}
BAD_VALUE = {
    "run": ("R=x", "an integer"),
    "check": ("R=x", "an integer"),
    "status": ("json=yes", "true or false"),
    "verify": ("copies=perhaps", "true or false"),
    "cancel": ("runs_dir=nowhere", "no such folder"),
    "report": ("sweep=a/b", "one folder name"),
    "credit": ("prompts=x", "a whole number"),
    "control": ("groups=x", "a whole number"),
    "theory": ("steps=x", "a whole number"),
    "sync": ("sweep=a/b", "the name of one folder"),
    "bench": ("R=x", "a whole number"),
    "convert": ("dtype=int8", "allowed are bfloat16, float16, float32"),
    "diff": ("run=a", "two runs are needed"),
    "export": ("step=x", "a whole number is needed"),
    "pretrain_tiny": ("lr=x", "a number is needed"),
}
BESIDE = {"cancel": ["sweep=x"], "convert": ["model.path=x", "out=y"], "pretrain_tiny": ["out=x"]}
KEYS = {"run": ("model: ", "R, seed, "), "check": ("GROUP=CHOICE", "KEY=VALUE", "+sweeps=NAME")}

every_command = pytest.mark.parametrize("name", entry.COMMANDS)


def module_of(name: str) -> ModuleType:
    package = (PACKAGE / name).is_dir()
    return importlib.import_module(f"grpo_sweeps.{name}.__main__" if package else f"grpo_sweeps.{name}")


def refused(name: str, words: list[str], capfd: pytest.CaptureFixture[str]) -> str:
    """The one sentence with which the command refuses the words."""
    assert module_of(name).main(words) == 2
    said = capfd.readouterr()
    assert said.err.startswith("error: ") and said.err.count("\n") == 1 and not said.out, said
    return said.err


def test_the_list_has_every_command() -> None:
    doors = {path.stem for path in PACKAGE.glob("*.py") if 'if __name__ == "__main__":' in path.read_text()}
    doors |= {path.parent.name for path in PACKAGE.glob("*/__main__.py")}
    assert set(entry.COMMANDS) == doors - {"__main__"} == set(BAD_VALUE)


@every_command
@pytest.mark.parametrize("word", ["-h", "--help"])
def test_help_names_the_keys(name: str, word: str, capfd: pytest.CaptureFixture[str]) -> None:
    module = module_of(name)
    assert module.main([word]) == 0
    page, err = capfd.readouterr()
    assert not err and f"python -m grpo_sweeps.{name} " in page
    for shown in KEYS.get(name, ()):
        assert shown in page
    if hasattr(module, "COMMAND"):
        for key in module.COMMAND.keys:
            assert (f"--{key.typed}" if key.flag else f"  {key.typed}={key.value} ") in page and key.about
            assert key.flag or key.default in (None, "") or f"(default: {cli.written(key.default)})" in flat(page)
    elif name not in KEYS:
        assert name == "bench" and all(f"  {benchmark} " in page for benchmark in OPTIONS)


def flat(page: str) -> str:
    return " ".join(page.split())


@pytest.mark.parametrize("benchmark", OPTIONS)
def test_help_of_a_benchmark_names_its_keys(benchmark: str, capfd: pytest.CaptureFixture[str]) -> None:
    from grpo_sweeps import bench

    assert bench.main([benchmark, "--help"]) == 0
    page = flat(capfd.readouterr().out)
    for key in cli.named("bench", OPTIONS[benchmark], "").keys:
        assert f" {key.typed}={key.value} {key.about}" in page


@every_command
def test_version_is_ours(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    for words in (["--version"], [*BEFORE.get(name, []), "--version"]):
        assert module_of(name).main(words) == 0
        assert capfd.readouterr() == (VERSION, "")


def test_version_is_that_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["version"] == __version__
    module, _, function = project["scripts"]["grpo-sweeps"].partition(":")
    assert getattr(importlib.import_module(module), function) is entry.main


@every_command
@pytest.mark.parametrize("word", ["nope=1", "nope", "--nope", "=1", "a b", "-1"])
def test_a_word_that_is_not_understood_is_one_sentence(
    name: str, word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    said = refused(name, [*BEFORE.get(name, []), word], capfd)
    assert word.partition("=")[0] in said
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["theory", "credit", "status"])
def test_help_is_a_flag_and_no_word(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert "help" in refused(name, ["help"], capfd)


@pytest.mark.parametrize(
    ("name", "words", "sentence"),
    [
        ("theory", ["seed=-1"], "theory: seed=-1: a number from 0 to 4294967295 is needed"),
        ("theory", ["seed=99999999999999999999"], "a number from 0 to 4294967295 is needed"),
        ("theory", ["policies=0"], "theory: policies=0: 1 or more is needed"),
        *(("pretrain_tiny", ["out=x", f"{key}={value}"], f"{key}='{value}' is not allowed: {needed} is needed.")
          for key, value, needed in (
              ("steps", "0", "1 or more"), ("batch", "0", "1 or more"), ("lr", "-1", "0 or more"),
              ("lr", "nan", "0 or more"), ("lr", "inf", "0 or more"), ("warmup", "0", "1 or more"),
              ("eval_every", "0", "1 or more"), ("problems", "0", "1 or more"), ("eval_problems", "0", "1 or more"),
              ("prompt_weight", "-1", "0 or more"), ("device", "gpu", "cpu, cuda or cuda:N"),
              ("seed", "-1", "a number from 0 to 4294967295"))),
        ("pretrain_tiny", ["out=there/x"], "out=there/x: cannot be made (Not a directory); give a folder."),
    ],
)  # fmt: skip
def test_a_value_out_of_range_is_one_sentence(
    name: str, words: list[str], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").write_text("a file")
    assert sentence in refused(name, words, capfd)
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


@every_command
def test_a_path_that_is_too_long_is_one_sentence(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    long = "a" * 5000
    keys = {
        "run": ["runs_dir", "model.path"], "check": ["runs_dir"], "theory": ["out"], "bench": ["model"],
        "convert": ["model.path", "out"], "pretrain_tiny": ["out"], "export": ["run", "out"],
        "sync": ["runs_dir", "sweep", "run"], "control": ["runs_dir", "out"],
    }  # fmt: skip
    for key in keys.get(name, ["runs_dir", "sweep"]):
        said = refused(name, [*BEFORE.get(name, []), f"{key}={long}"], capfd)
        assert f"{key}=aaa" in said and "..." in said and "too long" in said and len(said) < 300, said


@every_command
def test_a_key_given_twice_is_one_sentence(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    word = {
        "check": "R=4",
        "run": "R=4",
        "convert": "out=x",
        "theory": "seed=1",
        "bench": "R=4",
        "pretrain_tiny": "lr=1",
    }
    one = word.get(name, "sweep=x")
    key = one.partition("=")[0]
    said = refused(name, [*BEFORE.get(name, []), one, f"{key}=2"], capfd)
    assert said.startswith(f"error: {one} {key}=2: {key} is given twice; give it once")


@every_command
def test_a_bad_value_is_one_sentence_with_key_value_and_what_is_allowed(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    word, allowed = BAD_VALUE[name]
    said = refused(name, [*BEFORE.get(name, []), word, *BESIDE.get(name, [])], capfd)
    key, _, value = word.partition("=")
    assert f"{key}={value}" in said.replace("'", "") and allowed in said
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]


@pytest.mark.parametrize("words", [[], ["-h"], ["--help"]])
def test_the_list(words: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert entry.main(words) == 0
    page, err = capfd.readouterr()
    assert not err and all(f"  {name} " in page and line in page for name, line in entry.COMMANDS.items())


def test_the_version_and_an_unknown_command(capfd: pytest.CaptureFixture[str]) -> None:
    assert entry.main(["--version"]) == 0
    assert capfd.readouterr() == (VERSION, "")
    for word in ("nowhere", "--nope", "sweep=x", ""):
        assert entry.main([word, "--help"]) == 2
        said = capfd.readouterr().err
        assert said == f"error: {word}: no such command; allowed are {', '.join(entry.COMMANDS)}\n"


@every_command
def test_a_command_is_started_as_python_m_does(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[object] = []
    monkeypatch.setattr(os, "execv", lambda *words: started.append(words))
    entry.main([name, "-m", "R=2,4", "--help"])
    assert started == [(sys.executable, [sys.executable, "-m", f"grpo_sweeps.{name}", "-m", "R=2,4", "--help"])]


@dataclass(frozen=True)
class Options:
    """Every kind of key."""

    name: str | None = cli.key(None, "a text", unset="none")
    text: str = cli.key("", "another text")
    whole: int = cli.key(3, "a whole number")
    number: float = cli.key(0.5, "a number")
    wholes: tuple[int, ...] = cli.key((1, 2), "several")
    texts: tuple[str, ...] = cli.key(("a",), "several texts")
    yes: bool = cli.key(False, "true or false")
    from_: str = cli.key("", "no name in Python", word="a.from")
    now: bool = cli.key(False, "a flag", flag=True)


COMMAND = cli.Command("command", Options, "Does it.", "{word}: allowed are {allowed}")


def test_words_get_the_types_of_their_fields() -> None:
    assert COMMAND.parse([]) == Options()
    words = ["wholes=4", "--now", "number=2e-3", "yes=true", "texts=1,true,null", "a.from=012", "name=null"]
    assert COMMAND.parse([*words, "whole=-8", "text=a=b c"]) == Options(
        "null", "a=b c", -8, 0.002, (4,), ("1", "true", "null"), True, "012", True
    )


@given(st.text())
def test_a_text_stays_as_it_was_typed(text: str) -> None:
    if text == "???":  # OmegaConf's word for a value that is missing
        with pytest.raises(ConfigError, match="a text is expected"):
            COMMAND.parse([f"text={text}"])
    else:
        assert COMMAND.parse([f"text={text}"]).text == text


@given(st.text(alphabet="\\${}a:,.'\" ?", min_size=4))
def test_nothing_in_a_text_is_an_interpolation(text: str) -> None:
    assert COMMAND.parse([f"name={text}"]).name == text


@pytest.mark.parametrize(
    ("word", "sentence"),
    [
        ("whole=2.0", "whole=2.0: a whole number is expected"),
        ("whole=", "whole=: a whole number is expected"),
        ("whole=${number}", "whole=${number}: a whole number is expected"),
        ("number=x", "number=x: a number is expected"),
        ("wholes=1,,2", "wholes=1,,2: a whole number or several, with commas, is expected"),
        ("whole=1 whole=1 whole=2", "whole=1 whole=1 whole=2: whole is given 3 times; give it once"),
        ("yes=on", "yes=on: true or false is expected"),
        ("yes=1", "yes=1: true or false is expected"),
        ("texts=???", "texts=???: a text or several, with commas, is expected"),
        ("from_=x", "from_=x: allowed are name=TEXT, text=TEXT, whole=N, number=X, wholes=N,N, texts=TEXT,TEXT, "
         "yes=true|false, a.from=TEXT and --now"),
        ("now=true", "now=true: allowed are "),
        ("--no", "--no: allowed are "),
        ("--now=true", "--now=true: allowed are "),
    ],
)  # fmt: skip
def test_what_is_refused(word: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        COMMAND.parse(word.split(" "))
    assert str(caught.value).startswith(sentence)


def test_the_page_is_whole() -> None:
    page = COMMAND.parser().format_help()
    assert page.startswith("usage: command [name=TEXT] [text=TEXT] [whole=3] [number=0.5] [wholes=1,2] [texts=a] ")
    for line in (
        "Does it.",
        "  name=TEXT        a text (default: none)",
        "  wholes=N,N       several (default: 1,2)",
        "  yes=true|false   true or false (default: false)",
        "  a.from=TEXT      no name in Python",
        "  --now       a flag",
    ):
        assert line in page.splitlines(), page


def test_progress_is_said_at_most_every_so_many_seconds(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr("grpo_sweeps.cli.time.monotonic", lambda: now[0])
    progress = cli.Progress(every_s=2.0)
    for second, sentence in ((101.0, "too early"), (102.5, "first"), (104.0, "too soon"), (104.6, "second")):
        now[0] = second
        progress(sentence)
    assert capsys.readouterr().err.splitlines() == ["first", "second"]


@pytest.mark.parametrize(("no_color", "red"), [("", True), ("1", False)])
def test_an_error_is_red_on_a_terminal_only(
    no_color: str, red: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NO_COLOR", no_color)
    monkeypatch.setenv("TERM", "xterm")
    cli.say("error: \x1b[31mx")
    assert "\x1b" not in capsys.readouterr().err, "no terminal"
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    cli.say("error: \x1b[31mx")
    said = capsys.readouterr().err
    assert said == ("\x1b[31merror:\x1b[0m  [31mx\n" if red else "error:  [31mx\n")


@pytest.mark.parametrize(
    ("name", "word", "near"),
    [
        ("report", "sweeps=x", "sweep="),
        ("status", "swep=x", "sweep="),
        ("export", "rn=x", "run="),
        ("", "stats", "status"),
    ],
)
def test_the_word_that_was_meant_is_named(name: str, word: str, near: str, capfd: pytest.CaptureFixture[str]) -> None:
    said = refused(name, [word], capfd) if name else refused_by_list(word, capfd)
    assert said.rstrip().endswith(f"; did you mean {near}?")


def refused_by_list(word: str, capfd: pytest.CaptureFixture[str]) -> str:
    assert entry.main([word]) == 2
    return capfd.readouterr().err
