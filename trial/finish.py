"""Trial: programs of the backward for Hopper that do whole heads, and slices of the batch.

    PYTHONPATH=src python trial/finish.py
    PYTHONPATH=src python trial/finish.py checks short    # parts: checks, short, slices, kernels, long, ordered

"old" is the backward as it is, "whole" and "peeled" are the trial. Times are of a CUDA graph of one backward, behind
a flush of the L2 cache, medians over turns of changing order.
"""

import itertools
import os
import statistics
import subprocess
import sys
import threading
import time

import torch

from a2lib.attention import dispatch, forms, launches

BEGAN = time.monotonic()
FORMS = ("", "whole", "peeled", "ring")
IN_ORDER = ("whole", "peeled")  # the order of additions is fixed
TOKENS, HIDDEN = 16384, 2048
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
STOP = 125  # seconds after which nothing is begun
END = 165  # and after which the process ends, whatever it waits for

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


def empty_inputs_of(batch, heads, n, d, causal, n_keys=None, dtype=torch.bfloat16, turned=False):
    """Return what ``inputs_of`` does, without contents: enough to compile for."""

    def make(rows):
        shape = (batch, rows, heads, d) if turned else (batch, heads, rows, d)
        x = torch.empty(shape, dtype=dtype, device="meta")
        return x.transpose(1, 2) if turned else x

    q, k = make(n), make(n if n_keys is None else n_keys)
    made = {"do": q, "q": q, "k": k, "v": k, "o": q, "dq": q, "dk": k, "dv": k}
    return made | {"lse": q.new_empty(q.shape[:-1], dtype=torch.float32)}


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


def awaited(form):
    """Wait for the GPU, but not for ever: end the process if a form hangs."""
    done = torch.cuda.Event()
    done.record()
    since = time.monotonic()
    while not done.query():
        if time.monotonic() - since > 20:
            say(f"HANGS: {form}")
            os._exit(1)
        time.sleep(0.001)


def launch(steps, tensors):
    for step in steps:
        launches.compile_and_launch(step, tensors)


