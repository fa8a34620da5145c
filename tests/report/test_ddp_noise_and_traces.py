"""What the chapter on data parallelism makes of spreads that overlap, and reads from its traces and
from what others published."""

import pytest

from a2lib.report.chapters.ddp import (
    Ddp,
    answer,
    buckets,
    host,
    losses,
    published,
    targets,
    timeline,
    ways,
)

ROW = {
    "wrapper": "bucketed", "bucket_mb": 100, "carrier": "backend", "sent_dtype": "fp32",
    "model": "xl25", "batch": 4, "context": 512, "precision": "bf16", "attention": "flash",
    "compile": "blocks", "capture": "true", "backend": "nccl", "world_size": 2, "ms": 88, "n": 20,
    "ms_without": 80, "conditions": "", "note": "",
}  # fmt: skip


def noisy(ms, wrapper, bucket_mb=0, *, without, by=10, **over):
    """A launched row whose spreads are ``by`` ms on either side, half of it with nothing sent."""
    return ROW | {
        "wrapper": wrapper, "bucket_mb": bucket_mb, "capture": "false", "ms": ms, "ms_p20": ms - by,
        "ms_p80": ms + by, "ms_without": without, "ms_without_p20": without - by / 2,
        "ms_without_p80": without + by / 2, "ms_communication": 40, "ms_backward_without": 50,
        "ms_host": 90, "ms_rank_min": ms, "ms_rank_median": ms, "ms_rank_max": ms, **over,
    }  # fmt: skip


def collective(mb, ms):
    return {"operation": "all_reduce", "backend": "nccl", "world_size": 2, "dtype": "fp32",
            "size": mb * 2**20, "ms": ms, "n": 9, "ms_queued": ms, "note": ""}  # fmt: skip


SENT = [collective(mb, 0.04 + mb / 240) for mb in (1, 10, 100, 1024)]
TIMES = {
    *("wrapper", "bucket_mb", "carrier", "model", "batch", "context", "precision", "attention"),
    *("compile", "capture", "backend", "world_size", "ms", "ms_p20", "ms_p80", "n", "ms_without"),
    *("ms_without_p20", "ms_without_p80", "conditions", "note"),
}
CLEAR = noisy(140, "bucketed", 100, without=100, by=2)


@pytest.fixture
def made(synthetic, tmp_path):
    def make(rows=(ROW,), **sections):
        return Ddp([synthetic.by_hand(tmp_path, ddp=list(rows), **sections)])

    return make


@pytest.fixture
def empty(tmp_path):
    return Ddp([tmp_path])


def test_what_is_within_the_spreads_is_told_and_nothing_follows_from_it(made):
    """Beside 1000 MB the host was slow: 118 ms with messages and without."""
    each, large = noisy(112, "overlapped", without=100), noisy(118, "bucketed", 1000, without=118)
    c = made([noisy(110, "naive", without=98), each, CLEAR, large])
    found = {line[0]: line[1:] for line in ways.frame(c.of("xl25", False)).values.tolist()}
    assert found["each"] == [
        "112", "102 to 122", "100", "95.0 to 105", "12.0, level", "40.0", "·", "90.0",
        "112 / 112 / 112",
    ]  # fmt: skip
    assert found["1000 MB"][4:7] == ["0, level", "40.0", "·"]
    assert found["100 MB"][4:7] == ["40.0", "40.0", "0%"]
    assert "is spent communicating, though the spreads overlap. The" in str(answer.naive(c))
    assert str(answer.overlap(c)).endswith(
        "what they add to the step (12.0 ms by the medians) is within the spreads. The steps are "
        "level, by their medians or their spreads."
    )
    assert "nearly all of each" not in str(answer.sentence(c))
    near = [noisy(96, "naive", without=90), noisy(99, "flat", without=91)]
    said = str(answer.sentence(made(near)))
    assert "do not tell apart: nearly all of each is the host's time to issue it." in said
    said = str(answer.buckets(c))
    assert "buckets add 40.0 ms with 100 MB and 0 ms with 1000 MB (level), and one" in said
    assert (
        "The step without communication took 118 ms beside 1000 MB, but 98.0 ms beside the way "
        "where it took least. The host was slower then"
    ) in said
    # The hosts of 435 messages and of 8 differ by 10 ms, steps that send nothing by 118 less 100.
    assert "is less than the 18.0 ms by which the step without communication differs" in str(
        host.sentence(made([each | {"ms_host": 100}, large]))
    )
    said = str(host.baseline(c))
    assert "In 3 of 4 ways the step and the same without communication are *level*" in said


