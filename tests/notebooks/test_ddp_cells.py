"""notebooks/ddp.ipynb: what it asks for, what its ranks measure, and what they refuse.

The wrappers themselves are checked in ranks: tests/parallel/checks_ddp.py.
"""

import committed
import pytest
from forked import STEPS
from notebook_cells import load_cells

from a2lib.lab import ParameterError, bulk, read_section, sweep, trace
from a2lib.lab.notebook import Run
from a2lib.lab.trace import Kernel

SWEEPS = ("essential", "xl25", "2.7B", "plain-xl25", "plain-2.7B", "all", "peers", "fair")
OURS = ["naive", "flat", "overlapped", "bucketed", "updating"]
# The wrapper of a reader who has followed the handout, and one of whom forgets to divide.
OF_A_READER = """
import torch.distributed as dist

class MyDDP(torch.nn.Module):
    def __init__(self, model, divisor):
        super().__init__()
        self.model, self.divisor = model, divisor

    def forward(self, tokens):
        return self.model(tokens)

    def finish_gradient_synchronization(self):
        for p in self.model.parameters():
            dist.all_reduce(p.grad)
            p.grad /= self.divisor

MAKE["mine"] = lambda model: MyDDP(model, dist.get_world_size())
MAKE["sums"] = lambda model: MyDDP(model, 1)
MAKE["nothing"] = lambda model: model
"""


pytestmark = pytest.mark.usefixtures("forked_workers")


def keys(cells):
    return [cells.table.identify(key) for task in cells.tasks for key in task]


@pytest.mark.parametrize("name", SWEEPS)
def test_a_sweep_asks_for_each_row_once(gpus, name):
    gpus(2)
    asked = keys(load_cells("ddp", sweep=name))
    assert len(asked) == len(set(asked))


def test_the_sweeps_and_the_default_ask_for_every_published_row(gpus):
    gpus(2)
    cells = load_cells("ddp", sweep="all")
    published = {cells.table.identify(row) for row in committed.measured("ddp")}
    asked = {*keys(cells), *keys(load_cells("ddp"))}
    for name in ("peers", "fair"):
        asked.update(keys(load_cells("ddp", sweep=name)))
    assert published and published <= asked
    assert set(keys(load_cells("ddp", sweep="essential"))) <= set(keys(cells))


def test_what_the_parameters_name(gpus):
    gpus(0)
    [task] = load_cells("ddp").tasks
    assert [key["wrapper"] for key in task] == OURS
    assert {(key["model"], key["backend"], key["precision"]) for key in task} == {
        ("tiny", "gloo", "fp32")
    }
    [task] = load_cells("ddp", wrappers="flat,torch_ddp", batch=3).tasks
    assert [(key["wrapper"], key["bucket_mb"], key["batch"]) for key in task] == [
        ("flat", 0, 3),
        ("torch_ddp", 25, 3),
    ]


def test_products_leave_multiprocessors_in_a_graph_alone(gpus):
    """Launched, the step beside it would leave them too."""
    gpus(2)
    [task] = load_cells("ddp", capture=True, wrappers="bucketed_carveout_16").tasks
    assert [key["wrapper"] for key in task] == ["bucketed_carveout_16"]
    with pytest.raises(ParameterError, match="bucketed_carveout_16"):
        load_cells("ddp", wrappers="bucketed_carveout_16")


def test_what_leaves_multiprocessors_is_a_way_of_its_own(gpus):
    gpus(2)
    cells = load_cells("ddp", sweep="peers")
    assert set(cells.NCCL_OPTIONS) < set(cells.MAKE_BUCKETED)
    assert {key["wrapper"] for task in cells.tasks for key in task} == {
        "bucketed",
        "torch_ddp",
        *cells.NCCL_OPTIONS,
    }
    assert all(cells.NCCL_OPTIONS[name] == {"max_ctas": 16} for name in cells.SMS_LEFT)