def compile_some(which, workers):
    """Compile one of so many shares of all kernels into Triton's cache, without a GPU."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    class Hopper:
        get_current_device = get_current_stream = lambda *_: 0
        get_current_target = lambda _: GPUTarget("cuda", 90, 32)  # noqa: E731

    driver.set_active(Hopper())
    real = launches.call_of
    launches.call_of = lambda *of: real(*of)._replace(multiprocessors=132, hopper=True)
    asked = [(shape, shape[4], FORMS) for shape in CHECKED]
    for n, (d, causal) in itertools.product(LENGTHS, FA4):
        asked.append(((*shape_of(n, d), causal), causal, FORMS if n <= 4096 else FORMS[:1]))
    found = {}
    for shape, causal, forms_ in asked:
        for form in forms_:
            kind, steps, tensors = steps_of(empty_inputs_of(*shape), causal, form)
            assert kind == "one_sweep", (kind, shape)
            for step in steps:
                key = step.kernel, str(step.constants), str(step.options), tensors["q"].dtype
                found.setdefault(key, (step, tensors))

        made = empty_inputs_of(*shape)
        made = {name: made[name] for name in ("q", "k", "v", "o", "lse")}
        pass_ = forms.Pass(made, launches.call_of(made, causal), made["q"].shape[-1] ** -0.5)
        for step in pass_.forward():
            key = step.kernel, str(step.constants), str(step.options), made["q"].dtype
            found.setdefault(key, (step, pass_.tensors))

    # The ones that take longest first, dealt out.
    def cost(key):
        return (key[0] == "hopper_backward") * (10 + 3 * ("'WHOLE': 2" in key[1]))

    for key in sorted(found, key=lambda key: (-cost(key), key[1]))[which::workers]:
        step, tensors = found[key]
        arguments = launches.arguments_of(step, tensors)
        kernel = launches.kernel_of(step.kernel)
        options = {**step.constants, **step.options}
        kernel.warmup(*arguments, grid=(step.n_programs,), **options)
    print(f"  worker {which}: {len(found)} kernels in all", flush=True)


def compile_all():
    """Compile all kernels, in processes that see no GPU."""
    environment = dict(os.environ, CUDA_VISIBLE_DEVICES="")
    workers = min(14, os.cpu_count())
    started = []
    for which in range(workers):
        command = [sys.executable, __file__, "compile", str(which), str(workers)]
        started.append(subprocess.Popen(command, env=environment))
    failed = [process.wait() for process in started]
    say("compiled", "" if not any(failed) else f"with failures {failed}, compiled again below")


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
            awaited(form)
            for name, x in exact.items():
                worst = (made[name].double() - x).abs().max() / x.abs().max()
                errors[form, name] = worst.item()
            if form in IN_ORDER:
                first = made["dq"].clone()
                same = True
                for _ in range(10):
                    made["dq"].zero_()
                    launch(steps, tensors)
                    same &= torch.equal(first, made["dq"])
                told.append(f"{form}: dQ the same bits in 10 more: {same}")
                right &= same
        fine, numbers = True, []
        for name in exact:
            of = [errors[form, name] for form in FORMS]
            # A comparison with NaN is false.
            fine &= all(error <= 1.5 * of[0] + 1e-4 for error in of)
            numbers.append(name + " " + "/".join(f"{error:.1e}" for error in of))
        right &= fine
        say("CHECK", "right" if fine else "WRONG", shape[:6], jobs["whole"][0], *numbers, *told)
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
    ratios = {form: [] for form in FORMS[1:]}
    for n, d, causal in shapes:
        if time.monotonic() - BEGAN > STOP:
            say("out of time before", n, d, causal)
            break
        causal = bool(causal)
        made = inputs_of(*shape_of(n, d), causal)
        found = {}
        for form in FORMS:
            # Fewer heads than multiprocessors leave some idle.
            if form in IN_ORDER and made["q"].shape[0] * made["q"].shape[1] < 120:
                continue
            found[form] = graph_of([steps_of(made, causal, form)[1:]])
        took = race(found, 24 if n <= 4096 else 10)
        peer = FA4[d, causal][LENGTHS.index(n)]
        line = f"TIME {n:5d} d {d:3d} causal {causal!s:5} old {took['']:.4f} (/fa4 {took[''] / peer:.3f})"
        for form in FORMS[1:]:
            if form in took:
                ratio = took[form] / took[""]
                line += f" | {form} {took[form]:.4f} /old {ratio:.3f} /fa4 {took[form] / peer:.3f}"
                ratios[form].append(ratio)
        say(line)
        del found, made
    for form, of in ratios.items():
        if of:
            say(
                f"geometric mean of {form}/old, {len(of)} shapes: {statistics.geometric_mean(of):.4f}"
            )


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
        found = {"ordered": old}
        for form in IN_ORDER:
            found[form] = graph_of([steps_of(made, causal, form)[1:]])
        took = race(found, 12)
        told = " ".join(f"{form} {ms / took['ordered']:.3f}" for form, ms in took.items())
        say(f"ORDERED {n} d {d} causal {causal}: {took['ordered']:.4f} ms; {told}")


PARTS = {
    "checks": check,
    "kernels": kernels,
    "times": times,
    "slices": slices,
    "ordered": ordered,
}

if __name__ == "__main__":
    if sys.argv[1:2] == ["compile"]:
        compile_some(int(sys.argv[2]), int(sys.argv[3]))
        sys.exit()
    watch = threading.Timer(END, os._exit, [1])
    watch.daemon = True
    watch.start()
    compile_all()
    say(torch.__version__, torch.cuda.get_device_name(0))
    for name in sys.argv[1:] or ["checks", "short", "slices", "kernels", "long"]:
        if name == "short":
            times(LENGTHS[:4])
        elif name == "long":
            times(LENGTHS[4:])
        else:
            PARTS[name]()