def test_a_bucket_without_a_point_has_its_spread(made):
    c = made([noisy(118, "bucketed", 1000, without=118), CLEAR], collectives=SENT)
    (ax,) = buckets.figure(c).figure.axes
    ours = [line for line in ax.lines if line.get_color() == buckets.LOOKS["launched"].colour]
    points, *spreads = sorted(ours, key=lambda line: line.get_marker() == "None")
    assert list(points.get_xdata()) == [100]
    # 138 less 101 and 142 less 99; below nothing and 128 less 113.
    ends = {tuple(line.get_xdata()): tuple(line.get_ydata()) for line in spreads}
    assert ends == {(100, 100): (37, 43), (1000, 1000): (buckets.LEAST_MS, 15)}
    assert "1000 MB: " in str(buckets.verdict(c)) and "and 0 ms (level)." in str(buckets.verdict(c))


def test_a_ratio_to_pytorch_is_told_with_its_spread_and_over_what_each_sends_nothing_with(made):
    near = made([noisy(96, "flat", without=90), noisy(110, "torch_ddp", 25, without=108)])
    said = str(targets.sentence(near))
    # 86 over 120 to 106 over 100; 96 / 90 over 110 / 108.
    assert "takes 0.873 of PyTorch's step (0.717 to 1.060 by their spreads, which overlap)" in said
    assert "each over its own, ours takes 1.047." in said


def test_the_same_step_of_the_next_chapter_is_told(made):
    """There the fastest of ours is one by copy engines; a divided optimizer's is left out."""
    other = {k: v for k, v in noisy(100, "bucketed", 100, without=80, by=4).items() if k in TIMES}
    rows = [
        other | {"optimizer": "plain", "ms": 103},
        other | {"optimizer": "plain", "carrier": "copy_engines"},
        other | {"optimizer": "sharded", "ms": 97},
        other | {"optimizer": "plain", "wrapper": "torch_ddp", "bucket_mb": 25, "ms": 125,
                 "ms_p20": 124, "ms_p80": 128},
    ]  # fmt: skip
    launched = [noisy(96, "flat", without=90), noisy(110, "torch_ddp", 25, without=108)]
    assert made(launched).best_elsewhere() is None
    c = made(launched, sharded_optimizer=rows)
    assert str(targets.sentence(c)).endswith(
        "has the same step of another run: 100 ms (96.0 to 104; during backward, buckets of 100 "
        "MB, by copy engines) where PyTorch's takes 125 (124 to 128), 0.800 of it, with 80.0 and "
        "80.0 ms without communication."
    )
    (found,) = [t for t in targets.ratios(c) if t.against == targets.ELSEWHERE]
    # 96 over 128, 104 over 124.
    assert found.ratio == 0.8 and found.spread == (0.75, 104 / 124) and found.verdict == "above"


def test_what_runs_beside_what_is_read_from_the_strip(made, strips, tmp_path, empty):
    assert timeline.overlap_us(strips.STRIP) == (7000, 3000) and timeline.overlap_us([]) == (0, 0)
    assert "Not measured yet" in str(timeline.sentence(empty))
    made()
    strips.put(tmp_path, "naive")
    c = Ddp([tmp_path])
    # All of backward's 20 ms but those from 9 to 12.
    assert str(timeline.sentence(c)).startswith(
        "In the windows drawn, other kernels run beside the messages for 3.00 of 7.00 ms (43%) "
        "where they are sent after backward. Until backward ends the GPU of the launched steps, in "
        "that order, is idle for 15% of the time"
    )
    assert "From the last of them" not in str(timeline.sentence(c))
    update = [strips.piece(21000, 22000, "copy", "7"), strips.piece(25000, 26000, "optimizer", "7")]
    update = [one | {"phase": "optimizer"} for one in update]
    # From 20 to 25 ms but for one.
    assert timeline.waited_us([*strips.STRIP, *update]) == 4000
    assert timeline.waited_us(strips.STRIP) is None
    strips.put(tmp_path, "naive", rows=[*strips.STRIP, *update])
    quick = [strips.piece(0, 5000, "matmul", "7"), strips.piece(5050, 6000, "optimizer", "7"),
             strips.piece(1000, 2000, "communication", "20")]  # fmt: skip
    quick[1]["phase"] = "optimizer"
    strips.put(tmp_path, "bucketed", 100, rows=quick)
    assert (
        "idle once more, 4.00 ms where they are sent after backward and not where they are sent in "
        "buckets of 100 MB: the host"
    ) in str(timeline.sentence(Ddp([tmp_path])))
    assert "communication" in timeline.figure(c, "naive")._repr_svg_()
    assert "not measured yet" in timeline.figure(c, "overlapped")._repr_svg_()


