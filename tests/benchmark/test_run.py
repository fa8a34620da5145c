"""What a run gives back, and how it ends; what it asks of a CUDA device, in which order: a played
device, and the model on the CPU."""

import json
import math
import resource
import weakref

import pytest
import torch
from refusals import refused

from a2lib.attention import UnsupportedError
from a2lib.benchmark import MODES, PHASES, Result, StepTimes, Summary, check_here, run, workload
from a2lib.benchmark import __main__ as command
from a2lib.lab import trace
from a2lib.lab.runs import versions

STEP = set("ms host_ms total_ms wall_ms loss allocated_bytes reserved_bytes".split())
TOP = {"status", "note", "config", "device_name", "parameters", "flops", "memory", "versions"}
TOP |= {"summary", "warmup", "steps"}
FP32 = [(mode, "fp32") for mode in MODES]


@pytest.mark.parametrize("mode, precision", [*FP32, ("train-step", "bf16")])
def test_every_step_is_kept(tiny, mode, precision):
    result = run(tiny(mode=mode, precision=precision, warmup=2, steps=3))
    assert (result.status, result.note, result.device) == ("ok", "", "cpu")
    assert (len(result.warmup), len(result.steps)) == (2, 3)
    for step in result.warmup + result.steps:
        assert tuple(step.ms) == tuple(step.host_ms) == PHASES[mode]
        assert all(ms > 0 for ms in step.ms.values())
        assert 0 < sum(step.ms.values()) <= step.total_ms <= step.wall_ms
        assert (step.loss is not None) == ("loss" in PHASES[mode])
    assert list(result.summary()) == [*PHASES[mode], "total", "wall"]
    losses = [step.loss for step in result.warmup + result.steps if step.loss is not None]
    if "optimizer" in PHASES[mode]:
        assert losses == sorted(losses, reverse=True) and losses[0] > losses[-1]
    else:
        assert len(set(losses)) <= 1


def test_one_seed_is_one_training(tiny):
    first, again, other = ([step.loss for step in run(tiny(seed=seed)).steps] for seed in (0, 0, 1))
    assert first == again != other
    assert all(abs(loss - math.log(11)) < 3 for loss in first)


@pytest.mark.parametrize("mode", ["train-step", "overlapped-step"])
def test_weights_of_zero_stay_zero(tiny, built, mode):
    made = []
    built(lambda workload: made.append(workload.model))
    steps = run(tiny(weights="zero", mode=mode)).steps
    assert [step.loss for step in steps] == pytest.approx([math.log(11)] * 2)
    assert made and not any(p.any() for model in made for p in model.parameters())


def test_options_that_change_nothing_of_the_result(tiny):
    def losses(**options):
        return [step.loss for step in run(tiny(**options)).steps]

    plain = losses()
    assert losses(checkpointing="block") == plain
    assert losses(precision="bf16", autocast_cache=False) == losses(precision="bf16") != plain
    assert losses(attention="sdpa_math") == pytest.approx(plain, rel=1e-4)


def test_a_trace_by_torch_profiler_needs_no_gpu(tiny, tmp_path):
    path = tmp_path / "trace.json.gz"
    found = run(tiny(torch_profile=str(path), nvtx="modules"))
    plain = run(tiny())
    assert [s.loss for s in found.steps] == pytest.approx([s.loss for s in plain.steps], rel=1e-5)
    read = trace.read(path)
    assert list(read.steps()) == ["step 0", "step 1"]  # the warm-up is not in it
    products = [k for k in read.kernels if k.kind == "matmul"]
    # Nine a block of two, and the head's; in two steps.
    assert [sum(k.phase == p for k in products) for p in ("forward", "backward")] == [38, 76]
    assert trace.coverage(read.kernels).no_class == 0


def test_compiled_as_one_graph(tiny, monkeypatch):
    """Asked for so; that the model is one has tests/model/test_modes.py."""
    asked = []
    monkeypatch.setattr(torch, "compile", lambda what, **options: asked.append(options) or what)
    run(tiny(compile=True, mode="forward-backward"))
    assert asked == 2 * [{"fullgraph": True, "dynamic": False}]  # the model, the loss


def test_compiled_blocks_are_one_graph_for_all(tiny, monkeypatch):
    from torch._dynamo.backends.debugging import aot_eager

    plain, graphs = torch.compile, []

    def backend(graph, inputs):
        graphs.append(graph)
        return aot_eager(graph, inputs)

    monkeypatch.setattr(torch, "compile", lambda m, **options: plain(m, backend=backend, **options))
    losses = [
        [step.loss for step in run(tiny(num_layers=4, compile_blocks=on)).steps]
        for on in (True, False)
    ]
    assert len(graphs) == 2  # a block, the loss
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


