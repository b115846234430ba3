"""Answer parsing: every trap as a row of a table, no exception for any text, linear time for hostile ones."""

import time
from decimal import Decimal
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_sweeps.rewards import parsing
from grpo_sweeps.rewards.parsing import _flexible, _prepare, _strict, number, verdict
from grpo_sweeps.types import Verdict

TASKS = Path(parsing.__file__).parents[2] / "conf" / "task"
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
    (r"#### 1\,234", "1234", RIGHT),
    ("#### 1 234", "1234", RIGHT),
    ("#### -$1 234 567.50.", "-1234567.5", RIGHT),
    ("#### **1 234** \u20ac\nGood.", "1234", RIGHT),
    (r"\boxed{1 234} of 3", "1234", LOOSE),
    ("#### 1 2345", "12345", WRONG),
    ("#### 1 23", "123", WRONG),
    ("#### 1234 567", "1234567", WRONG),
    ("#### 12 345 67", "1234567", WRONG),
    ("#### 1 234 eggs", "1", WRONG),
    ("#### 1 234 eggs", "1234", WRONG),
    ("#### 5 100 dollar bills", "5100", WRONG),
    ("#### 1 000 eggs", "1000", RIGHT),
    ("#### 1 000 eggs", "0", WRONG),
    ("#### 1\u202f000 eggs", "1000", RIGHT),
    ("#### 1\u202f234 eggs", "1234", RIGHT),
    ("#### $12 050.50 in all", "12050.5", RIGHT),
    ("#### 1 000 000 eggs.", "1000000", RIGHT),
    ("#### -1 000 eggs", "-1000", RIGHT),
    ("She has 1 000 eggs", "1000", LOOSE),
    ("She has 1 000.", "1000", LOOSE),
    ("She has 1 000.", "0", WRONG),
    (r"\boxed{1 000\text{ eggs}} of 3", "1000", LOOSE),
    ("#### 1 000 or 2 000 eggs", "1000", WRONG),
    ("#### 1 000 20 eggs", "1000", WRONG),
    ("#### 1 000,5 eggs", "1000", WRONG),
    ("#### 20 1 000 eggs", "201000", WRONG),
    ("#### 1 0000 eggs", "10000", WRONG),
    ("#### 1 00 eggs", "100", WRONG),
    ("#### 1000 000 eggs", "1000000", WRONG),
    ("#### 1  000 eggs", "1000", WRONG),
    ("It is 1 234", "234", LOOSE),
    ("#### 1,234", "1", WRONG),
    ("#### 1,234", "234", WRONG),
    # without the marker only flexible parsing finds it
    ("The answer is 18.", "18", LOOSE),
    (r"\boxed{18}", "18", LOOSE),
    ("She pays 29.00", "29", LOOSE),
    ("It costs .50", "0.5", LOOSE),
    ("### 18", "18", LOOSE),
    # the first `####` that a number follows counts for both; a box before it for flexible
    ("#### 18\n#### 19", "18", RIGHT),
    ("#### 18\n#### 19", "19", WRONG),
    ("####\n#### 18", "18", RIGHT),
    ("#### 18 " + "and 5 more, " * 25, "18", RIGHT),
    ("#### 18 = 9*2", "18", RIGHT),
    ("#### 9*2 = 18", "18", LOOSE),
    (r"\boxed{18} #### 19", "19", STRICT_ONLY),
    (r"\boxed{18} #### 19", "18", LOOSE),
    # the last box that holds a digit
    (r"\boxed{18}. Wait, 3 checks.", "18", LOOSE),
    (r"\boxed{3}, no: \boxed{18}, of 5.", "18", LOOSE),
    (r"\boxed{18} \boxed{} of 3", "18", LOOSE),
    (r"\boxed{18} or \boxed{\text{B}} of 3", "18", LOOSE),
    (r"\boxed{\boxed{18}} of 3", "18", LOOSE),
    (r"\boxed{\text{Total: } 18} of 3", "18", LOOSE),
    (r"\boxed{18\text{ eggs}} of 3", "18", LOOSE),
    (r"\boxed{\{18\}} of 3", "18", LOOSE),
    (r"}} {\boxed {18}} of 3", "18", LOOSE),
    (r"\fbox{18} of 3", "18", LOOSE),
    (r"\boxed{\$1{,}234} of 3", "1234", LOOSE),
    (r"\boxed{1\,234} of 3", "1234", LOOSE),
    (r"\boxed{18\%}. 3", "18", LOOSE),
    (r"\boxed{- 18} of 3", "-18", LOOSE),
    (r"\boxed{x = -18} of 3", "-18", LOOSE),
    (r"\boxed{x = - 18} of 3", "-18", LOOSE),
    (r"\boxed{20-2} of 18", "18", NOTHING),
    (r"\boxed{3,5} of 5", "5", NOTHING),
    (r"\boxed{\frac{36}{2}} of 2", "2", NOTHING),
    (r"\boxed{1\frac{1}{2}}", "1", NOTHING),
    (r"\boxed{3} of \boxed{18", "3", LOOSE),
    (r"so \boxed{18", "18", LOOSE),
    # what is thought is no answer
    ("<think>#### 5</think>#### 18", "18", RIGHT),
    ("<think>#### 5</think>#### 18", "5", WRONG),
    (r"<think>\boxed{5}</think> It is 18.", "18", LOOSE),
    ("<think>\nUser: how many?\nQuestion: 9*2\n</think>\n#### 18", "18", RIGHT),
    ("#### 5</think>\n#### 18", "18", RIGHT),
    ("<think>a<think>#### 3</think>#### 5</think>#### 18", "18", RIGHT),
    ("<think>5</think>#### 18<think>6</think>", "18", RIGHT),
    ("<THINK>#### 5</THINK><reasoning>#### 6</reasoning>#### 18", "18", RIGHT),
    ("<thinking>#### 5</thinking>#### 18", "18", RIGHT),
    ("<thought>#### 5</thought>#### 18", "18", RIGHT),
    ("<thought>\\boxed{5}</thought>#### 18", "5", WRONG),
    ("<Thought>#### 18", "18", NOTHING),
    ("<think>#### 18", "18", NOTHING),
    ("#### 18\n<think>#### 5", "18", RIGHT),
    ("1<think></think>8", "18", WRONG),
    ("#### 18" + "!" * 300, "18", RIGHT),
    # a run-on second question is not an answer
    ("#### 18\nQuestion: Ana has 7 pens", "18", RIGHT),
    ("#### 18\n\nQuestion 2: Ana has 7 pens", "18", RIGHT),
    ("#### 18\r\nQuestion: Ana has 7 pens\r\nAnswer: 7\r\n#### 7", "18", RIGHT),
    ("I do not know.\nQuestion: Ana has 18 pens\nAnswer: #### 18", "18", NOTHING),
    ("It is 18.\nHuman: 7?", "18", LOOSE),
    ("It is 18.\nUser: 7?\nAssistant: #### 7", "18", LOOSE),
    ("It is 18.\n\nAssistant: 7", "18", LOOSE),
    ("It is 18.\nQ: 7?", "18", LOOSE),
    ("It is 18.\n  **Question 2:** 7?", "18", LOOSE),
    ("It is 18.\n### Question\n7?", "18", LOOSE),
    ("It is 18.\n### Instruction:\n7?", "18", LOOSE),
    ("It is 18.\nuser\n7?", "18", LOOSE),
    ("It is 18.<|im_end|>\n7", "18", LOOSE),
    ("#### 18<|im_start|>user\n7", "18", RIGHT),
    ("It is 18. [INST] 7? [/INST]", "18", LOOSE),
    ("It is 18.<start_of_turn>user 7?", "18", LOOSE),
    ("It is 18.\nHUMAN: 7?", "18", LOOSE),
    ("It is 18.\nUSER: 7?\nASSISTANT: #### 7", "18", LOOSE),
    ("It is 18.\n**AI:** 7", "18", LOOSE),
    ("It is 18.\nAI: 7", "18", LOOSE),
    ("It is 18.\n### QUESTION 2: 7?", "18", LOOSE),
    ("The answer is 18.\n\nProblem: 7?", "18", LOOSE),
    ("The answer is **$18**.\n**Problem 2:** 7?", "18", LOOSE),
    ("\\boxed{18}\nProblem #2: \\boxed{7}", "18", LOOSE),
    ("#### 18\nPROBLEM: \\boxed{7}", "18", RIGHT),
    # a problem that is said again before it is solved
    ("Sure.\nProblem: 9 + 9?\n#### 18", "18", RIGHT),
    ("The answer goes into \\boxed{}.\nProblem: 9 + 9?\n\\boxed{18}", "18", LOOSE),
    ("#### 1. Understand\nProblem: 9 + 9?\n#### 18", "18", RIGHT),
    # but these words elsewhere do not end it
    ("It is 5.\nAI\nNo: 18", "18", LOOSE),
    ("It is 5.\nAI costs 18", "18", LOOSE),
    ("Question: how many?\nAnswer: #### 18", "18", RIGHT),
    ("To answer the Question: 9*2\n#### 18", "18", RIGHT),
    ("5 humans.\nQuestions are asked.\nUsers: 3.\n#### 18", "18", RIGHT),
    ("|5| < |18|", "18", LOOSE),
    # minus signs
    ("#### -18", "-18", RIGHT),
    ("#### -18", "18", WRONG),
    ("#### 18", "-18", WRONG),
    ("#### \u221218", "-18", RIGHT),
    ("#### -$18", "-18", RIGHT),
    ("#### $-18", "-18", RIGHT),
    ("#### - 18", "-18", RIGHT),
    ("#### - 18", "18", WRONG),
    ("#### \u2212 18", "-18", RIGHT),
    ("#### - $18", "-18", RIGHT),
    ("#### -$ 18", "-18", RIGHT),
    ("#### - **18**", "-18", RIGHT),
    (r"#### $-\boxed{18}$", "-18", RIGHT),
    (r"#### \boxed{- 18}", "-18", RIGHT),
    (r"#### - \boxed{18}", "-18", RIGHT),
    (r"x = -\boxed{18} of 3", "-18", LOOSE),
    (r"20 - \boxed{18} is 2", "18", LOOSE),
    ("#### --18", "-18", WRONG),
    ("So x = - 18", "-18", LOOSE),
    ("#### -1e9999999", "18", WRONG),
    ("#### -" + "123456789" * 5, "-" + "123456789" * 5, RIGHT),
    ("The temperature is -18", "-18", LOOSE),
    ("20-2=18", "18", LOOSE),
    ("So 20-18", "18", LOOSE),
    ("So 20 -18", "18", LOOSE),
    ("- 18 apples", "18", LOOSE),
    ("a seat in row twenty-18", "18", LOOSE),
    ("#### minus 18", "-18", RIGHT),
    ("#### negative 18 degrees.", "-18", RIGHT),
    ("#### Negative $18", "-18", RIGHT),
    ("#### minus 18", "18", WRONG),
    ("The answer is minus 18.", "-18", LOOSE),
    ("x = negative 1,234.5", "-1234.5", LOOSE),
    ("The profit was minus 1 000 dollars", "-1000", LOOSE),
    ("**Answer:** minus 18", "-18", LOOSE),
    (r"\boxed{minus 18}", "-18", LOOSE),
    ("This minus 18", "18", LOOSE),
    ("It is 20 minus 18", "18", LOOSE),
    ("It is minus -18", "18", WRONG),
    ("So we have to minus 18", "18", LOOSE),
    ("Next: minus 18", "18", LOOSE),
    ("It is nonnegative 18", "18", LOOSE),
    ("#### Minus 18 eggs\n20 - 18 = 2\n#### 2", "2", RIGHT),
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
    ("#### 3, 5", "3", WRONG),
    ("#### 18, 20", "18", WRONG),
    ("#### 18, 20", "20", LOOSE),
    ("18, 20", "20", LOOSE),
    ("#### 18 5", "18", WRONG),
    ("#### 1 1/2", "1", NOTHING),
    ("#### 1 1/2", "2", NOTHING),
    ("#### 1 1/2", "1.5", NOTHING),
    ("#### 1 1/2-inch", "1", NOTHING),
    ("#### 1-1/2", "1", NOTHING),
    ("#### 1 \u2044 2", "1", NOTHING),
    ("#### 1\u00bd", "1", NOTHING),
    ("#### 1 \u00bd", "1", NOTHING),
    ("#### 1 and 1/2", "1", NOTHING),
    ("#### 1 and a half", "1", NOTHING),
    (r"#### 1\frac{1}{2}", "1", NOTHING),
    (r"#### \frac{36}{18}", "18", NOTHING),
    (r"#### 2\times 9", "2", WRONG),
    ("#### 2\u00b2", "2", NOTHING),
    ("1\u00bd cups", "1", NOTHING),
    ("1 and a half", "1", NOTHING),
    ("1 / 2", "2", NOTHING),
    # digits that belong to a unit; a placeholder's brackets
    ("#### 18 2-liter bottles", "18", RIGHT),
    ("#### 18 5th graders", "18", RIGHT),
    ("#### <18>", "18", RIGHT),
    ("#### `18`", "18", RIGHT),
    ("#### < 18", "18", LOOSE),
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
    assert _strict(_prepare("#### $1,234.50 a month")) == Decimal("1234.5")
    assert _flexible(_prepare("from 3 to 1,234.50.")) == Decimal("1234.5")
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
    "\nUser:",
    " 000",
    "boxed{",
    "}",
    "½",
    " and a half",
    "<think>",
    "</think>",
    "<|im_start|>",
    "minus ",
    "answer is ",
    "\nProblem:",
    "\nAI:",
    "1 000",
]
HOSTILE = st.one_of(st.text(max_size=200), st.lists(st.sampled_from(PIECES), max_size=30).map("".join))


