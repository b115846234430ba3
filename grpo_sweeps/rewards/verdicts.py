r"""Kinds of verdict: what is right for a task (`task.verdict`), and the reward of 1 for it (`reward=correct`).

numbers  one decimal number, as `rewards/parsing.py` defines it; the only kind for which `1,200` and `1200.0` are equal
exact    a text. strict: after the last `####` of the text, up to the end of its line, or in the last `\boxed{}`,
         whichever comes later; flexible: the same, or else the last line that is not empty
choice   one letter, A to E. strict: the letter that begins such an answer, as in `#### B`, `\boxed{(B)}`,
         `#### B. Rome`; flexible: the same, or else the letter after the last "answer is", "answer:", "option" or
         "choice", or else the last line where that is a letter alone
math     an expression, by the package math-verify (the extra `math`). strict: an answer as for `exact`; flexible: any
         expression that math-verify finds in the text
none     the task has no verdict: there is nothing to compare with, and the reward alone says what is good

A dotted path instead of a kind names a function of the user's own, see `config.functions.load_verdict`.

Texts are compared without case, markup and space around them, runs of space taken as one. What is thought or run on
is passed over, as for numbers. Completions are hostile text: each character is looked at a bounded number of times.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable

from grpo_sweeps.rewards import parsing
from grpo_sweeps.types import ConfigError, Problem, Verdict

KINDS = ("numbers", "exact", "choice", "math", "none")
CORRECT = "grpo_sweeps.rewards.verdicts.correct"
NUMBERS_ONLY = ("grpo_sweeps.rewards.exact_match.strict", "grpo_sweeps.rewards.exact_match.flexible")
"""Rewards that compare numbers, whatever the task's verdict is."""
AROUND = " \t\r\n*_`\"'“”‘’.,;:!$"  # markup, quotes and the sentence's own marks
SPACE = re.compile(r"\s+")
BOX = re.compile(r"\\f?box(?:ed)?[ \t]*+\{")
BRACE = re.compile(r"\\[{}]|[{}]")
WRAPPED = re.compile(r"\\(?:text|mathrm|mathbf|textbf)[ ]?+\{([^{}]*+)\}")  # \boxed{\text{B}}
LETTER = re.compile(r"\(?([A-Ea-e])\)?(?![\w'’])")
SAID = re.compile(r"\b(?:answer(?:[ \t]++is)?|option|choice)[ \t]*+:?[ \t*_`]*+\(?([A-E])\)?(?![\w'’])", re.IGNORECASE)


def correct(completion: str, problem: Problem, seed: int = 0, verdict: str = "numbers") -> float:
    """1.0 where the strict answer is right by this kind of verdict, else 0.0; `seed` is ignored.

    A run gives it the kind of its task, and computes it in the process of its verdicts.
    """
    return float(judge(verdict)(completion, problem.answer).strict)


def verdict_on(completion: str, problem: Problem, seed: int = 0, verdict: str = "numbers") -> Verdict:
    """The verdict of that kind, by a reward's signature: what runs in a process that can be ended."""
    return judge(verdict)(completion, problem.answer)


def is_own(kind: object) -> bool:
    """True for the dotted path of a function, which is no kind of this module."""
    return isinstance(kind, str) and "." in kind


def judge(kind: str) -> Callable[[str, str], Verdict]:
    """The verdict on (completion, reference answer) of that kind.

    Raises:
        ConfigError: for `none` and for what is no kind.
    """
    if kind not in JUDGES:
        raise ConfigError(f"verdict={kind}: choose one of {', '.join(JUDGES)}")
    return JUDGES[kind]


def why_no_answer(kind: str, answer: str) -> str:
    """Why a text cannot be a reference answer of that kind; empty where it can."""
    if kind == "numbers" and parsing.number(answer) is None:
        return "one number is needed"
    if kind == "choice" and _reference_letter(answer) is None:
        return "one letter from A to E is needed"
    if kind in ("exact", "math") and not _plain(answer):
        return "a text is needed"
    return ""


