"""Plant the usual bugs of the assignment in a copy of this library, and print the symptom of each.

    python dev/plant_bugs.py                    # all of them: some minutes on a CPU
    python dev/plant_bugs.py fsdp backward      # those whose group or name has one of these words

The page book/which-bug.md tells in words what this prints. Each check is the test of the assignment
rebuilt: same shapes, same models, two ranks by gloo. A bug is one or more replacements of text in a
file of the package; a replacement that no longer fits ends the run.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import traceback
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

PACKAGE = Path(__file__).resolve().parents[1] / "src" / "a2lib"
SECONDS = 100  # what runs longer hangs
RANKS = 2
TILED, KERNELS = "attention/tiled.py", "attention/kernels.py"
DDP, GROUP = "parallel/ddp.py", "parallel/group.py"
SHARDED, EXCHANGE = "parallel/sharded_optimizer.py", "parallel/exchange.py"
SHARDS, UNITS = "parallel/fsdp/shards.py", "parallel/fsdp/units.py"
TRANSFERS = "parallel/fsdp/transfers.py"
WRAPPER = "parallel/fsdp/wrapper.py"


@dataclass(frozen=True)
class Bug:
    """A mistake: the check that runs with it, and its edits, (file, text, replacement)."""

    check: str
    name: str
    edits: tuple[tuple[str, str, str], ...]

    def __str__(self) -> str:
        return f"{self.check}: {self.name}"


BROADCAST = "    for x in (*module.parameters(), *module.buffers()):\n        if x.numel():\n"
ALL_GATHER = "        copy_all(self._rows, self._masters)\n        if self._wholes:\n"
# By check: the name of each bug and its edits.
PLANTED = {
    "attention": {
        "nothing": [],
        "forward: scores are not scaled": [
            (TILED, ".transpose(-1, -2) * scale\n", ".transpose(-1, -2)\n")
        ],
        "forward: the accumulator is not rescaled when the maximum changes": [
            (TILED, "acc = acc * alpha[..., None] + p", "acc = acc + p")
        ],
        "forward: the sum of exponentials is not rescaled": [
            (TILED, "l_sum = l_sum * alpha + p.sum(-1)", "l_sum = l_sum + p.sum(-1)")
        ],
        "forward: no division by the sum at the end": [(TILED, "(acc / l_safe[..., None])", "acc")],
        "forward: the log-sum-exp is saved without the maximum": [
            (TILED, "= m + torch.log(l_safe)", "= torch.log(l_safe)")
        ],
        "forward: the log-sum-exp is saved in base 2": [
            (TILED, "= m + torch.log(l_safe)", "= (m + torch.log(l_safe)) * 1.4427")
        ],
        "causal: the mask hides the diagonal too": [
            (TILED, "masked_fill(j > i,", "masked_fill(j >= i,")
        ],
        "causal: the diagonal is hidden, and rows that see nothing are not guarded": [
            (TILED, "masked_fill(j > i,", "masked_fill(j >= i,"),
            (TILED, 'm_new.masked_fill(m_new == float("-inf"), 0.0)', "m_new"),
            (TILED, "l_sum.masked_fill(l_sum == 0, 1.0)", "l_sum"),
        ],
        "causal: the mask compares places within the tile": [
            (TILED, "cols.stop - 1 > rows.start", "True"),
            (TILED, "arange(rows.start, rows.stop,", "arange(0, rows.stop - rows.start,"),
            (TILED, "arange(cols.start, cols.stop,", "arange(0, cols.stop - cols.start,"),
        ],
        "causal: the backward forgets the mask": [
            (
                TILED,
                "_backward(do, q, k, v, o, lse, ctx.is_causal)",
                "_backward(do, q, k, v, o, lse, False)",
            ),
        ],
        "backward: D is left out": [
            (TILED, "p * (dp - delta[..., rows, None]) * scale", "p * dp * scale")
        ],
        "backward: the gradient of the scores is not scaled": [
            (
                TILED,
                "p * (dp - delta[..., rows, None]) * scale",
                "p * (dp - delta[..., rows, None])",
            )
        ],
        "backward: P is not transposed in dV": [
            (TILED, "p.transpose(-1, -2) @ do_rows", "p @ do_rows")
        ],
        "backward: dK and dV of the last query tile only": [
            (TILED, "dv[..., cols, :] += p", "dv[..., cols, :] = p"),
            (TILED, "dk[..., cols, :] += ds", "dk[..., cols, :] = ds"),
        ],
        "backward: dK and dV are returned in the wrong order": [
            (TILED, "dk.to(k.dtype), dv.to(v.dtype), None", "dv.to(k.dtype), dk.to(v.dtype), None")
        ],
        "backward: no None for is_causal": [(TILED, "dv.to(v.dtype), None", "dv.to(v.dtype)")],
    },
    "triton": {
        "nothing": [],
        "the offset of K's batch and head is left out": [
            (
                KERNELS,
                "K += b * stride_k[0] + (h // GROUP) * stride_k[1]\n"
                "    V += b * stride_v[0] + (h // GROUP) * stride_v[1]\n    O +=",
                "V += b * stride_v[0] + (h // GROUP) * stride_v[1]\n    O +=",
            )
        ],
        "exp2 of scores that are not in base 2": [
            (KERNELS, "exp2(s * (scale * LOG2E) - shift)", "exp2(s * scale - shift)")
        ],
        "keys beyond the end are not masked": [
            (
                KERNELS,
                "True)\n        if MASK:\n            offs_n = n0 + tl.arange(0, Bk)\n"
                "            visible = (offs_n < Nk)",
                "True)\n        if MASK:\n            offs_n = n0 + tl.arange(0, Bk)\n"
                "            visible = (offs_n >= 0)",
            )
        ],
        "the causal mask forgets where the query tile begins": [
            (
                KERNELS,
                "(m0 + tl.arange(0, Bq))[:, None])\n            s = tl.where",
                "(tl.arange(0, Bq))[:, None])\n            s = tl.where",
            )
        ],
    },
    "ddp": {
        "nothing": [],
        "weights of rank 0 are not broadcast": [
            (GROUP, BROADCAST, BROADCAST.replace("x.numel()", "False"))
        ],
        "gradients are summed, not averaged": [
            (GROUP, "dist.ReduceOp.AVG if group.size() > 1 else dist", "dist")
        ],
        "the optimizer steps before the all-reduces have ended": [
            (DDP, "in self.works:\n            work.wait()", "in self.works:\n            pass")
        ],
        "frozen parameters get a hook": [
            (
                DDP,
                "            if p.requires_grad:\n                self._n",
                "            if True:\n                self._n",
            )
        ],
        "the hook runs before the gradient is in .grad": [
            (DDP, "p.register_post_accumulate_grad_hook(", "p.register_hook(")
        ],
    },
    "bucketed": {
        "nothing": [],
        "the last bucket is never sent": [
            (DDP, "now.next < len(now.waits_for) and", "now.next < len(now.waits_for) - 1 and"),
            (DDP, "while now.next < len(self._buckets):", "while False:"),
        ],
        "counters are not set back for the next step": [
            (
                DDP,
                "        problem = self._average()\n        self._step = self._new_step()\n",
                "        first = not self._order_known\n        problem = self._average()\n"
                "        if first:\n            self._step = self._new_step()\n"
                "        self._step.forwards, self._step.accumulated = 0, False\n",
            ),
            (DDP, "        if i in now.arrived:", "        if False:"),
            (DDP, "        if replaced:", "        if False:"),
        ],
        "ranks send buckets in different orders": [
            (
                DDP,
                "range(len(self._trained))[::-1])",
                "range(len(self._trained))[:: 1 if self.rank else -1])",
            ),
            (DDP, "        if not self._order_known:", "        if False:"),
        ],
        "one rank leaves out its last all-reduce": [
            (
                DDP,
                "now.next < len(now.waits_for) and",
                "now.next < len(now.waits_for) - self.rank and",
            ),
            (DDP, "now.next < len(self._buckets):", "now.next < len(self._buckets) - self.rank:"),
        ],
    },
    "flat": {
        "nothing": [],
        "the averaged buffer is not copied back into the gradients": [
            (DDP, "grad.copy_(flat[begin", "(flat[begin")
        ],
    },
    "sharded": {
        "nothing": [],
        "weights are not exchanged after the step": [
            (SHARDED, "chunk.start(self._rank, self._group)", "pass"),
            (SHARDED, "chunk.finish()", "pass"),
        ],
        "each parameter is broadcast from the wrong rank": [
            (EXCHANGE, "rows[rank], group", "rows[1 - rank], group")
        ],
        "add_param_group works before the constructor is done": [
            (SHARDED, "        if self._local is None:", "        if False:")
        ],
        "learning rate and weight decay do not reach the inner optimizer": [
            (
                SHARDED,
                "optimizer_cls(own_groups, **kwargs)",
                "optimizer_cls([{'params': group['params']} for group in own_groups])",
            ),
            (SHARDED, "        _copy_settings(self.param_groups, self._local.param_groups)\n", ""),
        ],
    },
    "fsdp": {
        "nothing": [],
        "reduce-scatter sums, and nothing divides": [
            (GROUP, "mean_operator(wholes, group)", "dist.ReduceOp.SUM")
        ],
        "gradients of replicated parameters are not averaged": [
            (WRAPPER, "in self._mean([p.master.grad for p in same]):", "in ():")
        ],
        "freed weights are used in the backward without a gather": [
            (
                TRANSFERS,
                ALL_GATHER,
                "        if not hasattr(self, 'once'):\n"
                "            copy_all(self._rows, self._masters)\n"
                "        self.once = True\n        if self._wholes:\n",
            )
        ],
        "later steps gather the weights of the first step": [
            (
                TRANSFERS,
                ALL_GATHER,
                "        if not hasattr(self, 'once'):\n"
                "            self.once = [p.clone() for p in self._masters]\n"
                "        copy_all(self._rows, self.once)\n        if self._wholes:\n",
            )
        ],
        "a rank keeps the rows of the other rank": [
            (SHARDS, "min(self.rank * self.rows,", "min((1 - self.rank) * self.rows,")
        ],
        "the module keeps the gathered weights after the backward": [
            (
                UNITS,
                "        if self.shown == whole:\n            return\n",
                "        if self.shown == whole or (hasattr(self, 'once') and not whole):\n"
                "            return\n        if whole:\n            self.once = True\n",
            )
        ],
        "only rank 0 gathers the full weights": [
            (
                SHARDS,
                "        all_gather_single(buffer",
                "        self.rank or all_gather_single(buffer",
            )
        ],
    },
    "fsdp_half": {
        "nothing": [],
        "gradients stay in the compute dtype": [
            (
                TRANSFERS,
                "dtype, device = first.master.dtype,",
                "dtype, device = first.shown_dtype,",
            ),
        ],
    },
}
BUGS = [
    Bug(check, name, tuple(edits))
    for check, bugs in PLANTED.items()
    for name, edits in bugs.items()
]


# What is checked. Each check prints one line per finding.


def check_attention():
    from a2lib.attention import FlashAttentionPyTorch

    compare_attention(FlashAttentionPyTorch.apply, 128, 4)


def check_triton():
    from a2lib.attention import FlashAttentionTriton

    compare_attention(FlashAttentionTriton.apply, 128, 2, in_half)
    compare_attention(FlashAttentionTriton.apply, 100, 2, in_half)


def in_half(x):
    """Round to the numbers that 16 bits hold; the interpreter is quicker with them."""
    return x.half()


def compare_attention(attend, n, batch, cast=lambda x: x):
    """Compare output, log-sum-exp and gradients with the definition, as the assignment's tests."""
    for is_causal in (False, True):
        words = f"{n} tokens, {'causal' if is_causal else 'no mask'}"
        expected = attention_results(definition, n, batch, is_causal, cast)
        try:
            actual = attention_results(attend, n, batch, is_causal, cast)
        except Exception as error:
            print(f"{words}: {first_line(error)}")
            continue
        for name in expected:
            print(f"{words}: {name} {difference(actual[name].float(), expected[name].float())}")