@settings(max_examples=300, deadline=None)
@given(HOSTILE)
def test_never_raises(completion: str) -> None:
    result = verdict(completion, "18")
    assert result.parsed or not (result.strict or result.flexible)


@settings(max_examples=300, deadline=None)
@given(HOSTILE)
def test_flexible_is_strict_where_nothing_is_boxed(completion: str) -> None:
    strict = _strict(_prepare(completion))
    assert "box" in completion or strict is None or _flexible(_prepare(completion)) == strict


@pytest.mark.parametrize("text", ["It is 18.", "#### 18", r"\boxed{18}"])
def test_a_stop_string_cuts_no_right_answer(text: str) -> None:
    """What follows a task's stop string is run on by the parser's rules too: a stop changes no verdict."""
    files = [yaml.safe_load(path.read_text(encoding="utf-8")) for path in TASKS.glob("*.yaml")]
    stops = {stop for file in files for stop in file.get("task", file)["stop"]}
    assert len(stops) >= 4
    for stop in stops:
        assert verdict(f"{text}{stop} 7\n#### 7", "18") == verdict(text, "18"), stop


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
    "boxed", "5 -", "US", "1/", "\u202f", "####$", "e1", "٣", "boxed{", "boxed{1", "boxed{1}", "boxed ", "{", "}",
    "<think>", "</think>", "<think>1</think>", "<|", "<|a", "\nUser", "\n  ", "\n**", "\nQuestion 1", " 000", "<1",
    "####<1", "#### -", " and ", "= - ", "#### 1 1",
    " 000 ", "1 000 ", "1 000", "is minus 1", "is minus ", "= ", "= minus $", "#### minus 1", "answer", "answer is 1",
    "answer*", "\nProblem", "\nProblem:", "boxed{a", "<thought>",
]  # fmt: skip
ENDS = [("", ""), ("#### ", ""), ("", "5"), ("#### 1,00", ",0x"), ("#### 1", "x"), (r"\boxed{", "}")]


