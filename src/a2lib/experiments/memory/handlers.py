"""What a worker does for the sections of memory: one task is one configuration.

Peaks are the allocator's own statistics, set back when a phase begins. A recording slows its
process and is made apart. cuBLAS's workspaces are dropped before each configuration, so that each
takes its own and none finds another's.
"""

import contextlib
import dataclasses
from collections.abc import Iterator

import torch

from a2lib.experiments.harness.worker import Job, Row
from a2lib.experiments.memory import BLOCK, STEPS, counted, picture
from a2lib.experiments.steps import Configuration
from a2lib.experiments.workload.workload import Workload
from a2lib.lab import MEMORY, snapshot, synchronize
from a2lib.lab.failures import classify, is_lost, note
from a2lib.lab.memory import clear, requested_bytes
from a2lib.lab.saved import saved_for_backward, saved_rows
from a2lib.lab.tape import Tape
from a2lib.model import RotaryPositionalEmbedding, TransformerBlock
from a2lib.model.transformer import ROPE_THETA
from a2lib.theory.memory.step import peak

POINTS = 2000  # of a timeline; a picture of it takes fewer
LINES = 24
# Column -> the allocator's name of it.
LEVELS = {
    "tensor_bytes": "requested_bytes",
    "allocated_bytes": "allocated_bytes",
    "reserved_bytes": "reserved_bytes",
}


def prepare() -> None:
    """Have fp32 multiplied as fp32, not as TF32."""
    torch.set_float32_matmul_precision("highest")


class Peaks:
    """The most bytes of each phase, by what the allocator counts; a step's are its phases' most."""

    def __init__(self) -> None:
        self.found: dict[tuple[int, str], Row] = {}
        self.where = "building the model"

    @contextlib.contextmanager
    def step(self, number: int) -> Iterator[None]:
        self._number = number
        yield
        phases = [row for (n, _), row in self.found.items() if n == number]
        whole = {name: max(row[name] for row in phases) for name in LEVELS}
        free, total = torch.cuda.mem_get_info()
        self.found[number, "step"] = whole | {"driver_bytes": total - free}

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.where = f"step {self._number}, {name}"
        torch.cuda.reset_peak_memory_stats()
        yield
        stats = torch.cuda.memory_stats()
        levels = {column: stats[f"{level}.all.peak"] for column, level in LEVELS.items()}
        self.found[self._number, name] = levels


def peaks(job: Job) -> None:
    """The peaks of two steps by phase; phases that were not reached have the reason."""
    case = Configuration(**job.spec)
    if _too_large(job, case):
        return
    failure: Exception | None = None
    if job.device == "cpu":
        found, where = _counted_on_cpu(case, job), ""
    else:
        meter = Peaks()
        try:
            _steps(case, job, meter)
        except Exception as error:
            failure = error.with_traceback(None)  # which holds the tensors
        found, where = meter.found, meter.where
    rows = []
    for key in job.keys:
        row = found.get((key["step_number"], key["phase"]))
        rows.append({**key, **({"status": "ok", **row} if row else _why(failure, where))})
    job.put(*rows)
    if failure is not None and is_lost(failure):
        raise failure


def _why(failure: Exception, where: str) -> Row:
    status, why = classify(failure)
    if status == "oom":
        why = " ".join(str(failure).split()).partition(" If you are")[0] or why
    return {"status": status, "note": note(f"in {where}: {why}")}


def _steps(case: Configuration, job: Job, meter: Peaks) -> None:
    clear(job.device)
    workload = Workload(case.config(job.device, seed=job.seed), job.device)
    for number in STEPS:
        with meter.step(number):
            result = workload.work(meter.phase)
            synchronize(job.device)
        del result
        workload.drop_gradients()


def _counted_on_cpu(case: Configuration, job: Job) -> dict[tuple[int, str], Row]:
    workload = Workload(case.config(job.device, seed=job.seed), job.device)
    found: dict[tuple[int, str], Row] = {}
    with Tape() as tape:
        tape.hold("model", [*workload.model.parameters(), *workload.model.buffers()])
        for number in STEPS:
            peaks = {}

            @contextlib.contextmanager
            def phase(name: str, peaks: dict = peaks) -> Iterator[None]:
                tape.restart()
                yield
                peaks[name] = tape.peak

            result = workload.work(phase)
            del result
            workload.drop_gradients()
            peaks["step"] = max(peaks.values())
            for name, peak_bytes in peaks.items():
                found[number, name] = {"tensor_bytes": peak_bytes}
    return found


