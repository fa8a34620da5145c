"""notebooks/ddp.ipynb: what it asks for, what its ranks measure, and what they refuse.

The wrappers themselves are checked in ranks: tests/parallel/checks_ddp.py.
"""

from operator import itemgetter

import pytest
from forked import STEPS
from notebook_cells import identities, load_cells, published, rows_of_two_ranks
from tables import by, values

from a2lib.lab import bulk

SWEEPS = ("essential", "xl25", "2.7B", "plain-xl25", "plain-2.7B", "all", "peers", "fair")
OURS = ["naive", "flat", "overlapped", "bucketed", "updating"]
OF_RANKS = ("ms_rank_min", "ms_rank_median", "ms_rank_max")
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


def asked_by(**parameters):
    """Return the keys that a run asks for, each once."""
    cells = load_cells("ddp", **parameters)
    return identities(cells.table, cells.tasks)


@pytest.mark.parametrize("name", SWEEPS)
def test_a_sweep_asks_for_each_row_once(gpus, name):
    gpus(2)
    assert asked_by(sweep=name)


def test_the_sweeps_and_the_default_ask_for_every_published_row(gpus):
    gpus(2)
    whole = asked_by(sweep="all")
    others = asked_by() | asked_by(sweep="peers") | asked_by(sweep="fair")
    assert published(load_cells("ddp").table) <= whole | others
    assert asked_by(sweep="essential") <= whole


def test_what_the_parameters_name(gpus):
    gpus(0)
    [task] = load_cells("ddp").tasks
    assert values(task, "wrapper") == OURS
    assert set(values(task, "model", "backend", "precision")) == {("tiny", "gloo", "fp32")}
    [task] = load_cells("ddp", wrappers="flat,torch_ddp", batch=3).tasks
    assert values(task, "wrapper", "bucket_mb", "batch") == [("flat", 0, 3), ("torch_ddp", 25, 3)]


def test_weights_of_16_bits_and_an_option_that_gloo_lacks(gpus):
    """One GPU's update beside its backward is in turns where a step is captured."""
    gpus(0)
    named = "bucketed,updating,bucketed_max_ctas_8,torch_ddp_zero_cta"
    options = {"precision": "bf16_weights", "sent_dtype": "bf16", "context": 8}
    cells = load_cells("ddp", wrappers=named, **options)
    rows = by(rows_of_two_ranks(cells.table, cells.tasks, cells.measure), "wrapper")
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
    [task] = cells.tasks
    ways = [cells.way("mine"), cells.way("sums"), cells.way("nothing")]
    ways += [cells.way("bucketed", 100, "copy_engines"), cells.way("torch_ddp", 25)]
    of_the_readers = [{**task[0], **way} for way in ways]
    rows = rows_of_two_ranks(cells.table, [task + of_the_readers], cells.measure)
    rows = by(rows, "wrapper", "carrier")
    for name in ("sums", "nothing"):
        assert rows[name, "backend"]["status"] == "error"
    assert "off their mean by 1" in rows["sums", "backend"]["note"]
    assert rows["bucketed", "copy_engines"]["status"] == "unsupported"
    for name in (*OURS, "mine", "torch_ddp"):
        row = rows[name, "backend"]
        assert row["status"] == "ok", row
        least, middle, most = map(float, itemgetter(*OF_RANKS)(row))
        assert 0 < least <= middle <= most
        assert float(row["ms"]) > 0 and int(row["n"]) == STEPS and int(row["sent_bytes"]) > 0
        assert row["conditions"].endswith("cores")
        # PyTorch's cannot send without a backward; the reader's has no step without messages.
        assert bool(row["ms_communication"]) is (name in OURS)
        assert bool(row["ms_without"]) is (name != "mine")
    assert set(bulk.pictures("strip")) == {
        ("cpu", "ddp-tiny-naive-2-ranks"),
        ("cpu", "ddp-tiny-overlapped-2-ranks"),
        ("cpu", "ddp-tiny-bucketed-100-MB-2-ranks"),
    }
    picture = bulk.read("strip", "cpu", "ddp-tiny-bucketed-100-MB-2-ranks")
    assert picture.run == rows["bucketed", "backend"]["run"]
    assert (picture.about["section"], picture.about["wrapper"]) == ("ddp", "bucketed")
    assert "backward" in values(picture.rows, "phase")
