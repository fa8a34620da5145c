"""The chapter's rows, loaded once, and beside each what the formulas make of it.

The formulas have two inputs, and both are measured in the same run: C, the best rate at which
ranks of data parallelism compute this stack with nothing sent, and W, what their all-reduces send a
second with nothing computed. Every other time is then a prediction.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd

from a2lib.report.chapters.collectives import Collectives
from a2lib.report.chapters.measured import Measured
from a2lib.report.metrics import pick
from a2lib.theory import parallelism, schedules
from a2lib.theory.parallelism import Cost, Layer

COMMAND = "papermill notebooks/parallelism.ipynb -p sweep all"
NAMES = {"dp": "data parallel", "fsdp": "FSDP", "tp": "tensor parallel", "fsdp_tp": "FSDP × TP"}
BACKENDS = {"nccl": ("NCCL", "GPUs"), "gloo": ("gloo", "processes")}
PASSES = ("forward", "backward")
BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
PARTS = 2  # of the batch, under tensor parallelism
STACK = ["dtype", "layers", "d_model", "d_ff"]
SLOWER = ["by_products", "by_messages", "by_both"]
ADDED = ["compute", "messages", "floor", "clock", "off", *SLOWER, "hidden"]


@dataclass(frozen=True)
class Machine:
    """So many ranks of a backend, the stack that its batches were swept for, and C and W."""

    backend: str
    world_size: int
    dtype: str
    layers: int
    layer: Layer  # its tokens are 1

    @property
    def label(self) -> str:
        name, unit = BACKENDS[self.backend]
        return f"{name}, {self.world_size} {unit}"

    def of(self, tokens: int, d_ff: int) -> Layer:
        """The layer of a row."""
        return replace(self.layer, tokens=int(tokens), d_ff=int(d_ff))


class Beside(Measured):
    """What the chapter shows: `table` of the published device, `local` of any other, each with what
    is predicted; `machines`, those of the former; and the rows of `collectives`."""

    def __init__(self, roots: list[Path] | None = None):
        super().__init__(roots)
        (self.table, self.machines), (self.local, _) = map(with_predictions,
                                                           self.read("parallelism"))  # fmt: skip
        self.collectives = Collectives(roots)

    def maker(self, n: int) -> Machine:
        """The published device by its maker's figures, with the book's example of a layer."""
        layer = replace(parallelism.EXAMPLE, tokens=1)
        return Machine("nccl", n, "bf16", 1, layer)

    def of(self, machine: Machine, **where) -> pd.DataFrame:
        """Ours of this machine's stack, whatever its d_ff; with a time."""
        return stack_rows(self.table, machine, **where)


def stack_rows(rows: pd.DataFrame, machine: Machine, implementation: str = "a2lib", **where):
    """The rows with a time of one machine's stack."""
    fixed = {"backend": machine.backend, "world_size": machine.world_size, "dtype": machine.dtype}
    fixed |= {"layers": machine.layers, "d_model": machine.layer.d_model}
    return pick(rows.dropna(subset=["ms"]), implementation=implementation, **fixed, **where)


def with_predictions(rows: pd.DataFrame) -> tuple[pd.DataFrame, list[Machine]]:
    """The rows with `along_data` and `along_tensor`, and in ms `compute`, `messages`,
    `floor` (the longer of both, pass by pass) and `clock` (with what has nothing to hide behind);
    `off`, the time over what is predicted, less 1; what it is the sum of, `by_products`, which the
    clock says if products take what they took alone, `by_messages`, the same of messages in turn,
    and `by_both`, what comes only of both at once; and `hidden`, the share of the shorter of
    computation and messages that ran beside the longer. NaN where there is none. And the machines
    of all devices among them."""
    rows = rows.reset_index(drop=True)
    sizes = rows["mesh"].str.split("x", expand=True).reindex(columns=[0, 1])
    rows = rows.rename(columns={"pass": "phase"}).assign(
        along_data=sizes[0].astype(float), along_tensor=sizes[1].astype(float),
        **dict.fromkeys(ADDED, math.nan),
    )  # fmt: skip
    machines, added = [], {}
    for _, group in rows.groupby(["device", "backend", "world_size"], sort=False):
        found = machine(group)
        if found is None:
            continue
        machines.append(found)
        for implementation in ("a2lib", "torch"):
            for row in stack_rows(group, found, implementation).itertuples():
                added[row.Index] = predict(row, found)
    rows.update(pd.DataFrame.from_dict(added, orient="index", columns=ADDED))
    order = {"nccl": 0, "gloo": 1}
    return rows, sorted(machines, key=lambda m: (order.get(m.backend, 2), m.world_size))


