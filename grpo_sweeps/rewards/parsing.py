r"""Answers in completions: found by scanning, compared as Decimal, never evaluated. What counts as an answer:

strict    the number after the first `####` that a number follows: `#### 18`, `####18`, `#### $18.`, `#### - 18`
flexible  the number in the last `\boxed{}` that holds a digit; without such a box the strict number; where there is
          none either, the last number of the text

Neither looks at what is thought or run on: `<think>...</think>` is passed over, a `</think>` that nothing opened closes
the block that a chat template opens in the prompt, and after a `<think>` that is not closed there is no answer yet; the
answer ends where the model goes on with another question or another turn (`RUN_ON`). A `Problem:` is another question
only after an answer: many a completion says the problem again before it solves it.

A number is a plain one. Currency, thousands separators, units, percent signs and a trailing full stop are taken off,
and what is left must be one decimal number: a range (`3-5`), a fraction (`18/2`), a mixed number (`1 1/2`), a sum, a
list (`3,5`, `3 or 5`), two numbers (`18 5`) or a part of one (`18k`, `18 million`) after `####` or in a box are no
answer, rather than their first or last part. A numbered heading (`#### 1. First step`) is passed over where a later
`####` has a number. A space groups thousands in any place where the second group begins with a zero (`1 000 eggs`), as
no number of its own does; after `####` and in a box also where every further group has three digits and nothing but
markup, currency or a stop follows on the line (`1 234`, but not `5 100 dollar bills`). One minus sign between `####`
and the number counts, with or without a space after it; elsewhere a minus counts only where it is not a subtraction, a
range, a hyphen or a bullet. `minus 18` and `negative 18` are -18 where an answer begins with them (`SAID_MINUS`) and no
further digit follows. Completions are hostile text: each character is looked at a bounded number of times.
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
# What may stand between the marker and the number: markup, currency, LaTeX, a sign, the brackets of a placeholder.
DECORATION = re.compile(r"(?:[ \t*_`\"$€£¥₹({\[:=~≈\\+-]|<(?=[\d.,$-]++>)|boxed|text|USD|US|EUR|GBP|Rs\.?)*")
# What makes another number of the one before it: 1½ is not 1, 2² is not 2, 18k is not 18.
CHANGED = re.compile(
    r"[ \t]*+[¼-¾⅐-↉²³¹⁰-⁹]|[ \t]++and[ \t]++(?:a[ \t]++half\b|\d++[/⁄])|[kKM](?!\w)"
    r"|[ \t]*+(?:hundred|thousand|million|billion|trillion|dozen)\b"
)
# What follows a number that is only the first part of an expression, a range, a fraction, a list or a time. Digits
# before a letter or a hyphen belong to a unit ("18 2-liter bottles").
CONTINUED = re.compile(
    r"[ \t]*+(?:[-+*/⁄×÷^x][ \t]*+\$?\d|\\(?:[dt]?frac|times|cdot|div))|[:_'’]\d|[,;][ \t]++\d"
    r"|[ \t]++(?:to|or)[ \t]++[$€£¥₹]?\d"
    r"|[ \t]++\d[\d.,]*+(?:[/⁄]|(?![\w-]))|" + CHANGED.pattern
)
# "#### 1. First step": the heading of a list, where a later `####` has a number.
HEADING = re.compile(r"\.[ \t]++[^\W\d_]")
# What stands before a number that is the last part of a fraction: "1/2", "\frac{1}{2}".
DENOMINATOR = re.compile(r"(?:[\d}] ?[/⁄] ?|\}\{)$")
# Thousands grouped by spaces, with nothing after them on their line.
SPACED = re.compile(r"\d{1,3}(?: \d{3})++(?:\.\d++)?(?=[ \t*_`\"$€£¥₹%)}\]>.\\]*+(?:\n|\Z))")
# Thousands grouped by spaces in any place: 000 or 050 is no number beside the one before it. No match begins within a
# row of such groups, so that a long row is read once.
ZERO_GROUP = re.compile(r"(?<![\w.,:])(?<!\d )\d{1,3} 0\d\d(?: \d{3})*+(?![\w-]|,\d)")
# A sign in words, where the answer begins with it and its number is the last of the text. After other words it is a
# subtraction ("20 minus 18", "we have to minus 18") or a heading ("#### Minus 18 eggs\n20 - 18 = 2").
SAID_MINUS = re.compile(
    r"(?P<before>(?:####|=|boxed\{|\b(?:is|was|be|equals|of|at)\b|\banswer[ \t*_]*+:)[ \t*_`\"$(]*+)"
    r"\b(?:minus|negative)[ \t]++(?=[$€£¥₹\\]*+\d[\d.,]*+\D*+\Z)",
    re.IGNORECASE,
)
BOX = re.compile(r"(?P<box>f?box(?:ed)?[ \t]*+\{)|\\[{}]|(?P<brace>[{}])|\d")
CURRENCY_WORD = re.compile(r"(?:USD|US|EUR|GBP|Rs)$")
SENTENCE_END = re.compile(r"(?<=[^\W\d_])[.,](?=\d)")  # "Rs.18", "eggs.18": a stop after a letter is no decimal point
THINKING = re.compile(r"<(?P<close>/?)(?:think|thinking|reasoning|thought)>", re.IGNORECASE)
# Where a model goes on with another question or turn: marks of chat templates, and names of speakers that begin a line.
# Decoding leaves special tokens out, and of "<|im_start|>user" remains a line "user".
RUN_ON = re.compile(
    r"<\|\w++\|>|\[INST\]|<start_of_turn>"
    r"|\n[ \t]*+[#*>]*+[ \t]*+(?:(?:Question|Q|Instruction)(?:[ \t]*+#?\d++)?|Human|User|Assistant)\**+[ \t]*+(?::|$)"
    r"|\n[ \t]*+[#*>]*+[ \t]*+(?:(?:QUESTION|INSTRUCTION)(?:[ \t]*+#?\d++)?|HUMAN|USER|ASSISTANT|AI)\**+[ \t]*+:"
    r"|\n[ \t]*+(?:user|assistant)[ \t]*+$",
    re.MULTILINE,
)
PROBLEM = re.compile(r"\n[ \t]*+[#*>]*+[ \t]*+(?:Problem|PROBLEM)(?:[ \t]*+#?\d++)?\**+[ \t]*+:")
# What an answer looks like that was given before: no heading such as "#### 1. Understand the problem".
GIVEN = re.compile(
    r"####[ \t*_`$€£¥₹-]*+\d[\d.,]*+(?![ \t]*+[^\W\d_])|boxed[ \t]*+\{[^{}\n\d]*+\d"
    r"|\banswer[ \t]++is[ \t*_`$€£¥₹-]*+\d"
)
# Signs and separators that look alike: minus signs to "-", the narrow spaces that group digits to ",".
LOOKALIKES = {
    **dict.fromkeys(map(ord, "−–‐‑﹣－"), "-"),
    **dict.fromkeys(map(ord, "\u00a0\u2009\u202f，"), ","),
    ord("．"): ".",
}


def verdict(completion: str, answer: str) -> Verdict:
    """Whether the completion is right by the strict and the flexible answer, and whether it has an answer at all.

    `answer` is the reference number as text, "18" or "1,234".

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
    return _only(_prepare(text))


