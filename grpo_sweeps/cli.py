"""One command line for every entry point: --help, --version, typed `key=value` words, one sentence for a bad one.

A command's keys are the fields of a frozen dataclass, each declared by `key` with a line of help. argparse reads the
flags and writes the pages; OmegaConf gives each word the type of its field. `run` and `check` take Hydra's words
instead (sweep/command.py) and share the page, the version and the form of an error. `say` is how they all speak to the
person at the terminal.
"""

from __future__ import annotations

import argparse
import functools
import math
import os
import re
import select
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Generic, NoReturn, ParamSpec, TypeVar, get_args, get_origin, get_type_hints

from grpo_sweeps import __version__, machine
from grpo_sweeps.paths import why_no_path
from grpo_sweeps.redaction import redact
from grpo_sweeps.text import count as count
from grpo_sweeps.text import did_you_mean, in_a_row, plain, show
from grpo_sweeps.types import ConfigError

VERSION = f"grpo_sweeps {__version__}"
NEEDED = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
SHOWN = {int: "N", float: "X", bool: "true|false", str: "TEXT"}
PLACES = ("FOLDER", "DIR", "FILE", "PATH", "SOURCE", "NAME", "IDENTITY")  # shown for a value that is part of a path
MOST_SHOWN = 80  # characters of a value that is too long for a path
MOST_SEED = 2**32 - 1
ERROR = "error:"
NO_READER = 141  # what a shell gives for a process that SIGPIPE ended
WIDTH = 120

C = TypeVar("C")
P = ParamSpec("P")


def say(text: str) -> None:
    """Print one plain line on the standard error, without the secrets that an error message may carry. On a terminal
    the word that begins an error is red."""
    show(redact(text), sys.stderr, red=ERROR)


class Progress:
    """Says how far a command is, at most every so many seconds, so that a short one says nothing."""

    def __init__(self, every_s: float = 2.0) -> None:
        self._every_s, self._next = every_s, time.monotonic() + every_s

    def __call__(self, sentence: str) -> None:
        if (now := time.monotonic()) >= self._next:
            self._next = now + self._every_s
            say(sentence)


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of cells as lines with straight columns, two spaces between them."""
    cells = [[plain(cell) for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))] if cells else []
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]


def key(
    default: Any,
    about: str,
    shown: str = "",
    *,
    unset: str = "",
    word: str = "",
    required: bool = False,
    flag: bool = False,
    least: float | None = None,
    most: float | None = None,
    local: str = "",
) -> Any:
    """A field of a dataclass that a word of the command line sets.

    Args:
        default: its value where no word gives one.
        about: one line for --help.
        shown: what --help shows as the value, by default from its type.
        unset: what an empty default means, for --help.
        word: the key as it is typed, where that is not a name in Python.
        required: --help shows that the command needs it; the command itself refuses without it.
        flag: it is typed --word and takes no value.
        least, most: the ends of a number's range; None: there is none.
        local: the key of the configuration whose value in conf/local, where there is one, is the default.
    """
    told = {"about": about, "shown": shown, "unset": unset, "word": word, "required": required, "flag": flag}
    return field(default=default, metadata={**told, "least": least, "most": most, "local": local})


@dataclass(frozen=True)
class Key:
    """A field of a command's options: name, type, default, whether it takes several values, and the rest from `key`."""

    name: str
    kind: type
    several: bool
    default: Any
    about: str = ""
    shown: str = ""
    unset: str = ""
    word: str = ""
    required: bool = False
    flag: bool = False
    least: float | None = None
    most: float | None = None
    local: str = ""

    @property
    def typed(self) -> str:
        """What is typed before the =, or after the --."""
        return self.word or self.name

    @property
    def value(self) -> str:
        """What --help shows as its value."""
        return self.shown or SHOWN[self.kind] + f",{SHOWN[self.kind]}" * self.several

    @property
    def needed(self) -> str:
        """What its value must be, in words."""
        return NEEDED[self.kind] + (" or several, with commas," if self.several else "")

    @property
    def range(self) -> str:
        """What its number must be beyond its type, in words."""
        return f"{self.least} or more" if self.most is None else f"a number from {self.least} to {self.most}"

    def within(self, value: Any) -> bool:
        """Whether a number is in the key's range; no range holds what is not finite."""
        low, high = (-math.inf if self.least is None else self.least), (math.inf if self.most is None else self.most)
        return (low, high) == (-math.inf, math.inf) or (math.isfinite(value) and low <= value <= high)

    @property
    def usage(self) -> str:
        """The key in the line of usage."""
        if self.flag:
            return f"[--{self.typed}]"
        value = self.value if self.default in (None, "") or self.default is False else written(self.default)
        return f"{self.typed}={value}" if self.required else f"[{self.typed}={value}]"

    @property
    def help(self) -> str:
        """What --help says about it, with its default."""
        default = self.unset if self.default in (None, "") else written(self.default)
        return self.about + (" (required)" if self.required else f" (default: {default})" if default else "")