def attention_results(attend, n, batch, is_causal, cast):
    torch.manual_seed(0)
    q, k, v, do = (cast(torch.randn(batch, n, 64)) for _ in range(4))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    o = attend(*leaves, is_causal)
    lse = getattr(o, "lse", None)
    if lse is None:
        [lse] = [x for x in o.grad_fn.saved_tensors if x.shape == (batch, n)]
    results = {"o": o.detach(), "log-sum-exp": lse.detach()}
    o.backward(do.to(o.dtype))
    return results | dict(zip(("dq", "dk", "dv"), (x.grad for x in leaves), strict=True))


def definition(q, k, v, is_causal):
    q, k, v = q.float(), k.float(), v.float()
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    if is_causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(later, -1e6)
    o = torch.softmax(scores, -1) @ v
    o.lse = torch.logsumexp(scores, -1)
    return o


def difference(actual, expected):
    """Say whether two tensors agree to 1e-2, and if not where and by how much they differ."""
    wrong = ~((actual - expected).abs() <= 1e-2 + 1e-2 * expected.abs())  # NaN is wrong
    if not wrong.any():
        return "right"
    batch, n = actual.shape[:2]
    rows = wrong.reshape(batch, n, -1).any(-1)
    kind = "NaN" if actual.isnan().any() else "wrong"
    size = float((actual - expected).norm() / expected.norm())
    factor = float((actual * expected).sum() / (expected * expected).sum())
    halves = [float(half.float().mean()) for half in rows.split(-(-n // 2), 1)]
    return (
        f"{kind}: error {size:.2g}, projection {factor:.3g}, wrong batches "
        f"{rows.any(1).nonzero().flatten().tolist()}, wrong rows in each half "
        f"{halves[0]:.0%} {halves[1]:.0%}, {int(rows.sum())} in all, first {first(rows)}"
    )


def first(rows):
    return int(rows.any(0).nonzero()[0])


def first_line(error):
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:160] if lines else ''}"


def on_ranks(work):
    """Run ``work(rank)`` on two ranks by gloo, and print what each says and how it ends."""
    folder = tempfile.mkdtemp()
    context = mp.start_processes(run_rank, (work, folder), RANKS, join=False, start_method="fork")
    try:
        while not context.join():
            pass
    except Exception:
        pass  # the ranks have said it
    for rank in range(RANKS):
        said = Path(folder, f"rank{rank}")
        print(said.read_text() if said.exists() else f"rank {rank}: says nothing", end="")


def run_rank(rank, work, folder):
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=RANKS)
    with open(Path(folder, f"rank{rank}"), "w", buffering=1) as out:

        def say(words):
            out.write(f"rank {rank}: {words}\n")

        try:
            work(rank, say)
            say("ends")
            dist.barrier()
        except Exception as error:
            say(first_line(error))
            if os.environ.get("PLANT_TRACE"):
                out.write(traceback.format_exc())
            raise