def spoken(text: str) -> str:
    """A completion without what is thought, up to where it runs on into another question or turn."""
    text = _said(text.replace("\r\n", "\n"))
    run_on = RUN_ON.search(text)
    text = text[: run_on.start()] if run_on else text
    given = GIVEN.search(text)
    problem = PROBLEM.search(text, given.end()) if given else None
    return text[: problem.start()] if problem else text


def _prepare(text: str) -> str:
    text = spoken(text).replace("{,}", ",").replace(r"\,", ",").translate(LOOKALIKES)
    text = ZERO_GROUP.sub(lambda found: found.group().replace(" ", ""), SENTENCE_END.sub(" ", text))
    return SAID_MINUS.sub(r"\g<before>-", text)


def _said(text: str) -> str:
    """The text without what is thought."""
    said: list[str] = []
    start, thinking = 0, False
    for tag in THINKING.finditer(text):
        if tag["close"] and not thinking:
            said.clear()
        elif not thinking:
            said.append(text[start : tag.start()])
        start, thinking = tag.end(), not tag["close"]
    return "\n".join(said if thinking else [*said, text[start:]])


def _strict(text: str) -> Decimal | None:
    position = text.find(MARKER)
    while position >= 0:
        found = _leading(text, position + len(MARKER))
        if found and not (HEADING.match(text, _stop(found[1])) and _leads_on(text, found[1].end())):
            lead, run = found
            return _plain(text, run, minus_signs=lead.count("-"))
        position = text.find(MARKER, position + len(MARKER))
    return None


