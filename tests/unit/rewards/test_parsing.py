"""Answer parsing: every trap as a row of a table, no exception for any text, linear time for hostile ones."""

import time
from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_sweeps.rewards import parsing
from grpo_sweeps.rewards.parsing import flexible_number, number, strict_number, verdict
from grpo_sweeps.types import Verdict

RIGHT = Verdict(strict=True, flexible=True, parsed=True)
LOOSE = Verdict(strict=False, flexible=True, parsed=True)
STRICT_ONLY = Verdict(strict=True, flexible=False, parsed=True)
WRONG = Verdict(strict=False, flexible=False, parsed=True)
NOTHING = Verdict(strict=False, flexible=False, parsed=False)

TABLE = [
    # the answer in its shapes
    ("#### 18", "18", RIGHT),
    (" 9*2=18\n#### 18", "18", RIGHT),
    ("####18", "18", RIGHT),
    ("####    18", "18", RIGHT),
    ("#### $18", "18", RIGHT),
    (r"#### \$18", "18", RIGHT),
    ("#### 18.00", "18", RIGHT),
    ("#### 18.", "18", RIGHT),
    ("#### $18.00.", "18", RIGHT),
    ("#### 18 eggs", "18", RIGHT),
    ("#### 18eggs.", "18", RIGHT),
    ("#### 18%", "18", RIGHT),
    ("#### 18 €", "18", RIGHT),
    ("#### USD 18", "18", RIGHT),
    ("#### Rs.18", "18", RIGHT),
    ("#### **18**", "18", RIGHT),
    ("#### $18$", "18", RIGHT),
    (r"#### \boxed{18}", "18", RIGHT),
    (r"#### $\boxed{18}$.", "18", RIGHT),
    ("#### 018", "18", RIGHT),
    ("#### 1.8e1", "18", RIGHT),
    # thousands
    ("#### 1,234", "1234", RIGHT),
    ("#### 1234", "1,234", RIGHT),
    ("#### 1,234,567.50", "1234567.5", RIGHT),
    ("#### 1,00,000", "100000", RIGHT),
    ("#### 1\u202f234", "1234", RIGHT),
    ("#### 1{,}234", "1234", RIGHT),
    ("#### 1,234", "1", WRONG),
    ("#### 1,234", "234", WRONG),
    # without the marker only flexible parsing finds it
    ("The answer is 18.", "18", LOOSE),
    (r"\boxed{18}", "18", LOOSE),
    ("She pays 29.00", "29", LOOSE),
    ("It costs .50", "0.5", LOOSE),
    ("### 18", "18", LOOSE),
    # the first `####` counts for strict, the last number for flexible
    ("#### 18\n#### 19", "18", STRICT_ONLY),
    ("#### 18\n#### 19", "19", LOOSE),
    ("####\n#### 18", "18", RIGHT),
    ("#### 18 " + "and 5 more, " * 25, "18", STRICT_ONLY),
    ("#### 18" + "!" * 300, "18", RIGHT),
    # a run-on second question is not an answer
    ("#### 18\nQuestion: Ana has 7 pens", "18", RIGHT),
    ("#### 18\n\nQuestion 2: Ana has 7 pens", "18", RIGHT),
    ("#### 18\r\nQuestion: Ana has 7 pens\r\nAnswer: 7\r\n#### 7", "18", RIGHT),
    ("I do not know.\nQuestion: Ana has 18 pens\nAnswer: #### 18", "18", NOTHING),
    # minus signs
    ("#### -18", "-18", RIGHT),
    ("#### -18", "18", WRONG),
    ("#### 18", "-18", WRONG),
    ("#### \u221218", "-18", RIGHT),
    ("#### -$18", "-18", RIGHT),
    ("#### $-18", "-18", RIGHT),
    ("The temperature is -18", "-18", LOOSE),
    ("20-2=18", "18", LOOSE),
    ("So 20-18", "18", LOOSE),
    ("So 20 -18", "18", LOOSE),
    ("- 18 apples", "18", LOOSE),
    ("a seat in row twenty-18", "18", LOOSE),
    # ranges, sums, fractions, lists, times: not one number, no credit for a part
    ("#### 3-5", "3", WRONG),
    ("#### 3-5", "-5", WRONG),
    ("#### 3-5", "35", WRONG),
    ("3-5", "-5", WRONG),
    ("3-5", "5", LOOSE),
    ("#### 3 \u2013 5", "3", WRONG),
    ("#### 10+8", "10", WRONG),
    ("#### 2 * 9", "2", WRONG),
    ("#### 18/2", "18", NOTHING),
    ("#### 18/2", "2", NOTHING),
    ("1/0", "0", NOTHING),
    ("#### 3,5", "3", WRONG),
    ("#### 3,5", "35", WRONG),
    ("#### 10:30", "10", WRONG),
    ("#### 1_8", "18", WRONG),
    ("#### 1.2.3", "1.2", WRONG),
    ("#### 180", "18", WRONG),
    ("#### 118", "18", WRONG),
    ("#### 18.5", "18", WRONG),
    # no number
    ("", "18", NOTHING),
    (",", "18", NOTHING),
    ("#### ,", "18", NOTHING),
    ("####", "18", NOTHING),
    ("#### .", "18", NOTHING),
    ("eighteen", "18", NOTHING),
    ("#### nan", "18", NOTHING),
    ("#### inf", "18", NOTHING),
    ("#### -Infinity", "18", NOTHING),
    ("cm\u00b2", "2", NOTHING),
    ("18cm2", "18", LOOSE),
    ("H2O", "2", NOTHING),
    # other digits; exponents beyond reason
    ("#### \uff11\uff18", "18", RIGHT),
    ("#### \u0661\u0668", "18", RIGHT),
    ("#### 1e999999999", "18", WRONG),
    ("#### 1e99999999999999999999", "18", NOTHING),
    ("#### 18.e5", "18", RIGHT),
    ("#### .E0", "0", NOTHING),
    ("We have eggs.18", "18", LOOSE),
    ("2,4,6,18", "18", LOOSE),
    # code is text
    ("#### __import__('os').getpid()", "18", NOTHING),
    ("#### 9+9", "18", WRONG),
]