def test_what_backward_loses_to_messages_is_read_from_two_traces(made, strips, tmp_path, empty):
    """A product of 100 us takes 200 beside a message and a fused kernel 60 in place of 50: 110 us
    of each block; 40 us after the last of them the update begins, of which a message takes 30."""
    assert losses.lost(empty) is None and "Not measured yet" in str(losses.sentence(empty))
    made()
    strips.put(tmp_path, "bucketed", 100, True, rows=strips.replay())
    strips.put(tmp_path, "naive", rows=strips.blocks()[0])
    c = Ddp([tmp_path])
    lost = losses.lost(c)
    assert (lost.alone_us, lost.beside_us, lost.tail_us) == (300, 410, 40)
    assert (lost.products, lost.others, lost.without) == ([2.0], 1.2, 1.0)
    # 48 blocks.
    assert lost.ms(48) == pytest.approx(48 * 0.110 + 0.040)
    assert str(losses.sentence(c)).startswith(
        "Why NCCL's are not free is in the trace of the replay, held against the one that sends "
        "after backward. With a message beside it a product takes 2.0 times as long as there, "
        "other kernels 1.2 times, and without one 1.00 times."
    )
    assert str(losses.sentence(c)).endswith(
        "over 48 blocks 5.28 ms. Between the last product and the update the last messages are "
        "alone for 0.0400 ms. That makes 5.32 ms; NCCL in fp32 adds 8.00."
    )
    # What else runs behind the last product is no message alone, nor what comes behind those.
    end = 4 * 410
    behind = [strips.piece(end, end + 5, "embedding", "7"),
              strips.piece(end + 35, end + 36, "copy", "9")]  # fmt: skip
    strips.put(tmp_path, "bucketed", 100, True, rows=[*strips.replay(), *behind])
    assert losses.lost(Ddp([tmp_path])).tail_us == 34
    assert losses.lost(c, **ENGINES) is None
    strips.put(tmp_path, "bucketed", 100, True, **ENGINES, rows=strips.replay())
    c = made([ROW, ROW | ENGINES | {"ms": 87}])
    assert losses.lost(c, **ENGINES).beside_us == 410
    assert str(losses.sentence(c)).endswith(
        "a product takes 2.00 times as long, other kernels 1.20 times, and without a message 1.00 "
        "times: 410 µs a block, 5.28 ms in all. With 0.0400 ms of messages alone at the end these "
        "are 5.32 of the 7.00 ms that they add."
    )
    strips.put(tmp_path, "naive")  # no block of these
    assert losses.lost(Ddp([tmp_path])) is None


def captured(ms, **over):
    return ROW | {"ms": ms, "ms_p20": ms - 1, "ms_p80": ms + 1, **over}


ENGINES, LOW = {"carrier": "copy_engines"}, {"sent_dtype": "bf16"}
CARRIED = [captured(88), captured(82, **ENGINES), captured(85, **ENGINES, **LOW)]


def test_what_copy_engines_move_in_memory(made):
    """Of 7.99 GB half is read and written to the other GPU, three halves are summed, and half is
    written once more."""
    said = str(losses.carriers(made(CARRIED)))
    assert "28.0 GB read and written in each GPU's memory (32.0 GB where gradients are" in said
    assert "That is 5.83 ms of the memory's time at 4.8 TB/s, which" in said
    assert "which is our guess for most of the 2.00 ms. Sent" in said