@dataclass(frozen=True)
class Command(Generic[C]):
    """What a command takes and how it says no.

    program: what a person types to start it. options: the dataclass of its keys. about: the text of --help.
    unknown: the sentence for a word that is not a key=value of the command, with {word} and {allowed}; {allowed} is
        one `each` per key, with {key} and {shown}, and `last` before the last one.
    wrong: the sentence for a value of another type or out of range, with {key}, {value} and {needed}.
    empty: whether `key=` without a value is allowed; otherwise it is a word that is not understood.
    """

    program: str
    options: type[C]
    about: str
    unknown: str
    wrong: str = "{key}={value}: {needed} is expected"
    each: str = "{key}={shown}"
    last: str = " and "
    empty: bool = True

    @property
    def keys(self) -> list[Key]:
        """The fields of `options`, in their order."""
        hints = get_type_hints(self.options)
        return [_key(one, hints[one.name]) for one in fields(self.options)]  # type: ignore[arg-type]

    @property
    def allowed(self) -> str:
        """All keys, as the sentence for an unknown one lists them."""
        shown = [f"--{k.typed}" if k.flag else self.each.format(key=k.typed, shown=k.value) for k in self.keys]
        return in_a_row(shown, self.last)

    def parser(self) -> argparse.ArgumentParser:
        """argparse's parser of the flags, whose --help describes the keys as well."""
        keys = self.keys
        rows = [(f"{one.typed}={one.value}", one.help) for one in keys if not one.flag]
        parser, flags = parser_of(self.program, " ".join(one.usage for one in keys), self.about, table(rows))
        for one in keys:
            if one.flag:
                flags.add_argument(f"--{one.typed}", dest=one.name, action="store_true", help=one.about)
        return parser

    def parse(self, argv: Sequence[str]) -> C:
        """The options that `argv` gives.

        Raises:
            ConfigError: for a word that is not understood or a value of another type.
            SystemExit: with code 0, after --help or --version.
        """
        flags, unknown = self.parser().parse_known_args([word for word in argv if "=" not in word])
        words = [word for word in argv if "=" in word or word in unknown]
        machines = {one.name: one.default for one in self.keys if one.local}
        return self.options(**machines | self._values(words) | {n: True for n, given in vars(flags).items() if given})

    def _values(self, words: Sequence[str]) -> dict[str, Any]:
        """The value of each field, as OmegaConf reads it by the type of the field."""
        from omegaconf import OmegaConf
        from omegaconf.errors import OmegaConfBaseException

        keys = {one.typed: one for one in self.keys if not one.flag}
        config = OmegaConf.structured(self.options)
        OmegaConf.set_readonly(config, False)
        values: dict[str, Any] = {}
        for word in words:
            typed, equals, text = word.partition("=")
            if not equals or typed not in keys or not (text or self.empty):
                sentence = self.unknown.format(word=word, allowed=self.allowed)
                raise ConfigError(did_you_mean(sentence, typed.lstrip("-+"), keys, "="))
            one = keys[typed]
            if one.name in values:
                raise ConfigError(twice(typed, [given for given in words if given.partition("=")[0] == typed]))
            try:
                if one.kind is bool and text not in ("true", "false"):  # OmegaConf takes yes, on and 1 as well
                    raise ValueError(text)
                config[one.name] = list(map(_literal, text.split(","))) if one.several else _literal(text)
                found = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
            except (OmegaConfBaseException, ValueError):
                raise ConfigError(self.wrong.format(key=typed, value=text, needed=one.needed)) from None
            assert isinstance(found, dict)
            values[one.name] = tuple(found[one.name]) if one.several else found[one.name]
            self._check(one, text, values[one.name])
        return values

    def _check(self, one: Key, text: str, value: Any) -> None:
        """Raise ConfigError for a number out of its range and for a path that no file system can hold."""
        numbers = value if one.several else (value,)
        if one.kind in (int, float) and not all(map(one.within, numbers)):
            raise ConfigError(self.wrong.format(key=one.typed, value=text, needed=one.range))
        if one.kind is str and one.value in PLACES and (reason := why_no_path(value)):
            cut = f"{text[:MOST_SHOWN]}..." if len(text) > MOST_SHOWN else text
            allowed = "one that the file system can hold is needed"
            raise ConfigError(f"{one.typed}={cut}: cannot be a path ({reason}); {allowed}")


def named(name: str, options: type[C], about: str, program: str = "") -> Command[C]:
    """A command whose sentences begin with its name."""
    return Command(
        program or f"python -m grpo_sweeps.{name}",
        options,
        about,
        f"{name}: {{word!r}} is not one of {{allowed}}",
        wrong=f"{name}: {{key}}={{value}}: {{needed}} is needed",
        each="{key}=",
        last=", ",
    )