def test_weights_of_16_bits_and_an_option_that_gloo_lacks(gpus):
    """One GPU's update beside its backward is in turns where a step is captured."""
    gpus(0)
    named = "bucketed,updating,bucketed_max_ctas_8,torch_ddp_zero_cta"
    options = {"precision": "bf16_weights", "sent_dtype": "bf16", "context": 8}
    cells = load_cells("ddp", wrappers=named, **options)
    run = Run("ddp", {}, {}, "cpu", "cpu")
    assert sweep(cells.table, cells.tasks, cells.measure, run, ranks=2, device="cpu") == 0
    rows = {row["wrapper"]: row for row in read_section("ddp")["cpu"]}
    for name in ("bucketed", "updating"):
        assert (rows[name]["status"], rows[name]["precision"]) == ("ok", "bf16_weights"), rows[name]
        assert float(rows[name]["ms"]) > 0 and float(rows[name]["ms_without"]) > 0
    for name, option in (("bucketed_max_ctas_8", "max_ctas"), ("torch_ddp_zero_cta", "cta_policy")):
        assert (rows[name]["status"], rows[name]["ms"]) == ("unsupported", "")
        assert rows[name]["note"] == f"{option}: an option of NCCL, and these ranks send by gloo"


@pytest.mark.slow
def test_rows_of_two_ranks_with_wrappers_of_the_readers_own(gpus, tmp_path):
    gpus(0)
    cells = load_cells("ddp", context=8, bucket_mb=100)
    exec(OF_A_READER, cells.namespace)
    [first, *_] = cells.tasks[0]
    ways = [cells.way(name) for name in ("mine", "sums", "nothing")]
    ways += [cells.way("bucketed", 100, "copy_engines"), cells.way("torch_ddp", 25)]
    tasks = [[*cells.tasks[0], *({**first, **way} for way in ways)]]
    run = Run("ddp", {}, {}, "cpu", "cpu")
    assert sweep(cells.table, tasks, cells.measure, run, ranks=2, device="cpu") == 0
    rows = {(row["wrapper"], row["carrier"]): row for row in read_section("ddp")["cpu"]}
    assert {name for name, row in rows.items() if row["status"] != "ok"} == {
        ("sums", "backend"),
        ("nothing", "backend"),
        ("bucketed", "copy_engines"),
    }
    assert "off their mean by 1" in rows["sums", "backend"]["note"]
    assert rows["bucketed", "copy_engines"]["status"] == "unsupported"
    for name in (*OURS, "mine", "torch_ddp"):
        row = rows[name, "backend"]
        of_ranks = [float(row[f"ms_rank_{part}"]) for part in ("min", "median", "max")]
        assert of_ranks == sorted(of_ranks) and of_ranks[0] > 0
        assert float(row["ms"]) > 0 and int(row["n"]) == STEPS and int(row["sent_bytes"]) > 0
        assert row["conditions"].endswith("cores")
        # PyTorch's cannot send without a backward; the reader's has no step without messages.
        assert bool(row["ms_communication"]) is (name in OURS)
        assert bool(row["ms_without"]) is (name != "mine")
    drawn = {f"ddp-tiny-{way}-2-ranks" for way in ("naive", "overlapped", "bucketed-100-MB")}
    assert set(bulk.pictures("strip")) == {("cpu", name) for name in drawn}
    picture = bulk.read("strip", "cpu", "ddp-tiny-bucketed-100-MB-2-ranks")
    assert picture.run == rows["bucketed", "backend"]["run"]
    assert (picture.about["section"], picture.about["wrapper"]) == ("ddp", "bucketed")
    assert "backward" in {row["phase"] for row in picture.rows}


def test_the_window_of_a_replay_ends_backward_with_its_last_product(gpus):
    """20 ms of products, an all-reduce until 24, the optimizer from there to 60."""
    gpus(0)
    ms = 1_000_000
    kernels = [
        Kernel("nvjet_tst", "7", 0, 20 * ms),
        Kernel("ncclDevKernel_AllReduce", "9", 18 * ms, 24 * ms),
        Kernel("multi_tensor_apply_kernel<FusedAdam>", "7", 24 * ms, 60 * ms),
    ]
    replay = trace.Trace("torch", kernels, [])
    rows = load_cells("ddp").around_end_of_backward(replay, captured=True)
    assert [(row["kind"], row["start_us"], row["duration_us"]) for row in rows] == [
        ("matmul", 0, 15_000),
        ("communication", 13_000, 6_000),
        ("optimizer", 19_000, 11_000),
    ]
