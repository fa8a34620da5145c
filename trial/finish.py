"""Trial: programs of the backward for Hopper that do whole heads, and slices of the batch.

    PYTHONPATH=src python trial/finish.py            # checks, 24 shapes, slices
    PYTHONPATH=src python trial/finish.py times      # a part of it: checks, times, slices, ordered

"old" is the backward as it is, "whole" the trial. Times are of a CUDA graph of one backward, behind
a flush of the L2 cache, medians over turns of changing order.
"""

import itertools
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import torch

from a2lib.attention import dispatch, forms, launches

BEGAN = time.monotonic()
FORMS = ("", "whole")
TOKENS, HIDDEN = 16384, 2048
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
STOP = 140  # seconds after which nothing is begun

# Of an H200, from CUDA graphs: FlashAttention-4's rows (head size, causal, tokens).
FA4 = {
    (64, False): (0.501568, 0.7816, 1.34464, 2.47334, 4.86757, 9.44232),
    (64, True): (0.393392, 0.528672, 0.80864, 1.38272, 2.52184, 4.71299),
    (128, False): (0.476208, 0.690688, 1.17893, 2.1473, 4.13469, 7.94539),
    (128, True): (0.353712, 0.466864, 0.719488, 1.22078, 2.26469, 4.07077),
}


def say(*what):
    print(f"{time.monotonic() - BEGAN:6.1f} s ", *what, flush=True)


class Reused(forms.Pass):
    """A pass whose scratch is that of an earlier one of the same shapes."""

    kept = None  # by name and shape

    def _make(self, name, shape, dtype):
        key = name, tuple(shape)
        if self.kept is None or key not in self.kept:
            super()._make(name, shape, dtype)
            if self.kept is not None:
                self.kept[key] = self.tensors[name]
        self.scratch[name] = self.tensors[name] = (
            self.kept[key] if self.kept is not None else self.tensors[name]
        )


def steps_of(tensors, causal, form, kept=None):
    """Return the steps of a backward in this form, and its tensors; with ``kept`` one sweep, whose
    scratch is kept there."""
    dispatch.trial = form
    call = launches.call_of(tensors, causal)
    pass_ = Reused(tensors.copy(), call, call.head_dim**-0.5)
    pass_.kept = kept
    kinds = dispatch.backward_form(call)
    if kept is None:
        steps = pass_.backward()
    else:
        pass_._backward_sums("one_sweep")
        steps = pass_.steps
    return kinds, steps, pass_.tensors


def inputs_of(batch, heads, n, d, causal, n_keys=None, dtype=torch.bfloat16, turned=False):
    n_keys = n if n_keys is None else n_keys
    generator = torch.Generator("cuda").manual_seed(n + d)

    def make(rows):
        shape = (batch, rows, heads, d) if turned else (batch, heads, rows, d)
        x = torch.randn(shape, device="cuda", dtype=dtype, generator=generator)
        return x.transpose(1, 2) if turned else x

    q, do, k, v = make(n), make(n), make(n_keys), make(n_keys)
    o, lse = launches.forward(q, k, v, causal, None)
    made = {"do": do, "q": q, "k": k, "v": v, "o": o, "lse": lse}
    for name in ("q", "k", "v"):
        made[f"d{name}"] = torch.empty_like(made[name])
    return made


def launch(steps, tensors):
    for step in steps:
        launches.compile_and_launch(step, tensors)


def compile_all(jobs):
    """Compile what the jobs launch, each kernel once, several at a time."""
    found = {}
    for steps, tensors in jobs:
        for step in steps:
            key = step.kernel, str(step.constants), str(step.options), tensors["q"].dtype
            found.setdefault(key, (step, tensors))

    def compile_one(job):
        step, tensors = job
        arguments = launches.arguments_of(step, tensors)
        kernel = launches.kernel_of(step.kernel)
        options = {**step.constants, **step.options}
        kernel.warmup(*arguments, grid=(step.n_programs,), **options)

    jobs = list(found.values())
    torch.cuda.set_device(0)
    with ThreadPoolExecutor(12) as pool:
        list(pool.map(compile_one, jobs))
    say(f"compiled {len(jobs)} kernels")


# Checks.