def run(command: Command[C], argv: Sequence[str] | None, work: Callable[[C], int]) -> int:
    """Parse `argv` (the process's own words by default), do the work and return the exit code.

    The code is that of `work`; 0 after --help or --version; 2 after one sentence where either raised ConfigError;
    `NO_READER` where nobody reads the output any more.
    """
    return piped(_run)(command, argv, work)


def _run(command: Command[C], argv: Sequence[str] | None, work: Callable[[C], int]) -> int:
    try:
        try:
            options = command.parse(sys.argv[1:] if argv is None else argv)
        except SystemExit:  # --help or --version has been printed
            return 0
        return work(options)
    except ConfigError as error:
        say(f"error: {error}")
        return 2


def piped(main: Callable[P, int]) -> Callable[P, int]:
    """`main`, which ends without a word and with the code `NO_READER` where nobody reads its output any more: `| head`
    has seen enough."""

    @functools.wraps(main)
    def ends_quietly(*args: P.args, **kwargs: P.kwargs) -> int:
        try:
            code = main(*args, **kwargs)
            for stream in filter(None, (sys.stdout, sys.stderr)):  # None where the process was started without one
                stream.flush()
            return code
        except BrokenPipeError:
            closed = [number for number in (1, 2) if _without_reader(number)]
            if not closed:  # another pipe's
                raise
            nowhere = os.open(os.devnull, os.O_WRONLY)
            for number in closed:  # Python flushes once more when it ends
                os.dup2(nowhere, number)
            os.close(nowhere)
            return NO_READER

    return ends_quietly


def _without_reader(number: int) -> bool:
    """Whether the file descriptor is a pipe whose other end is closed."""
    poll = select.poll()
    poll.register(number, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def new_folder(text: str) -> Path:
    """The folder that `out=` names. Raises ConfigError where it is there and holds something, or is a file."""
    folder = Path(text).expanduser()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"out={text}: exists and is not an empty folder; give a new one")
    return folder


def twice(typed: str, words: Sequence[str]) -> str:
    """The sentence for a key that several words give."""
    return f"{' '.join(words)}: {typed} is given {'twice' if len(words) == 2 else f'{len(words)} times'}; give it once"


class Parser(argparse.ArgumentParser):
    """argparse's parser, with its errors raised as ConfigError."""

    def error(self, message: str) -> NoReturn:
        """Raise ConfigError instead of printing the usage and leaving."""
        raise ConfigError(f"{message}; see {self.prog} --help")

    def _print_message(self, message: str, file: Any = None) -> None:
        """argparse's own passes over a pipe that nobody reads, which `piped` has to know."""
        stream = file or sys.stderr
        if message and stream is not None:
            stream.write(message)


def parser_of(program: str, usage: str, about: str, listing: str = "", title: str = "keys") -> tuple[Parser, Any]:
    """A parser with --help and --version, and its group of flags. listing: lines below `title` on the page."""
    parser = Parser(
        prog=program,
        usage="\n".join(_wrapped(f"{program} {usage}", WIDTH - len("usage: "), "  ")).replace("%", "%%"),
        description=about.strip(),
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, width=WIDTH),
        add_help=False,
        allow_abbrev=False,
    )
    if listing:
        parser.add_argument_group(title, listing)
    flags = parser.add_argument_group("flags")
    flags.add_argument("-h", "--help", action="help", help="print this page")
    flags.add_argument("--version", action="version", version=VERSION, help="print the version of grpo_sweeps")
    return parser, flags


def page_or_version(parser: argparse.ArgumentParser, words: Sequence[str]) -> bool:
    """True when a word asked for --help or --version, which it then prints."""
    try:
        parser.parse_known_args([word for word in words if word in ("-h", "--help", "--version")])
    except SystemExit:
        return True
    return False


def table(rows: Sequence[tuple[str, str]]) -> str:
    """Two columns, the second one wrapped."""
    wide = max(len(left) for left, _ in rows) + 2
    wrapped = [_wrapped(right, WIDTH - 2 - wide) for _, right in rows]
    lines = [left.ljust(wide) + ("\n" + " " * wide).join(right) for (left, _), right in zip(rows, wrapped, strict=True)]
    return "\n".join(lines)


def written(value: Any) -> str:
    """A value as it is typed on the command line."""
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _wrapped(text: str, width: int, indent: str = "") -> list[str]:
    """The text in lines that break between words only; those after the first are indented."""
    lines = textwrap.wrap(text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return lines or [""]


def _key(one: Any, hint: Any) -> Key:
    """The `Key` of a field and its type."""
    kind = next(kind for kind in (get_args(hint) or (hint,)) if kind is not type(None))
    default = one.default
    if one.metadata["local"]:
        found = machine.value(one.metadata["local"])
        default = default if found is None else str(found)
    return Key(one.name, kind, get_origin(hint) is tuple, default, **one.metadata)


def _literal(text: str) -> str:
    """The text as OmegaConf keeps it: `${` begins no interpolation."""
    return re.sub(r"(\\*)\$\{", lambda found: f"{found[1] * 2}\\${{", text)