def check_ddp():
    from a2lib.parallel import DDP

    on_ranks(lambda rank, say: train_alike(DDP, rank, say))


def check_flat():
    from a2lib.parallel import FlatDDP

    on_ranks(lambda rank, say: train_alike(FlatDDP, rank, say))


def check_bucketed():
    from a2lib.parallel import BucketedDDP

    on_ranks(lambda rank, say: train_alike(lambda m: BucketedDDP(m, 0.0016), rank, say))


def toy_model(seed):
    """Return the handout's kind of model: a frozen bias, and a parameter that nothing uses."""
    torch.manual_seed(seed)
    layers = [nn.Linear(10, 10, bias=False), nn.ReLU(), nn.Linear(10, 50), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(50, 5, bias=False))
    model[2].bias.requires_grad = False
    model.fixed = nn.Parameter(torch.tensor([2.0, 2.0]), requires_grad=False)
    return model


def tied_model(seed):
    """Return a model of which two layers share a weight."""
    torch.manual_seed(seed)
    sizes = [(10, 10), (10, 50), (50, 10), (10, 50), (50, 5)]
    layers = [nn.Linear(*size, bias=False) for size in sizes]
    layers[3].weight = layers[1].weight
    parts = [part for layer in layers for part in (layer, nn.ReLU())]
    return nn.Sequential(*parts[:-1])