@pytest.mark.parametrize("mode", ["forward-backward", "train-step"])
def test_gradients_are_dropped_or_kept_and_zero_between_steps(tiny, built, mode):
    """Dropped, or every step but the first would add to what is there; or the same memory in every
    step, and each step's gradients its own."""
    seen = []

    def look(workload):
        def before(*_):
            there = workload.gradients()
            seen.append([(g.data_ptr(), g.abs().max().item()) for g in there] or None)

        workload.model.register_forward_pre_hook(before)

    built(look)
    losses = [
        [step.loss for step in run(tiny(mode=mode, keep_gradients=keep)).steps]
        for keep in (False, True)
    ]
    dropped, (first, *kept) = seen[: len(seen) // 2], seen[len(seen) // 2 :]
    assert not any(dropped) and first is None
    assert kept and all(one == kept[0] for one in kept)
    assert all(largest == 0 for _, largest in kept[0])
    assert losses[0] == losses[1]


def test_autocast_is_on_where_asked_and_off_in_backward(tiny, built):
    seen = []

    def note(what, tensor):
        seen.append((what, torch.is_autocast_enabled("cpu"), tensor.dtype))

    def forward(module, args, out):
        note("forward", out)
        out.register_hook(lambda gradient: note("backward", gradient))

    built(lambda workload: workload.model.register_forward_hook(forward))
    run(tiny(precision="bf16", warmup=0, steps=1))
    assert seen == [("forward", True, torch.bfloat16), ("backward", False, torch.bfloat16)]


def test_precision_of_fp32_products_is_put_back(tiny, built):
    seen = []
    built(lambda _: seen.append(torch.get_float32_matmul_precision()))
    torch.set_float32_matmul_precision("medium")
    try:
        run(tiny())
        assert (seen, torch.get_float32_matmul_precision()) == (["highest"], "medium")
    finally:
        torch.set_float32_matmul_precision("highest")


def fail_at(monkeypatch, number, error):
    """The call of AdamW's step with this number raises ``error``."""
    calls = []
    plain = torch.optim.AdamW.step

    def step(self, *args, **kwargs):
        calls.append(1)
        if len(calls) == number:
            # A copy: this function would keep the error, and so the frames it passed, alive.
            raise type(error)(*error.args)
        return plain(self, *args, **kwargs)

    monkeypatch.setattr(torch.optim.AdamW, "step", step)


OOM = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nMore advice.")


@pytest.mark.parametrize("number, where", [(1, "warmup 0"), (3, "step 1")])
def test_out_of_memory_is_a_result_and_keeps_nothing_alive(tiny, built, monkeypatch, number, where):
    models = []
    built(lambda workload: models.append(weakref.ref(workload.model)))
    fail_at(monkeypatch, number, OOM)
    result = run(tiny())
    assert result.status == "oom"
    assert result.note.startswith(f"in {where}, optimizer: ")
    assert "\n" not in result.note
    assert len(result.warmup) + len(result.steps) == number - 1
    assert f"oom: in {where}, optimizer" in result.table()
    assert set(result.as_dict()) == TOP
    assert run(tiny()).status == "ok"
    assert [model() for model in models] == [None, None]


def test_an_attention_that_cannot_run_is_a_result(tiny, monkeypatch):
    for name in ("sdpa_cudnn", "sdpa_efficient", "flex"):
        result = run(tiny(attention=name))
        assert (result.status, result.steps) == ("unsupported", [])
        assert result.note.startswith("in warmup 0, forward: ")
    fail_at(monkeypatch, 1, UnsupportedError("no such tile"))
    assert run(tiny()).status == "unsupported"


def test_interrupted_in_process(tiny, tiny_arguments, monkeypatch, capsys):
    fail_at(monkeypatch, 3, KeyboardInterrupt())
    config = tiny(steps=5)
    result = Result(config)
    with pytest.raises(KeyboardInterrupt):
        run(config, into=result)
    assert (result.status, result.note) == ("interrupted", "in step 1, optimizer")
    assert (len(result.warmup), len(result.steps)) == (1, 1)
    monkeypatch.undo()
    fail_at(monkeypatch, 3, KeyboardInterrupt())
    assert command.main(tiny_arguments("--json")) == 130
    found = json.loads(capsys.readouterr().out)
    assert (found["status"], len(found["steps"])) == ("interrupted", 1)


def test_json_of_the_command(tiny_arguments, capsys):
    assert command.main(tiny_arguments("--json", "--precision=bf16", "--attention=sdpa_math")) == 0
    out, err = capsys.readouterr()
    assert out.count("\n") == 1
    found = json.loads(out, parse_constant=pytest.fail)
    assert set(found) == TOP
    assert found["config"]["device"] == "cpu"
    assert (found["config"]["size"], found["config"]["d_ff"]) == (None, 12)
    assert (found["config"]["precision"], found["config"]["attention"]) == ("bf16", "sdpa_math")
    assert (found["status"], found["memory"]) == ("ok", {})
    assert {frozenset(step) for step in found["steps"] + found["warmup"]} == {frozenset(STEP)}
    assert {"python", "torch", "git"} <= set(found["versions"])
    assert "peak memory" not in err and "sdpa_math" in err and "backward" in err


def steps_of(*walls):
    return [StepTimes({"forward": w / 2}, {"forward": w / 4}, w / 2, w) for w in walls]


def test_a_summary_by_value_and_a_rate_of_its_mean(tiny, monkeypatch):
    monkeypatch.setattr(Result, "flops", 6 * 10**9)
    result = Result(tiny(mode="inference"), "cuda", "NVIDIA H200")
    result.steps, result.warmup = steps_of(1.0, 2.0, 6.0), steps_of(100.0)
    assert result.summary()["wall"] == Summary(3.0, pytest.approx(7**0.5), 2.0, 1.0, 6.0, 3)
    # 6e9 operations and 12 tokens in 3 ms.
    assert "2 TFLOP/s, 4,000 tokens/s by the mean wall time" in result.table().splitlines()
    result.steps = steps_of(1.0)
    assert result.summary()["wall"].std_ms is None and "forward" in result.table()


def test_out_of_memory_of_the_command(tiny_arguments, monkeypatch, capsys):
    """An embedding of 2 TiB, all that the process may have; were it not known beforehand."""
    monkeypatch.setattr(command.memory, "too_little", lambda *_: "")
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (2**41, hard))
    try:
        large = tiny_arguments("--vocab-size=4194304", "--d-model=131072", "--json")
        assert command.main(large) == 0
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    found = json.loads(capsys.readouterr().out)
    assert (found["status"], found["steps"]) == ("oom", [])
    assert found["note"].startswith("in building the model: ")