def exact(completion: str, answer: str) -> Verdict:
    """Whether the answer is the reference text; see the top of this module."""
    text, reference = parsing.spoken(completion), _plain(answer)
    marked = _marked(text)
    strict = _plain(marked) if marked is not None else None
    flexible = strict if strict is not None else _plain(_last_line(text))
    return Verdict(strict=strict == reference, flexible=flexible == reference, parsed=bool(flexible))


def choice(completion: str, answer: str) -> Verdict:
    """Whether the answer is the reference letter; see the top of this module. Raises ValueError for another one."""
    reference = _reference_letter(answer)
    if reference is None:
        raise ValueError(f"the reference answer {answer!r} is no letter from A to E")
    text = parsing.spoken(completion)
    marked = _marked(text)
    strict = _letter(marked) if marked is not None else None
    flexible = strict
    if flexible is None:
        named = SAID.findall(text)
        flexible = named[-1].upper() if named else _reference_letter(_last_line(text))
    return Verdict(strict=strict == reference, flexible=flexible == reference, parsed=flexible is not None)


def math(completion: str, answer: str) -> Verdict:
    """Whether the answer equals the reference as an expression; see the top of this module.

    Without a limit of its own: it belongs into a process that can be ended. Raises ConfigError without math-verify.
    """
    try:
        from math_verify import parse, verify
    except Exception as error:  # not there, or with a parser of another version, which raises a plain Exception
        reason = " ".join(str(error).split())
        raise ConfigError(f"task.verdict=math: {MATH_NEEDED} (it cannot be imported: {reason})") from error
    text = parsing.spoken(completion)
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns of the missing limit at each call
    read = functools.partial(parse, parsing_timeout=None, raise_on_error=False)
    reference = read(f"${answer}$") or read(answer)
    right = functools.partial(verify, reference, timeout_seconds=None)
    marked, whole = _marked(text), read(text)
    strict = marked is not None and right(read(f"${marked}$"))
    return Verdict(strict=bool(strict), flexible=bool(strict or right(whole)), parsed=marked is not None or bool(whole))


MATH_NEEDED = "needs the package math-verify (pip install 'grpo_sweeps[math]'), or choose exact"
JUDGES: dict[str, Callable[[str, str], Verdict]] = {
    "numbers": parsing.verdict, "exact": exact, "choice": choice, "math": math,
}  # fmt: skip


def _plain(text: str) -> str:
    """A text as it is compared."""
    return SPACE.sub(" ", _bare(text)).casefold()


def _bare(text: str) -> str:
    return WRAPPED.sub(r"\1", text).strip(AROUND)


def _letter(text: str) -> str | None:
    """The letter that begins an answer."""
    found = LETTER.match(_bare(text))
    return found[1].upper() if found else None


def _reference_letter(text: str) -> str | None:
    """The letter that is the whole of a text."""
    found = LETTER.fullmatch(_bare(text))
    return found[1].upper() if found else None


def _last_line(text: str) -> str:
    return text.strip().rpartition("\n")[2]


def _marked(text: str) -> str | None:
    """What stands after the last marker or in the last closed box, whichever begins later; None without either."""
    marker = text.rfind(parsing.MARKER)
    box = _last_box(text)
    if box is not None and box[0] > marker:
        return box[1]
    return text[marker + len(parsing.MARKER) :].partition("\n")[0] if marker >= 0 else None


def _last_box(text: str) -> tuple[int, str] | None:
    """(where it begins, what it holds) of the last box that is closed: one pass, with the open braces on a stack."""
    boxes = {found.end() - 1 for found in BOX.finditer(text)}
    opened: list[int] = []
    last: tuple[int, str] | None = None
    for brace in BRACE.finditer(text):
        if brace.group() == "{":
            opened.append(brace.start())
        elif brace.group() == "}" and opened:
            start = opened.pop()
            if start in boxes:
                last = (start, text[start + 1 : brace.start()])
    return last