def train_alike(wrap, rank, say):
    """Train a wrapped model on halves of batches, and one model on the whole, and compare."""
    for words, make in (("toy", toy_model), ("tied", tied_model)):
        alone = make(rank)
        wrapped = wrap(deepcopy(alone))
        inner = wrapped.module
        compare_weights(f"{words}, wrapped", inner, make(0), say)
        alone.load_state_dict(make(0).state_dict())
        optimizers = [torch.optim.SGD(x.parameters(), lr=0.1) for x in (alone, inner)]
        torch.manual_seed(7)
        x, y = torch.randn(20, 10), torch.randn(20, 5)
        for step in range(3):
            for optimizer in optimizers:
                optimizer.zero_grad()
            torch.nn.functional.mse_loss(alone(x), y).backward()
            mine = slice(rank * 10, rank * 10 + 10)
            torch.nn.functional.mse_loss(wrapped(x[mine]), y[mine]).backward()
            wrapped.finish_gradient_synchronization()
            for optimizer in optimizers:
                optimizer.step()
            compare_weights(f"{words}, step {step}", inner, alone, say)
            order = torch.randperm(20)
            x, y = x[order], y[order]


def compare_weights(words, actual, expected, say):
    """Say which weights differ by more than the tests allow, and by how much."""
    wrong = []
    for (name, a), b in zip(actual.named_parameters(), expected.parameters(), strict=True):
        if a.shape != b.shape:
            wrong.append(f"{name} has shape {tuple(a.shape)}")
        elif not torch.allclose(a, b, rtol=1e-5, atol=1e-6):
            wrong.append(f"{name} by {float((a - b).abs().max() / b.abs().max()):.2g}")
    say(f"{words}: {'right' if not wrong else 'wrong ' + ', '.join(wrong)}")


