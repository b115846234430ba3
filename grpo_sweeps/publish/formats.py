"""Tables as CSV, Markdown and LaTeX. Text from a run is hostile: every writer escapes it for its own format, and shows
what a terminal would obey.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Sequence

import numpy as np
import pandas as pd

from grpo_sweeps.maths.intervals import Interval
from grpo_sweeps.text import visible

FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")
LATEX = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "$": r"\$", "&": r"\&", "#": r"\#", "%": r"\%", "_": r"\_",
    "^": r"\textasciicircum{}", "~": r"\textasciitilde{}", "<": r"\textless{}", ">": r"\textgreater{}",
}  # fmt: skip


def number(value: object, digits: int = 2) -> str:
    """A number in a table; a dash where there is none.

    >>> number(1.234), number(-1e-9), number(float("nan")), number(12)
    ('1.23', '0.00', '–', '12')
    """
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return "–"
    if not isinstance(value, float):
        return str(value)
    return f"{round(value, digits) + 0.0:.{digits}f}"  # adding 0.0 turns -0.0 into 0.0


def with_interval(mean: float, low: float, high: float, digits: int = 2) -> str:
    """`1.98 [1.95, 2.01]`; the mean alone where there is no interval.

    >>> with_interval(2.0, 1.9, 2.1)
    '2.00 [1.90, 2.10]'
    """
    text = number(mean, digits)
    if not (math.isfinite(low) and math.isfinite(high)):
        return text
    return f"{text} [{number(low, digits)}, {number(high, digits)}]"


def with_interval_of(interval: Interval, digits: int = 2) -> str:
    """`with_interval` of an interval."""
    return with_interval(interval.mean, interval.low, interval.high, digits)


def three_digits(*values: float) -> str:
    """Numbers of any size with three digits; the first alone, or with its two ends.

    >>> three_digits(1234.5, 0.00123, 2e9), three_digits(0.5)
    ('1,230 [0.00123, 2e+09]', '0.5')
    """
    first, *ends = (_in_three_digits(value) if math.isfinite(value) else "–" for value in values)
    return f"{first} [{', '.join(ends)}]" if ends and np.isfinite(values).all() else first


def three_digits_of(interval: Interval) -> str:
    """`three_digits` of an interval."""
    return three_digits(interval.mean, interval.low, interval.high)


def _in_three_digits(value: float) -> str:
    """Powers of ten from a million on only.

    >>> _in_three_digits(999.6), _in_three_digits(-45678.0), _in_three_digits(1e6), _in_three_digits(-0.0)
    ('1,000', '-45,700', '1e+06', '0')
    """
    text = f"{value + 0.0:.3g}"  # as in `number`: no zero has a sign
    return f"{float(text):,.0f}" if "e+" in text and abs(value) < 1e6 else text


def csv(frame: pd.DataFrame, digits: int | None = None) -> str:
    """CSV, of full precision or with so many significant digits.

    A text cell or header that a spreadsheet would run as a formula (its first is =, +, -, @, a tab or a carriage
    return, after spaces or not) gets a leading apostrophe; numbers never do.

    >>> csv(pd.DataFrame({"a": ["=1+1", "b"], "n": [-1.5, 2.0]})).splitlines()
    ['a,n', "'=1+1,-1.5", 'b,2.0']
    >>> csv(pd.DataFrame({"n": [2 / 3, 2.0]}), digits=3).splitlines()
    ['n', '0.667', '2.0']
    """
    if digits is not None:
        frame = frame.map(lambda cell: float(f"{cell:.{digits}g}") if isinstance(cell, float) else cell)
    safe = frame.map(_csv_cell).rename(columns=_csv_cell)
    out = io.StringIO()
    safe.to_csv(out, index=False, lineterminator="\n")
    return out.getvalue()


def _csv_cell(cell: object) -> object:
    if not isinstance(cell, str):
        return cell
    start = "'" if cell.lstrip(" ").startswith(FORMULA_STARTS) else ""
    return start + visible(cell if cell.isprintable() else " ".join(cell.split()))


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A pipe table; pipes, line breaks and HTML in a cell are escaped.

    >>> print(markdown(["R"], [["a|b"]]), end="")
    | R |
    |---|
    | a\\|b |
    """
    lines = [header, *rows]
    text = ["| " + " | ".join(_markdown_cell(c) for c in line) + " |" for line in lines]
    return "\n".join([text[0], "|" + "---|" * len(header), *text[1:]]) + "\n"


def _markdown_cell(cell: str) -> str:
    return markdown_text(cell).replace("|", "\\|")


def markdown_text(text: str) -> str:
    """Text as one line of a Markdown page: no HTML, code, formula, link or image begins in it.

    >>> print(markdown_text("<b> & `rm` $x$ [a](b)\\n"))
    &lt;b> &amp; \\`rm\\` \\$x\\$ [a]\\(b)
    """
    safe = text.replace("\\", "\\\\").replace("&", "&amp;").replace("<", "&lt;").replace("](", "]\\(")
    return visible(" ".join(safe.replace("`", "\\`").replace("$", "\\$").split()))


def latex_escape(text: str) -> str:
    """Text with every character that LaTeX would interpret escaped.

    >>> latex_escape("50% of $x_1$")
    '50\\\\% of \\\\$x\\\\_1\\\\$'
    """
    return "".join(LATEX.get(c, c) for c in visible(" ".join(text.split()))).replace("–", "--")


def latex(header: Sequence[str], rows: Sequence[Sequence[str]], caption: str, label: str) -> str:
    """A booktabs table (needs \\usepackage{booktabs}); every cell escaped, first column left, others right aligned."""
    body = [" & ".join(latex_escape(c) for c in row) + r" \\" for row in rows]
    body = ["{}" + row if row.startswith(("[", "*")) else row for row in body]  # else an argument of the \\ before it
    return "\n".join(
        [
            "% needs \\usepackage{booktabs}",
            r"\begin{table}",
            r"  \centering",
            rf"  \caption{{{latex_escape(caption)}}}",
            rf"  \label{{{re.sub(r'[^A-Za-z0-9:.-]', '-', label)}}}",
            rf"  \begin{{tabular}}{{l{'r' * (len(header) - 1)}}}",
            r"    \toprule",
            "    " + " & ".join(latex_escape(c) for c in header) + r" \\",
            r"    \midrule",
            *("    " + line for line in body),
            r"    \bottomrule",
            r"  \end{tabular}",
            r"\end{table}",
            "",
        ]
    )