CHECKED = (
    # batch, heads, queries, head size, causal, keys, dtype, turned
    (10, 16, 512, 128, True, 512, torch.bfloat16, False),
    (10, 16, 512, 64, False, 512, torch.bfloat16, True),
    (10, 15, 515, 128, True, 515, torch.bfloat16, True),
    (18, 8, 1000, 128, False, 1000, torch.bfloat16, False),
    (20, 15, 129, 64, True, 129, torch.bfloat16, False),
    (14, 10, 300, 80, True, 700, torch.float16, False),
    (14, 10, 705, 56, False, 260, torch.bfloat16, False),
    (4, 16, 2048, 64, True, 2048, torch.bfloat16, False),
    (4, 16, 1100, 128, True, 1100, torch.bfloat16, False),
)


def reference(made, causal):
    """Return dq, dk, dv in float64."""
    q, k, v, do = (made[name].double() for name in ("q", "k", "v", "do"))
    scale = q.shape[-1] ** -0.5
    s = q @ k.transpose(-1, -2) * scale
    if causal:
        hidden = torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).triu(1)
        s.masked_fill_(hidden, float("-inf"))
    p = s.softmax(-1)
    del s
    dv = p.transpose(-1, -2) @ do
    dp = do @ v.transpose(-1, -2)
    ds = p * (dp - (p * dp).sum(-1, keepdim=True)) * scale
    return {"dq": ds @ k, "dk": ds.transpose(-1, -2) @ q, "dv": dv}


def check():
    everything = []
    for batch, heads, n, d, causal, n_keys, dtype, turned in CHECKED:
        made = inputs_of(batch, heads, n, d, causal, n_keys, dtype, turned)
        everything.append((made, causal, {form: steps_of(made, causal, form) for form in FORMS}))
    compile_all([job[1:] for _, _, jobs in everything for job in jobs.values()])
    right = True
    for shape, (made, causal, jobs) in zip(CHECKED, everything, strict=True):
        exact = reference(made, causal)
        errors, told = {}, []
        for form, (kind, steps, tensors) in jobs.items():
            for name in ("dq", "dk", "dv"):
                made[name].fill_(float("nan"))
            if form:  # what the sums held must not matter
                tensors["dq_sums"].fill_(float("nan"))
            launch(steps, tensors)
            for name, x in exact.items():
                worst = (made[name].double() - x).abs().max() / x.abs().max()
                errors[form, name] = worst.item()
            if form:
                first = made["dq"].clone()
                same = True
                for _ in range(10):
                    made["dq"].zero_()
                    launch(steps, tensors)
                    same &= torch.equal(first, made["dq"])
                told.append(f"dQ the same bits in 10 more: {same}")
                right &= same
        fine = True
        for name in exact:
            # A comparison with NaN is false.
            fine &= errors["whole", name] <= 1.5 * errors["", name] + 1e-4
        right &= fine
        numbers = " ".join(
            f"{name} {errors['', name]:.1e}/{errors['whole', name]:.1e}" for name in exact
        )
        say("CHECK", "right" if fine else "WRONG", shape[:6], jobs["whole"][0], numbers, *told)
        del exact
    say("CHECKS", "all right" if right else "NOT ALL RIGHT")


# Times.


def graph_of(parts):
    """Return a CUDA graph of the steps of the parts, one behind the other."""
    for steps, tensors in parts:
        launch(steps, tensors)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for steps, tensors in parts:
            launch(steps, tensors)
    return graph


def race(graphs, turns):
    """Return the median of each graph's time in ms, behind a flush of the L2 cache."""
    flush = torch.empty(2**28, dtype=torch.uint8, device="cuda")
    names, events = list(graphs), {name: [] for name in graphs}
    for _ in range(3):
        for name in names:
            graphs[name].replay()
    for turn in range(turns):
        at = turn % len(names)
        order = names[at:] + names[:at]
        if turn // len(names) % 2:
            order.reverse()
        for name in order:
            flush.zero_()
            pair = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            pair[0].record()
            graphs[name].replay()
            pair[1].record()
            events[name].append(pair)
    torch.cuda.synchronize()
    return {
        name: statistics.median(begin.elapsed_time(end) for begin, end in pairs)
        for name, pairs in events.items()
    }


def shape_of(n, d):
    return TOKENS // n, HIDDEN // d, n, d