def check_sharded():
    on_ranks(train_sharded)


def train_sharded(rank, say):
    from a2lib.parallel import ShardedOptimizer

    settings = {"lr": 0.1, "weight_decay": 0.1, "betas": (0.9, 0.999), "eps": 1e-8}
    for words, make in (("toy", toy_model), ("tied", tied_model)):
        alone, sharded = make(42), make(42)
        optimizers = [
            torch.optim.AdamW(alone.parameters(), **settings),
            ShardedOptimizer(sharded.parameters(), torch.optim.AdamW, **settings),
        ]
        for step in range(10):
            x, y = torch.rand(32, 10), torch.rand(32, 5)
            for model, optimizer in zip((alone, sharded), optimizers, strict=True):
                optimizer.zero_grad()
                ((y - model(x)) ** 2).sum().backward()
                optimizer.step()
            if step in (0, 9):
                compare_weights(f"{words}, step {step}", sharded, alone, say)
        held = sum(x.numel() for s in optimizers[1].state.values() for x in s.values() if x.dim())
        say(f"{words}: {held} numbers of state on this rank")


def check_fsdp():
    on_ranks(lambda rank, say: train_fsdp(rank, say, None))


def check_fsdp_half():
    on_ranks(lambda rank, say: train_fsdp(rank, say, torch.float16))


def embedding_model(seed):
    """Return the handout's kind of model for FSDP: embedding, norms and linear layers."""
    from a2lib.model import Embedding, Linear, RMSNorm

    torch.manual_seed(seed)
    return nn.Sequential(
        Embedding(100, 64), RMSNorm(64), Linear(64, 128), nn.ReLU(), RMSNorm(128),
        Linear(128, 64), Linear(64, 100),
    )  # fmt: skip


