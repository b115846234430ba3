r"""Answers in completions: found by scanning, compared as Decimal, never evaluated.

strict    the number after the first `####` that a number follows: `#### 18`, `####18`, `#### $18.`, `#### \boxed{18}`
flexible  the last number of the text

Both stop where the model runs on into a question of its own. Currency, thousands separators, units, percent signs and a
trailing full stop are taken off first. What is not one plain number is no answer: after `####`, a range (`3-5`), a
fraction, a sum or a list (`3,5`) makes strict parsing fail. A minus sign counts only where it is not a subtraction,
a range or a hyphen. Completions are hostile text: each character is looked at a bounded number of times.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from decimal import Decimal

from grpo_sweeps.types import Verdict

CURRENCY = "$€£¥₹"
# A run of digits, commas and stops, whole: a class that cannot fail after its first character never backtracks.
NUMBER_RUN = re.compile(r"(?P<digits>[\d.,]+)(?P<exponent>[eE][+-]?\d+)?")
DIGIT = re.compile(r"\d")
MARKER = "####"
# What may stand between the marker and the number: markup, currency, LaTeX, a sign.
DECORATION = re.compile(r"(?:[ \t*_$€£¥₹({\[:=~≈\\-]|boxed|text|USD|US|EUR|GBP|Rs\.?)*")
# What follows a number that is only the first operand of an expression, a range, a fraction or a time.
CONTINUED = re.compile(r"[ \t]*[-+*/×÷^x][ \t]*\$?\d|[:_'’]\d")
CURRENCY_WORD = re.compile(r"(?:USD|US|EUR|GBP|Rs)$")
SENTENCE_END = re.compile(r"(?<=[^\W\d_])[.,](?=\d)")  # "Rs.18", "eggs.18": a stop after a letter is no decimal point
RUN_ON = ("\nQuestion:", "\n\nQuestion", "\nQ:")
# Signs and separators that look alike: minus signs to "-", the narrow spaces that group digits to ",".
LOOKALIKES = {
    **dict.fromkeys(map(ord, "−–‐‑﹣－"), "-"),
    **dict.fromkeys(map(ord, "\u00a0\u2009\u202f，"), ","),
    ord("．"): ".",
}


def verdict(completion: str, answer: str) -> Verdict:
    """Is the completion right? `answer` is the reference number as text, "18" or "1,234".

    Never raises for any completion: a completion without a number gives parsed=False. Raises ValueError when the
    reference itself is not a number.
    """
    reference = number(answer)
    if reference is None:
        raise ValueError(f"the reference answer {answer!r} is not a number")
    text = _prepare(completion)
    strict, flexible = _strict(text), _flexible(text)
    return Verdict(
        strict=strict is not None and strict == reference,
        flexible=flexible is not None and flexible == reference,
        parsed=strict is not None or flexible is not None,
    )


def number(text: str) -> Decimal | None:
    """The one number of a short text such as a reference answer ("$1,234.50"); None when there is none or several."""
    prepared = _prepare(text)
    found = list(_runs(prepared))
    return _signed(prepared, found[0]) if len(found) == 1 else None


def strict_number(completion: str) -> Decimal | None:
    """The number after the first `####` that is followed by one; None when there is none or it is no plain number."""
    return _strict(_prepare(completion))


def flexible_number(completion: str) -> Decimal | None:
    """The last number before a run-on question; None when there is none."""
    return _flexible(_prepare(completion))


def _prepare(text: str) -> str:
    text = text.replace("\r\n", "\n")
    ends = [end for end in map(text.find, RUN_ON) if end >= 0]
    text = text[: min(ends, default=len(text))].replace("{,}", ",").translate(LOOKALIKES)
    return SENTENCE_END.sub(" ", text)


def _strict(text: str) -> Decimal | None:
    position = text.find(MARKER)
    while position >= 0:
        decoration = DECORATION.match(text, position + len(MARKER))
        run = NUMBER_RUN.match(text, decoration.end()) if decoration else None
        if run and DIGIT.search(run["digits"]):
            return None if CONTINUED.match(text, _stop(run)) else _signed(text, run)
        position = text.find(MARKER, position + len(MARKER))
    return None


def _flexible(text: str) -> Decimal | None:
    last = next(iter(deque(_runs(text), maxlen=1)), None)
    if last is None:
        return None
    fraction = text[last.start() - 1 : last.start()] == "/" and text[: last.start() - 1][-1:].isdigit()
    return None if fraction else _signed(text, last, last_of_list=True)


def _runs(text: str) -> Iterator[re.Match[str]]:
    """Runs that hold a digit and are not the tail of a word ("cm2", "H2O")."""
    for run in NUMBER_RUN.finditer(text):
        before = text[max(0, run.start() - 3) : run.start()]
        if DIGIT.search(run["digits"]) and (not before[-1:].isalpha() or CURRENCY_WORD.search(before)):
            yield run


def _stop(run: re.Match[str]) -> int:
    """Where the number ends: trailing commas and stops belong to the sentence."""
    return run.end() if run["digits"][-1] not in ".," else run.start() + len(run["digits"].rstrip(".,"))


def _signed(text: str, run: re.Match[str], last_of_list: bool = False) -> Decimal | None:
    value = _value(run["digits"], run["exponent"] or "", last_of_list)
    return -value if value is not None and _is_negative(text, run.start()) else value


def _value(digits: str, exponent: str, last_of_list: bool) -> Decimal | None:
    """The value of a run such as "1,234.50."; of "3,5" or "1.2.3" the last number if last_of_list, else None."""
    if digits[-1] in ".,":  # "18.e5" is the number 18 and a word
        exponent = ""
    digits = digits.strip(",").rstrip(".,")
    whole, point, decimals = digits.partition(".")
    groups = whole.split(",")
    one_number = (len(groups) == 1 or _is_grouped(groups)) and (not point or decimals.isdecimal())
    if not one_number and not last_of_list:
        return None
    plain = "".join(groups) + point + decimals if one_number else re.split("[.,]", digits)[-1]
    try:
        return Decimal(plain + exponent)
    except ArithmeticError:  # an exponent beyond what Decimal can hold: a number that is no answer
        return None


def _is_grouped(groups: list[str]) -> bool:
    """1,234,567 and 1,00,000: one to three digits, then groups of two or three, the last of three."""
    return 1 <= len(groups[0]) <= 3 and all(2 <= len(group) <= 3 for group in groups[1:-1]) and len(groups[-1]) == 3


def _is_negative(text: str, start: int) -> bool:
    """Is there a minus sign before the number at `start`, and is it a sign rather than a subtraction or a dash?"""
    while start and text[start - 1] in CURRENCY + "\\":
        start -= 1
    if not start or text[start - 1] != "-":
        return False
    start -= 1
    glued = text[start - 1 : start] if start else ""
    if glued and (glued.isalnum() or glued in "-)]}%."):
        return False
    while start and text[start - 1] == " ":
        start -= 1
    return not (start and (text[start - 1].isdigit() or text[start - 1] == ")"))
