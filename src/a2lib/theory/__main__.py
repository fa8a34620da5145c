"""Print every answer of "Parallelism on paper": python -m a2lib.theory [--json].

With ``--json`` one object, question id -> part -> quantities with formula, value, unit and
assumption; otherwise a table. The questions of 2026 ask for formulas, and their values are those of
an example: the feed-forward layer and the device that the options describe.

What a whole training takes in a layout is ``evaluate`` in estimate.py.
"""

import argparse
import json
from dataclasses import replace
from itertools import groupby

from a2lib.theory import answers
from a2lib.theory.parallelism import EXAMPLE


def main(arguments: list[str] | None = None) -> None:
    command = parser()
    options = vars(command.parse_args(arguments))
    as_json, n = options.pop("json"), options.pop("devices")
    try:
        every = answers.all_answers(replace(EXAMPLE, **options), n)
    except ValueError as error:
        command.error(str(error))
    if as_json:
        questions = answers.by_question(every)
        print(json.dumps(questions, ensure_ascii=False, indent=2, allow_nan=False))
    else:
        print(table(every))


def parser() -> argparse.ArgumentParser:
    command = argparse.ArgumentParser(
        prog="python -m a2lib.theory",
        description=__doc__.partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    command.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    for name, kind, words in (
        ("tokens", int, "B, tokens of the batch over all devices"),
        ("d_model", int, "D, width of the model"),
        ("d_ff", int, "F, hidden width of the layer"),
        ("flops", float, "C, FLOPs per second of a device"),
        ("bandwidth", float, "W, bytes per second that a device sends"),
    ):
        option = f"--{name.replace('_', '-')}"
        command.add_argument(option, type=kind, default=getattr(EXAMPLE, name), help=words)
    command.add_argument("--devices", type=int, default=8, help="N of times and operations")
    return command


def table(every: list[answers.Answer]) -> str:
    """Return the answers as lines of columns, below their question and what they assume."""
    lines = []
    for (question, assumption), group in groupby(every, lambda x: (x.question, x.assumption)):
        lines += [question, f"  {assumption}"]
        for answer in group:
            part = "" if answer.part == answers.WHOLE else f"({answer.part})"
            value = "" if isinstance(answer.value, list) else shown(answer.value)
            quantity = f"  {part:<4}{answer.quantity:<65}"
            lines.append(f"{quantity} {value:>16} {answer.unit:<11}{answer.formula}")
            if isinstance(answer.value, list):
                lines += [f"        {equation}" for equation in answer.value]
    return "\n".join(lines)


def shown(value: float) -> str:
    """Return a value as the table has it: whole numbers whole, others to six figures."""
    return f"{value:,}" if isinstance(value, int) else f"{value:,.6g}"


if __name__ == "__main__":
    main()