def train_fsdp(rank, say, compute_dtype):
    """Compare weights with those of one process, and check gradients, after each step of FSDP."""
    from a2lib.parallel import FSDP

    alone = embedding_model(42)
    fsdp = FSDP(embedding_model(42), compute_dtype=compute_dtype)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.01) for m in (alone, fsdp)]
    torch.manual_seed(123)
    tokens, labels = torch.randint(0, 100, (20, 8)), torch.randint(0, 100, (20,))
    entropy = torch.nn.functional.cross_entropy
    for step in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        entropy(alone(tokens)[:, -1].float(), labels).backward()
        mine = slice(rank * 10, rank * 10 + 10)
        entropy(fsdp(tokens[mine])[:, -1].float(), labels[mine]).backward()
        fsdp.finish_gradient_synchronization()
        compare_gradients(f"step {step}", fsdp, say)
        for optimizer in optimizers:
            optimizer.step()
        compare_gathered(f"step {step}", fsdp, alone, say, compute_dtype)


def compare_gradients(words, fsdp, say):
    """Say of which parameter the gradient is missing, of another shape or dtype, or another on each
    rank though the parameter is replicated."""
    wrong = []
    for name, p in fsdp.module.named_parameters():
        if p.grad is None:
            wrong.append(f"{name} has none")
        elif p.grad.shape != p.shape or p.grad.dtype != p.dtype:
            wrong.append(f"{name} is {tuple(p.grad.shape)} {p.grad.dtype}, not {tuple(p.shape)}")
        elif p.dim() < 2:
            both = [torch.zeros_like(p.grad) for _ in range(RANKS)]
            dist.all_gather(both, p.grad)
            if not torch.allclose(*both, rtol=1e-4, atol=1e-6):
                wrong.append(f"{name} differs between ranks")
    say(f"{words}, gradients: {'right' if not wrong else 'wrong ' + ', '.join(wrong)}")


def compare_gathered(words, fsdp, alone, say, compute_dtype):
    full, wrong = fsdp.gather_full_params(), []
    bound = {"rtol": 1e-4, "atol": 1e-3 if compute_dtype else 1e-6}
    for name, p in alone.named_parameters():
        if not torch.allclose(full[name], p.detach(), **bound):
            size = float((full[name] - p).norm() / p.norm())
            wrong.append(f"{name} by {size:.2g}")
    say(f"{words}, weights: {'right' if not wrong else 'wrong ' + ', '.join(wrong)}")


# The runs.


def edited(planted: Bug) -> dict[str, str]:
    """Return the files of the package that a bug changes, as it changes them."""
    sources: dict[str, str] = {}
    for file, text, replacement in planted.edits:
        source = sources.get(file) or (PACKAGE / file).read_text(encoding="utf-8")
        if source.count(text) != 1:
            raise SystemExit(f"{planted}: not once in {file}: {text!r}")
        sources[file] = source.replace(text, replacement)
    return sources


def run(planted: Bug) -> str:
    """Run a check on a copy of the package with the bug in it; return what it prints."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, "a2lib")
        shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
        for file, source in edited(planted).items():
            (copy / file).write_text(source, encoding="utf-8")
        env = {**os.environ, "PYTHONPATH": folder, "CUDA_VISIBLE_DEVICES": ""}
        env["PYTHONWARNINGS"] = "ignore"
        if planted.check == "triton":
            env["TRITON_INTERPRET"] = "1"
        command = [sys.executable, __file__, "--check", planted.check]
        return run_in_time(command, env)


def run_in_time(command, env):
    """Return the output of a command, or that it hangs; its process group ends with it."""
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen(command, env=env, start_new_session=True, **streams)
    try:
        return process.communicate(timeout=SECONDS)[0]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        return process.communicate()[0] + f"hangs: nothing for {SECONDS} s\n"


def main():
    words = sys.argv[1:]
    if words[:1] == ["--check"]:
        globals()[f"check_{words[1]}"]()
        return
    for planted in BUGS:
        if not words or any(word in str(planted) for word in words):
            print(f"== {planted}\n{run(planted)}", flush=True)


if __name__ == "__main__":
    main()
