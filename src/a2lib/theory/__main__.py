"""Print every answer of "Parallelism on paper": python -m a2lib.theory [--json].

With ``--json`` one object, question id -> part -> quantities with formula, value, unit and
assumption; otherwise a table. The questions of 2026 ask for formulas, and their values are those of
an example: the feed-forward layer and the device that the options describe.

What a whole training takes in a layout is ``evaluate`` in estimate.py.
"""

import json
import sys
from dataclasses import replace

from a2lib.command import Number, Parser, Whole, add_number, output
from a2lib.theory import answers
from a2lib.theory.parallelism import EXAMPLE


def main(arguments: list[str] | None = None) -> int:
    given = vars(parser().parse_args(arguments))
    as_json, n = given.pop("json"), given.pop("devices")
    found = answers.all_answers(replace(EXAMPLE, **given), n)
    if as_json:
        said = answers.by_question(found)
        print(json.dumps(said, ensure_ascii=False, indent=2, allow_nan=False))
    else:
        print(table(found))
    return 0


def parser() -> Parser:
    made = Parser(prog="python -m a2lib.theory", description=__doc__.partition("\n")[0])
    made.add_argument("--json", action="store_true", help="one JSON object in place of a table")
    for name, kind, words in (
        ("tokens", Whole(1, 10**12), "B, tokens of the batch over all devices"),
        ("d-model", Whole(1, 10**7), "D, width of the layer"),
        ("d-ff", Whole(1, 10**8), "F, width of its hidden"),
        ("flops", Number(1e6, 1e18), "C, operations a second of a device"),
        ("bandwidth", Number(1e3, 1e18), "W, bytes a second that a device sends"),
    ):
        add_number(made, f"--{name}", kind, words, getattr(EXAMPLE, name.replace("-", "_")))
    add_number(made, "--devices", Whole(1, 10**7), "N of times and operations", 8)
    return made


def table(found: list[answers.Answer]) -> str:
    """The answers as lines of columns; an assumption stands once, below what rests on it."""
    lines, question = [], ""
    for answer, after in zip(found, [*found[1:], None], strict=True):
        if answer.question != question:
            question = answer.question
            lines += ["", question]
        equations = answer.value if isinstance(answer.value, list) else []
        value = "" if equations else shown(answer.value)
        part = "" if answer.part == answers.WHOLE else f"({answer.part})"
        lines.append(
            f"  {part:<4}{answer.quantity:<65} {value:>16} {answer.unit:<11}{answer.formula}"
        )
        lines += [f"        {line}" for line in equations]
        if after is None or (after.question, after.assumption) != (question, answer.assumption):
            lines.append(f"        : {answer.assumption}")
    return "\n".join(lines[1:])


def shown(value: float | None) -> str:
    """A value as the table has it: whole numbers whole, others to six figures."""
    if value is None:
        return "none"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.6g}"


if __name__ == "__main__":
    with output():
        code = main()
    sys.exit(code)