def recording(job: Job) -> None:
    """Every allocation of two steps, of a model or of one block: a picture of each, its largest by
    line of code, and what was alive at its peak."""
    case = Configuration(**job.spec)
    if _too_large(job, case):
        return
    if job.device == "cpu":
        return job.refuse("unsupported", "the history of allocations is a GPU's")
    found = _record(case, job)
    for key in job.keys:
        number = key["step_number"]
        name = f"step {number}"
        most = snapshot.peak(found, name)
        about = {**case.key(MEMORY), "step_number": number, "peak phase": most.phase}
        tables = {
            "memory": snapshot.timeline_rows(found, name, POINTS),
            "lines": snapshot.line_rows(found, name, LINES),
            "largest": snapshot.largest_rows(most, LINES),
        }
        for table, rows in tables.items():
            job.picture(table, f"{picture(case)}-{number}", rows, about)
        made = sum(one.phase.startswith(f"{name}/") for one in found.allocations)
        row = {"tensor_bytes": most.total, "allocations": made}
        row["unexplained_bytes"] = abs(found.unexplained_bytes)
        job.put({**key, "status": "ok", **row})


def _record(case: Configuration, job: Job) -> snapshot.Recording:
    """Two steps of what is built under the recorder."""
    clear(job.device)
    with snapshot.Recorder() as recorder:
        (_block_steps if case.mode == BLOCK else _model_steps)(case, job, recorder)
    return recorder.recording


def _model_steps(case: Configuration, job: Job, recorder: snapshot.Recorder) -> None:
    workload = Workload(case.config(job.device, seed=job.seed), job.device)
    recorder.watch(workload.model, workload.optimizer)
    for number in STEPS:
        synchronize(job.device)
        with recorder.phase(f"step {number}"):
            result = workload.work(recorder.phase)
            del result
            workload.drop_gradients()
            synchronize(job.device)


def _block_steps(case: Configuration, job: Job, recorder: snapshot.Recorder) -> None:
    one, size = _block(case, job)
    recorder.watch(one)
    # Its input requires a gradient, as in the middle of a model.
    x = torch.randn(size, requires_grad=True, device=job.device)
    gradient = torch.randn(size, device=job.device)
    for number in STEPS:
        synchronize(job.device)
        with recorder.phase(f"step {number}"):
            with recorder.phase("forward"), _precision(case, job):
                output = one(x)
            with recorder.phase("backward"):
                output.backward(gradient)
            output = x.grad = None
            one.zero_grad(set_to_none=True)
            synchronize(job.device)


def _block(case: Configuration, job: Job) -> tuple[TransformerBlock, tuple[int, int, int]]:
    """One block and the size of its input, ``(B, T, D)``."""
    s, place = case.shape, {"device": job.device}
    rope = RotaryPositionalEmbedding(ROPE_THETA, s.head_dim, case.context, **place)
    torch.manual_seed(job.seed)
    one = TransformerBlock(s.d_model, s.num_heads, s.d_ff, rope, case.attention, **place)
    return one, (case.batch, case.context, s.d_model)


def _precision(case: Configuration, job: Job) -> torch.autocast:
    return torch.autocast(job.device, torch.bfloat16, enabled=case.precision == "bf16")


def block(job: Job) -> None:
    """What one block keeps, by autograd's hooks and by the allocator, and its gradients."""
    case = Configuration(**job.spec)
    if _too_large(job, case):
        return
    clear(job.device)
    one, size = _block(case, job)
    for _ in range(2):  # the first takes cuBLAS's workspaces
        one.zero_grad(set_to_none=True)
        before = requested_bytes(job.device)
        x = torch.randn(size, requires_grad=True, device=job.device)
        with _precision(case, job):
            output, saved = saved_for_backward(one, x)
        after = requested_bytes(job.device)
        output.sum().backward()
        made = output.nbytes
        output = x = None
    rows = saved_rows(saved)
    gradients = sum(p.grad.untyped_storage().nbytes() for p in one.parameters())
    (key,) = job.keys
    job.picture("saved", picture(case), rows, key)
    row = {"saved_bytes": sum(r["bytes"] for r in rows), "gradient_bytes": gradients}
    if job.device == "cuda":
        row["grown_bytes"] = after - before - made
    job.put({**key, "status": "ok", **row})


def _too_large(job: Job, case: Configuration) -> bool:
    whole = dataclasses.replace(case, mode="train-step") if case.mode == BLOCK else case
    return job.device == "cpu" and job.would_swap(peak(counted(whole)).total)