def test_the_order_of_everything(tiny, calls):
    options = {"mode": "inference", "nvtx": "phases", "cuda_profiler": True, "steps": 1}
    result = run(tiny(device="cuda", memory_history="x.pickle", **options))
    step = ["synchronize", "<{} 0", "<forward", "event", "forward", "event", ">", "synchronize"]
    step.append(">")
    build, end = ["record", "<build", "build", ">"], ["profiled", "snapshot", "recorded"]
    warmup, measured = ([call.format(name) for call in step] for name in ("warmup", "step"))
    warmup += ["reset_peak", "profile"]
    assert calls == [*build, *warmup, *measured, "synchronize", *end, "empty_cache"]
    assert (result.device, result.device_name) == ("cuda", "NVIDIA H200")
    peaks = {"peak_allocated_bytes": 300, "peak_reserved_bytes": 400}
    assert result.memory == {"before_bytes": 100, **peaks, "total_bytes": 1000}
    (found,) = result.steps
    assert (found.allocated_bytes, found.reserved_bytes) == (100, 200)
    assert {"cuda", "cudnn"} <= set(versions())


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("full"), KeyboardInterrupt()])
def test_whatever_ends_a_run_the_files_are_written(tiny, calls, monkeypatch, error):
    plain = workload.Workload.step

    def step(self, stopwatch, name):
        if name == "step 1":
            raise error
        return plain(self, stopwatch, name)

    monkeypatch.setattr(workload.Workload, "step", step)
    config = tiny(device="cuda", cuda_profiler=True, memory_history="x.pickle")
    if isinstance(error, KeyboardInterrupt):
        with pytest.raises(KeyboardInterrupt):
            run(config)
    else:
        result = run(config)
        assert (result.status, len(result.steps)) == ("oom", 1)
        assert result.memory["peak_allocated_bytes"] == 300
    assert calls[-4:] == ["profiled", "snapshot", "recorded", "empty_cache"]


def test_tf32_wants_the_hardware_and_is_set(tiny, calls, built, monkeypatch):
    seen, matmul = [], torch.backends.cuda.matmul
    built(lambda _: seen.append((torch.get_float32_matmul_precision(), matmul.allow_tf32)))
    for precision in ("tf32", "fp32"):
        run(tiny(device="cuda", precision=precision, mode="inference"))
    assert seen == [("high", True), ("highest", False)]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    line = "needs a GPU from Ampere on; allowed are fp32, bf16, bf16_weights"
    refused(line, check_here, tiny(device="cuda", precision="tf32"))