def times(lengths=LENGTHS):
    shapes = [(n, d, causal) for n in lengths for d, causal in itertools.product((128, 64), (1, 0))]
    jobs = []
    for n, d, causal in shapes:
        if n in (512, 1024, 2048, 4096):
            made = inputs_of(*shape_of(n, d), bool(causal))
            jobs += [steps_of(made, bool(causal), form)[1:] for form in FORMS]
    compile_all(jobs)
    jobs.clear()
    ratios = []
    for n, d, causal in shapes:
        if time.monotonic() - BEGAN > STOP:
            say("out of time before", n, d, causal)
            break
        causal = bool(causal)
        made = inputs_of(*shape_of(n, d), causal)
        found = {}
        for form in FORMS:
            # Heads fewer than half of the multiprocessors would leave them idle.
            if form and made["q"].shape[0] * made["q"].shape[1] < 60:
                continue
            found[form] = graph_of([steps_of(made, causal, form)[1:]])
        took = race(found, 24 if n <= 4096 else 10)
        peer = FA4[d, causal][LENGTHS.index(n)]
        line = f"TIME {n:5d} d {d:3d} causal {causal!s:5} old {took['']:.4f} (/fa4 {took[''] / peer:.3f})"
        if "whole" in took:
            ratio = took["whole"] / took[""]
            line += f" whole {took['whole']:.4f} whole/old {ratio:.3f} whole/fa4 {took['whole'] / peer:.3f}"
            ratios.append(ratio)
        say(line)
        del found, made
    product = statistics.geometric_mean(ratios or [1.0])
    say(f"geometric mean of whole/old over {len(ratios)} shapes: {product:.4f}")


def kernels():
    """Time each kernel of both forms alone, at the shortest lengths."""
    for n, d, causal in itertools.product((512, 1024, 2048), (128, 64), (True, False)):
        made = inputs_of(*shape_of(n, d), causal)
        parts = {}
        for form in FORMS:
            _, steps, tensors = steps_of(made, causal, form)
            launch(steps, tensors)
            for step in steps:
                parts[form or "old", step.kernel] = graph_of([([step], tensors)])
        took = race(parts, 12)
        told = " ".join(f"{'/'.join(name)} {ms:.4f}" for name, ms in took.items())
        say(f"KERNELS {n} d {d} causal {causal}: {told}")


def slices():
    """The old form of the whole batch beside its slices, which use the same scratch."""
    for n, d, causal in itertools.product((512, 1024), (128, 64), (True, False)):
        if time.monotonic() - BEGAN > STOP:
            say("out of time before slices of", n, d, causal)
            break
        made = inputs_of(*shape_of(n, d), causal)
        batch = made["q"].shape[0]
        found = {}
        for pieces in (1, 2, 4, 8):
            kept, parts = {}, []
            size = batch // pieces
            for piece in range(pieces):
                of = {name: x[piece * size : (piece + 1) * size] for name, x in made.items()}
                parts.append(steps_of(of, causal, "", kept))
            found[pieces] = graph_of([part[1:] for part in parts])
        took = race(found, 24)
        told = " ".join(f"{pieces} {ms:.4f} ({ms / took[1]:.3f})" for pieces, ms in took.items())
        say(f"SLICES {n} d {d} causal {causal!s:5}: {told}")


def ordered():
    """The form in a fixed order beside the trial, whose order is fixed too."""
    for n, d, causal in itertools.product((512, 1024, 2048), (128, 64), (True, False)):
        if time.monotonic() - BEGAN > STOP + 30:
            say("out of time before ordered", n, d, causal)
            break
        made = inputs_of(*shape_of(n, d), causal)
        torch.use_deterministic_algorithms(True)
        old = graph_of([steps_of(made, causal, "")[1:]])
        torch.use_deterministic_algorithms(False)
        took = race({"ordered": old, "whole": graph_of([steps_of(made, causal, "whole")[1:]])}, 12)
        ratio = took["whole"] / took["ordered"]
        say(f"ORDERED {n} d {d} causal {causal}: {took['ordered']:.4f} whole/ordered {ratio:.3f}")


PARTS = {
    "checks": check,
    "kernels": kernels,
    "times": times,
    "slices": slices,
    "ordered": ordered,
}

if __name__ == "__main__":
    chosen = sys.argv[1:] or ["checks", "short", "slices", "kernels", "long"]
    say(torch.__version__, torch.cuda.get_device_name(0))
    for name in chosen:
        if name == "short":
            times(LENGTHS[:4])
        elif name == "long":
            times(LENGTHS[4:])
        else:
            PARTS[name]()