@pytest.mark.parametrize("piece", HOSTILE_REPEATS)
@pytest.mark.parametrize(("before", "after"), ENDS)
def test_long_hostile_text_takes_linear_time(piece: str, before: str, after: str) -> None:
    """100,000 characters; a quadratic scan would take minutes, the linear one takes milliseconds."""
    text = before + piece * (100_000 // len(piece)) + after
    started = time.process_time()
    verdict(text, "18")
    assert time.process_time() - started < 2.0


def test_no_word_of_the_module_evaluates() -> None:
    source = Path(parsing.__file__).read_text(encoding="utf-8")
    assert "eval(" not in source and "exec(" not in source


NO_ONE_NUMBER = [
    "18 to 20", "18 or 20", "$18 or $20", "18; 20", "18k", "18M", "18 million", "18 thousand dollars", "18 dozen",
]  # fmt: skip


@pytest.mark.parametrize("text", NO_ONE_NUMBER)
def test_a_range_a_choice_and_a_part_of_a_number_are_no_strict_answer(text):
    assert _strict(_prepare(f"#### {text}")) is None
    assert not verdict(f"#### {text}", "18").strict and not verdict(f"#### {text}", "18").flexible


EIGHTEEN = [
    "#### 1. First step\n9 + 9 = 18\n#### 18", "#### 1. First step\n#### 2. Second\n\n#### 18.",
    "#### 18. That is the answer.", "#### +18", "#### 18km", "#### 18 kg", "#### 18 m",
]  # fmt: skip


@pytest.mark.parametrize("text", EIGHTEEN)
def test_headings_signs_and_units_leave_the_answer(text):
    assert verdict(text, "18").strict and not verdict(text, "1").strict


def _or_none(value: str) -> Decimal | None:
    return None if value == "none" else Decimal(value)


ORDINARY = [  # (completion, strict, flexible)
    ("Ana sells 16 - 3 - 4 = 9 eggs.\nShe makes 9 * 2 = $18.\n#### 18", "18", "18"),
    ("It takes 2/2 = 1 bolt of white.\nSo 2 + 1 = 3 bolts in all.\n#### 3", "3", "3"),
    ("80,000 + 50,000 = 130,000\n200,000 - 130,000 = 70,000\n#### 70,000", "70000", "70000"),
    ("He runs 3 * 60 = 180 meters a day, 540 meters in 3 days.\n#### 540 meters", "540", "540"),
    ("The answer is 20 minus 18.", "none", "18"),
    ("20 minus 18 is 2.\n#### 2", "2", "2"),
    ("First, 36 minus 18 leaves 18 eggs. The total is 18", "none", "18"),
    ("We have to minus 18", "none", "18"),
    ("The answer is $5.50.", "none", "5.50"),
    ("So the total cost is $1,234.50 for 3 people", "none", "3"),
    ("#### 5 100 dollar bills", "none", "100"),
    ("Day 1 100\nDay 2 200\nDay 3 300", "none", "300"),
    ("There are 18 2-liter bottles, so 36 liters.", "none", "36"),
    ("At 10:30 she has 25% of 200 = 50.\n#### 50", "50", "50"),
    ("### Step 1\n3 * 4 = 12\n### Step 2\n12 + 6 = 18\n\n**Answer: 18**", "none", "18"),
    ("#### Minus 18 eggs\n20 - 18 = 2\n#### 2", "2", "2"),
    ("#### Minus 18 eggs\n20 - 18 = 2", "none", "2"),
    ("Sure!\n\nProblem: Ana has 9 pens and 9 more.\nSolution: 9 + 9 = 18\n#### 18", "18", "18"),
    ("#### 1. Understand\nProblem: how many?\n#### 2. Solve\n9 + 9 = 18\n#### 18", "18", "18"),
    ("The problem: 9 + 9. The answer: 18.", "none", "18"),
    ("AI costs 5 dollars and a human 13.\nIn all: 18", "none", "18"),
    ("I think the thought counts: 18", "none", "18"),
    ("x = 3, y = -15\nx - y = 18", "none", "18"),
    ("Temperature falls to -18 degrees.", "none", "-18"),
    ("\\boxed{18}\nCheck: 9 + 9 = 18 and 20 - 2 = 18.", "none", "18"),
    ("The total number of eggs is 7.", "none", "7"),
    ("1. 5 apples\n2. 6 pears\n3. 7 plums\nTotal: 18.", "none", "18"),
    ("It is 1 234.", "none", "234"),
    ("Call 555 012 3456", "none", "3456"),
    ("I cannot answer this.", "none", "none"),
]


@pytest.mark.parametrize(("completion", "strict", "flexible"), ORDINARY)
def test_ordinary_completions_are_read_as_they_always_were(completion: str, strict: str, flexible: str) -> None:
    """What the parser read before it knew signs in words, `Problem:` and groups of zeros, written down then."""
    text = _prepare(completion)
    assert (_strict(text), _flexible(text)) == (_or_none(strict), _or_none(flexible))