def _leads_on(text: str, start: int) -> bool:
    """Does a number follow a `####` from here on?"""
    last = text.rfind(MARKER, start)
    return last >= 0 and _leading(text, last + len(MARKER)) is not None


def _flexible(text: str) -> Decimal | None:
    box = _last_box(text)
    if box is not None:
        return _only(box)
    strict = _strict(text)
    return strict if strict is not None else _last(text)


def _last(text: str) -> Decimal | None:
    last = next(iter(deque(_runs(text), maxlen=1)), None)
    if last is None or DENOMINATOR.search(text[max(0, last.start() - 4) : last.start()]):
        return None
    if CHANGED.match(text, _stop(last)):
        return None
    return _signed(_value(last["digits"], last["exponent"] or "", last_of_list=True), _is_negative(text, last.start()))


def _last_box(text: str) -> str | None:
    """What stands in the last closed box that holds a digit, with a minus sign before the box: one pass, with the open
    braces on a stack."""
    opened: list[re.Match[str]] = []
    digit, last = -1, None
    for found in BOX.finditer(text):
        if found["box"] or found["brace"] == "{":
            opened.append(found)
        elif found["brace"] and opened:
            start = opened.pop()
            last = (start, found) if start["box"] and start.end() <= digit else last
        elif found.group().isdecimal():
            digit = found.start()
    if last is None:
        return None
    start, end = last
    return "-" * _is_negative(text, start.start()) + text[start.end() : end.start()]


def _only(text: str) -> Decimal | None:
    """The one number of a whole text, plain; None when there is none or several."""
    runs = list(_runs(text))
    if not runs:
        return None
    spaced = SPACED.match(text, runs[0].start())
    if runs[-1].start() >= (spaced or runs[0]).end():
        return None
    found = _leading(text, 0)
    negative = found[0].count("-") if found else int(_is_negative(text, runs[0].start()))
    return _plain(text, runs[0], negative)


def _leading(text: str, start: int) -> tuple[str, re.Match[str]] | None:
    """(what stands before it, the run of digits) of a number that begins at `start`."""
    decoration = DECORATION.match(text, start)
    run = NUMBER_RUN.match(text, decoration.end()) if decoration else None
    return (decoration.group(), run) if decoration and run and DIGIT.search(run["digits"]) else None


def _plain(text: str, run: re.Match[str], minus_signs: int) -> Decimal | None:
    """The number that begins with `run`; None where it goes on into something else."""
    spaced = SPACED.match(text, run.start())
    if minus_signs > 1 or (not spaced and CONTINUED.match(text, _stop(run))):
        return None
    value = Decimal(spaced.group().replace(" ", "")) if spaced else _value(run["digits"], run["exponent"] or "")
    return _signed(value, minus_signs == 1)


def _runs(text: str) -> Iterator[re.Match[str]]:
    """Runs that hold a digit and are not the tail of a word ("cm2", "H2O")."""
    for run in NUMBER_RUN.finditer(text):
        before = text[max(0, run.start() - 3) : run.start()]
        if DIGIT.search(run["digits"]) and (not before[-1:].isalpha() or CURRENCY_WORD.search(before)):
            yield run


def _stop(run: re.Match[str]) -> int:
    """Where the number ends; trailing commas and stops belong to the sentence."""
    return run.end() if run["digits"][-1] not in ".," else run.start() + len(run["digits"].rstrip(".,"))


def _signed(value: Decimal | None, negative: bool) -> Decimal | None:
    # copy_negate: a plain minus rounds to the context's precision and overflows beyond its exponents
    return value.copy_negate() if value is not None and negative else value


def _value(digits: str, exponent: str, last_of_list: bool = False) -> Decimal | None:
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
    sign = start
    while sign and text[sign - 1] == " ":
        sign -= 1
    if not sign or text[sign - 1] != "-":
        return False
    before = sign - 1
    while before and text[before - 1] == " ":
        before -= 1
    if sign < start:  # "x = - 18"; elsewhere a minus with a space after it is a dash or a bullet
        return text[max(0, before - 1) : before] in ("=", "#")
    glued = before == sign - 1 and before and (text[before - 1].isalnum() or text[before - 1] in "-)]}%.")
    return not (glued or (before and (text[before - 1].isdigit() or text[before - 1] == ")")))