@pytest.mark.parametrize(("completion", "answer", "expected"), TABLE, ids=range(len(TABLE)))
def test_table(completion: str, answer: str, expected: Verdict) -> None:
    assert verdict(completion, answer) == expected


def test_values() -> None:
    assert strict_number("#### $1,234.50 a month") == Decimal("1234.5")
    assert flexible_number("from 3 to 1,234.50.") == Decimal("1234.5")
    assert number("$1,234.50") == Decimal("1234.5")
    assert number("3-5") is None
    assert number("none") is None


@pytest.mark.parametrize("answer", ["", "many", "3-5"])
def test_a_reference_that_is_no_number_is_an_error(answer: str) -> None:
    with pytest.raises(ValueError, match="reference answer"):
        verdict("#### 18", answer)


PIECES = [
    "E0",
    "a",
    "####",
    "#### ",
    "$",
    "-",
    "−",
    ",",
    ".",
    "1",
    "18",
    "1,234",
    "e",
    "e9",
    "/",
    "{,}",
    "\n",
    "\nQuestion:",
]
HOSTILE = st.one_of(st.text(max_size=200), st.lists(st.sampled_from(PIECES), max_size=30).map("".join))


@settings(max_examples=300, deadline=None)
@given(HOSTILE)
def test_never_raises(completion: str) -> None:
    result = verdict(completion, "18")
    assert result.parsed or not (result.strict or result.flexible)


def grouped(value: Decimal) -> str:
    return f"{value:,}"


@settings(max_examples=200, deadline=None)
@given(
    st.integers(-(10**12), 10**12),
    st.integers(0, 99),
    st.sampled_from(["#### {}", "####{}", "x = 3\n#### {}.", "#### {}\nQuestion: 7?", "#### {} apples"]),
)
def test_every_plain_number_is_read_back(whole: int, cents: int, template: str) -> None:
    value = Decimal(whole) + Decimal(cents) / 100
    for text in (str(value), grouped(value)):
        assert verdict(template.format(text), str(value)).strict
        assert not verdict(template.format(text), str(value + 1)).strict


HOSTILE_REPEATS = [
    "#", "#### ", ",", "9", "1,", "1,00", "-", "$", "5 ", "\n", " ", "1.1", "1e", "{,}", "\nQuestion", "####1", "Rs.",
    "boxed", "5 -", "US", "1/", "\u202f", "####$", "e1", "٣",
]  # fmt: skip


@pytest.mark.parametrize("piece", HOSTILE_REPEATS)
@pytest.mark.parametrize(("before", "after"), [("", ""), ("#### ", ""), ("", "5"), ("#### 1,00", ",0x")])
def test_long_hostile_text_takes_linear_time(piece: str, before: str, after: str) -> None:
    """100,000 characters; a quadratic scan would take minutes, the linear one takes milliseconds."""
    text = before + piece * (100_000 // len(piece)) + after
    started = time.process_time()
    verdict(text, "18")
    assert time.process_time() - started < 2.0


def test_no_word_of_the_module_evaluates() -> None:
    source = Path(parsing.__file__).read_text(encoding="utf-8")
    assert "eval(" not in source and "exec(" not in source
