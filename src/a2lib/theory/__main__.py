"""Print every answer of "Parallelism on paper": python -m a2lib.theory [--json].

With ``--json`` one object, question id -> part -> quantities with formula, value, unit and
assumption; otherwise a table. The questions of 2026 ask for formulas, and their values are those of
an example: the feed-forward layer and the device that the options describe.

``python -m a2lib.theory plan`` plans the training of a Transformer instead: plan_command.py.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace

from a2lib.theory import answers, plan_command
from a2lib.theory.parallelism import EXAMPLE


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["plan"]:
        return plan_command.main(arguments[1:])
    parser = plan_command.Parser(
        prog="python -m a2lib.theory",
        description=__doc__.partition("\n")[0],
        epilog="python -m a2lib.theory plan --help: the planner of a Transformer's training",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object in place of a table")
    for name, kind, words in (
        ("tokens", int, "B, tokens of the batch over all devices"),
        ("d-model", int, "D, width of the layer"),
        ("d-ff", int, "F, width of its hidden"),
        ("flops", float, "C, operations a second of a device"),
        ("bandwidth", float, "W, bytes a second that a device sends"),
    ):
        default = getattr(EXAMPLE, name.replace("-", "_"))
        parser.add_argument(f"--{name}", type=kind, default=default, help=f"{words} ({default:g})")
    parser.add_argument("--devices", type=int, default=8, help="N of times and operations (8)")
    given = vars(parser.parse_args(arguments))
    as_json, n = given.pop("json"), given.pop("devices")
    try:
        found = answers.all_answers(replace(EXAMPLE, **given), n)
    except ValueError as error:
        parser.error(str(error))
    if as_json:
        print(json.dumps(answers.by_question(found), ensure_ascii=False, indent=2))
    else:
        print(table(found))
    return 0


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
        lines.append(f"  {part:<4}{answer.quantity:<65} {value:>16} {answer.unit:<11}"
                     f"{answer.formula}")  # fmt: skip
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
    sys.exit(main())