def machine(group: pd.DataFrame) -> Machine | None:
    """C and W of one device's ranks, from the rows of data parallelism; None where they lack.

    Of several stacks it is the one with most batches.
    """
    rows = pick(group, scheme="dp", implementation="a2lib").dropna(subset=["ms", "ms_without"])
    if not len(rows):
        return None
    dtype, layers, d_model, d_ff = rows.groupby(STACK, sort=False).size().idxmax()
    rows = pick(rows, dtype=dtype, layers=layers, d_model=d_model, d_ff=d_ff)
    first = rows.iloc[0]
    unit = Layer(1, int(d_model), int(d_ff), 1.0, 1.0, BYTES[dtype])  # seconds are FLOPs and bytes
    rates, sent = [], []
    for row in rows.itertuples():
        passes = costs(row, replace(unit, tokens=int(row.tokens)))
        rates.append(layers * sum(c.compute_s for c in passes) / row.ms_without * 1e3)
        if row.phase == "backward" and row.ms_communication > 0:
            sent.append(layers * sum(c.data_s for c in passes) / row.ms_communication * 1e3)
    if not sent:
        return None
    layer = replace(unit, flops=max(rates), bandwidth=float(pd.Series(sent).median()))
    return Machine(first.backend, int(first.world_size), dtype, int(layers), layer)


def costs(row, layer: Layer) -> list[Cost]:
    """The formulas' costs of each pass of a row, for one layer."""
    mesh = int(row.along_data), int(row.along_tensor)
    if row.scheme == "dp":
        found = parallelism.data_parallel(layer, mesh[0])
    else:
        found = parallelism.fully_sharded_tensor_parallel(layer, *mesh)
    return [found[name] for name in passes_of(row)]


def passes_of(row) -> tuple[str, ...]:
    return PASSES if row.phase == "end_to_end" else (row.phase,)


def predict(row, machine: Machine) -> dict[str, float]:
    """What ``with_predictions`` adds to a row. The axes of a mesh share a device's links."""
    layers = machine.layers
    passes = costs(row, machine.of(row.tokens, row.d_ff))
    found = {
        "compute": sum(c.compute_s for c in passes),
        "messages": sum(c.data_s + c.tensor_s for c in passes),
        "floor": sum(max(c.compute_s, c.data_s + c.tensor_s) for c in passes),
    }
    found = {name: 1e3 * layers * seconds for name, seconds in found.items()}
    said = together(row, passes, layers)
    found |= {"clock": said, "off": row.ms / said - 1}
    alone = row.ms_without, row.ms_communication
    if alone[0] > 0:  # PyTorch's have no such time
        sent = alone[1] / found["messages"] if found["messages"] and alone[1] > 0 else 1.0
        products = together(row, passes, layers, alone[0] / found["compute"])
        both = together(row, passes, layers, alone[0] / found["compute"], sent)
        parts = products - said, both - products, row.ms - both
        found |= dict(zip(SLOWER, (part / said for part in parts), strict=True))
    found["hidden"] = (sum(alone) - row.ms) / min(alone) if min(alone) > 0 else math.nan
    return found


def together(
    row, passes: list[Cost], layers: int, products: float = 1.0, messages: float = 1.0
) -> float:
    """ms of a row's passes by the clock, or by the longer of both where it has no schedule, if
    products and messages take so many times their predicted seconds."""
    passes = [replace(c, compute_s=products * c.compute_s, data_s=messages * c.data_s,
                      tensor_s=messages * c.tensor_s) for c in passes]  # fmt: skip
    clocks = [clock(row.scheme, name, layers, cost)
              for name, cost in zip(passes_of(row), passes, strict=True)]  # fmt: skip
    if None in clocks:
        clocks = [layers * max(c.compute_s, c.data_s + c.tensor_s) for c in passes]
    return 1e3 * sum(clocks)


def clock(scheme: str, pass_: str, layers: int, cost: Cost) -> float | None:
    """Seconds of a pass run event by event, in the order of the experiment; None for two axes
    backward, whose order no schedule of ours has."""
    compute, data, tensor = cost.compute_s, cost.data_s, cost.tensor_s
    forward = pass_ == "forward"
    if scheme == "dp":
        if forward:
            return layers * compute
        tasks = schedules.data_parallel_backward(layers, compute, data)
    elif scheme == "fsdp":
        tasks = (schedules.fsdp_forward(layers, compute, data) if forward
                 else schedules.fsdp_backward(layers, compute, data / 2, data / 2))  # fmt: skip
    elif scheme == "tp":
        made = schedules.tensor_forward if forward else schedules.tensor_backward
        tasks = made(layers, compute, tensor, PARTS)
    elif forward:
        tasks = schedules.mesh_forward(layers, compute, data, tensor, PARTS, shared=True)
    else:
        return None
    return schedules.run(tasks).seconds


def share(rows: pd.DataFrame) -> pd.Series:
    """Messages over computation as measured, each alone; NaN where nothing is sent."""
    return rows["ms_communication"].astype(float) / rows["ms_without"].astype(float)


def crossing(points: list[tuple[float, float]]) -> float | None:
    """Where a share that falls passes 1, both axes logarithmic between two points; None where no
    two neighbours have it between them. ``points`` are (batch or width, share), in order."""
    for (x, high), (y, low) in zip(points, points[1:], strict=False):
        if high > 1 >= low:
            part = math.log(high) / math.log(high / low)
            return x * (y / x) ** part
    return None


def along_logarithms(x: pd.Series, y: pd.Series, at: float) -> float:
    """y at ``at``, both axes logarithmic between the two points around it; ``x`` in order."""
    k = int((x >= at).idxmax())
    if not k:
        return float(y.iloc[0])
    part = math.log(at / x.iloc[k - 1]) / math.log(x.iloc[k] / x.iloc[k - 1])
    return float(y.iloc[k - 1] * (y.iloc[k] / y.iloc[k - 1]) ** part)