def test_what_half_of_the_bytes_are_worth(made):
    """85 ms in place of 82; beside the messages 84.8 in place of 80.8."""
    assert str(losses.carriers(made(CARRIED))).endswith(
        "Sent in bf16 the step of copy engines takes 3.00 ms longer. The link has 8.88 ms less to "
        "do, but was not what the step waits for, and the memory has 0.833 ms more. Casts are "
        "kernels, beside backward: with the sum they move 24.0 GB in place of 12.0 and take "
        "multiprocessors, which copies do not. That this is the rest is our reading; no trace of "
        "it is taken."
    )
    assert "NCCL gains nothing" not in str(losses.carriers(made([*CARRIED, captured(86, **LOW)])))
    # 12 bytes of each of 2 billion parameters.
    said = str(losses.carriers(made([*CARRIED, captured(92, **LOW)])))
    assert "kernels that nothing hides, of 24.0 GB, 5.00 ms at 4.8 TB/s. Copy engines" in said
    beside = [captured(80.8, wrapper="updating", **ENGINES),
              captured(84.8, wrapper="updating", **ENGINES, **LOW)]  # fmt: skip
    said = str(losses.carriers(made([*CARRIED, *beside])))
    assert "takes 3.00 ms longer, with the update beside the messages 4.00 ms longer. The" in said
    low = captured(80, ms_p80=81.5, **ENGINES, **LOW)
    assert str(losses.carriers(made([*CARRIED[:-1], low]))).endswith(
        "Sent in bf16 the step of copy engines takes 2.00 ms less (level). The link has 8.88 ms "
        "less to do."
    )


def test_what_is_added_to_a_larger_model_is_held_against_its_bytes(made, empty):
    """88 and 82 of 80 ms, and 92 and 86; of the messages alone 8 of 40 ms and 12 of 48."""
    large = {"model": "2.7B"}
    rows = [*CARRIED, CLEAR, captured(92, **large), captured(86, **large, **ENGINES),
            CLEAR | large | {"ms_communication": 48}]  # fmt: skip
    assert str(losses.scaling(made(rows))) == (
        "To the replayed step of the xl of 2026 (2.7B) the same buckets add 12.0 ms by NCCL and "
        "6.00 ms by copy engines, 1.50 and 3.00 times what they add to that of the xl of 2025, "
        "with 1.70 times as many bytes. By NCCL and alone the messages take 48.0 ms where backward "
        "takes 50.0, and replayed 25% of that is exposed (the xl of 2026 (2.7B)); 40.0 ms where "
        "backward takes 50.0, and replayed 20% of that is exposed (the xl of 2025)."
    )
    assert "Not measured yet" in str(losses.scaling(made(CARRIED)))
    assert "Not measured yet" in str(losses.scaling(empty))


def test_what_the_measuring_of_an_update_beside_the_messages_holds_is_counted(made):
    """3.41 billion parameters: 36 bytes of each while three steps take turns, 20 where one is."""
    large = captured(120, wrapper="updating", model="2.7B", **ENGINES)
    blank = {k: "" for k in large if k.startswith("ms") or k == "n"}
    said = str(answer.untimed(made([large | blank | {"status": "oom"}])))
    assert "weights 4, the moments of two optimizers 16, the means in shared memory 4," in said
    assert "updates beside its backward) 12: 123 of the 141 GB that the driver gives" in said
    assert "one optimizer and one graph, 68 GB before these." in said
    assert "in turns with two others" not in str(answer.untimed(made([large])))


def test_published_figures_stand_beside_ours(made):
    c = made([noisy(150, "naive", without=90, ms_communication=60), noisy(130, "flat", without=90),
              noisy(104, "bucketed", 100, without=90)])  # fmt: skip
    found = {
        tuple(line[:3]): line[3:] for line in published.table(c, "c", "t").frame.values.tolist()
    }
    pcie, nvlink = "2 H800 PCIe", "2 unnamed GPUs of 80 GB, NVLink"
    assert found[pcie, "flat", "711.3"] == ["1.022", "0.867", "·", "356", "50.05%"]
    # Each section's steps over its own naive's, 696.6; ours are 104 over 150.
    assert found[pcie, "100 MB", "592.3"] == ["0.850", "0.693", "·", "·", "·"]
    assert found[nvlink, "flat", "935.5"][0] == "0.999"
    said = str(published.sentence(c))
    assert "at 128 tokens, the all-reduces of naive take 341 of 696 ms, 23 GB/s" in said
    # 598.2 - (695.8 - 341.02), and 0.46 % of 598.2.
    assert (
        "the step would take 355 ms without them, and it takes 598: 243 ms are exposed as this "
        "page has the word, of which that wait is 2.75."
    ) in said
    assert "of 100 MB; the step is longer by 0.4% with 1, 0.9% with 10 and 3.2% with 1000" in said
    assert "flat is within 0.1% of it; the command printed there asks for naive" in said
    assert said.endswith("Ours, between two H200, take 60.0 ms, 133 GB/s.")
    assert "Ours" not in str(published.sentence(made([CLEAR])))
