"""Compile the attention kernels for a Hopper GPU where there is none, and report their resources.

    python tests/attention/aot.py forward ieee 64 causal 128 128 8 2  # one kernel, tile given
    python tests/attention/aot.py      # every tile of the table, all that forms.py asks of Gluon
    python tests/attention/aot.py some # of each kernel and head size one tile: the gate of a CPU

One JSON object a line: spilled bytes, serialised-wgmma warnings of ptxas (C7510 to C7515),
registers, shared memory. A process of its own: a failed compiler assertion aborts Python.
"""

import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor

os.environ.pop("TRITON_INTERPRET", None)

import torch  # noqa: E402
from triton import knobs  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.backends.nvidia.compiler import CUDABackend, get_ptxas  # noqa: E402
from triton.runtime import driver  # noqa: E402

from a2lib.attention import dispatch, forms, launches, tiles  # noqa: E402

# The steps of a pass with a kernel of the table.
STEPS = {
    "forward": forms.Pass._forward_plain,
    "forward_chunk": forms.Pass._forward_key_chunks,
    "backward": forms.Pass._backward_one_launch,
    "backward_chunks": lambda one: one._backward_sums("query_chunks"),
    "backward_wide": lambda one: one._backward_sums("two_terms"),
}


class Hopper:
    """A GPU that kernels are compiled for, and that is not there."""

    get_current_device = get_current_stream = lambda *_: 0
    get_current_target = lambda _: GPUTarget("cuda", 90, 32)  # noqa: E731


def _ptxas(self, ptx, *_):
    """In place of Triton's own call of ptxas, which keeps the code and not what was said of it:
    bytes spilled, registers, wgmma that it serialised."""
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        log = subprocess.run(
            [get_ptxas(90).path, "-v", "--gpu-name=sm_90a", file.name, "-o", "/dev/null"],
            capture_output=True,
            text=True,
        ).stderr
    registers = re.search(r"Used (\d+) registers", log)
    said = {
        "spills": sum(map(int, re.findall(r"(\d+) bytes spill (?:stores|loads)", log))),
        "serialised": re.findall(r"\((C751[0-5])\)", log),
        "registers": int(registers.group(1)) if registers else None,
    }
    return json.dumps(said).encode()


def compile_step(told, step):
    """Compile as a launch of this step would; its resources, and what the caller tells of it."""
    arguments = (*step.descriptors, *step.tensors, *step.numbers)
    kernel = launches.kernel_of(step.kernel)
    return told | resources(kernel.warmup(*arguments, grid=(step.n_programs,), **step.options))


def resources(compiled):
    """Return what the compiled kernel needs, and which instructions it has."""
    ptx = compiled.asm["ptx"]
    return {
        **json.loads(compiled.asm["cubin"]),
        "loose": [loose_arrivals(ptx), loose_arrivals(ptx.replace("bar.sync", ""))],
        "shared": compiled.metadata.shared,
        "wgmma": "wgmma.mma_async" in ptx,
        "mma_sync": "mma.sync" in ptx,
        "adds": "add.v4.f32" in ptx,
        "reduce": "cp.reduce.async.bulk" in ptx,
        "moves": re.findall(r"\b((?:ld|st)\.(?:global|shared)\.\S+)", ptx),
    }


def loose_arrivals(ptx):
    """Count the arrivals at a barrier in shared memory, which one thread makes for its warpgroup,
    that follow the group's accesses there without all of it having met in between."""
    found, loose = 0, False
    for op in re.findall(r"bar(?:rier)?\.sync|mbarrier\.arrive\.sh|(?:ld|st)(?:matrix|\.sh)", ptx):
        if op.startswith("mbarrier"):
            found += loose
        else:
            loose = not op.startswith("bar")
    return found


def pass_of(d, causal, ragged, heads=1, dtype=torch.bfloat16, **options):
    """Return a pass over so many heads of 512 queries, so that some are past the keys, of a pair
    of tiles or more."""
    q = torch.empty(1, heads, 512, d, dtype=dtype, device="meta")
    k = q.new_empty(1, 1, 256 + ragged, d)
    lse = q.new_empty(q.shape[:-1]).float()
    tensors = forms.Tensors(q, k, k, o=q, lse=lse, do=q, dq=q, dk=k, dv=k)
    call = launches.call_of(tensors, causal)._replace(multiprocessors=132, **options)
    return forms.Pass(tensors, call, d**-0.5)


def work_of(one, told, chosen):
    """Return what `compile_step` is given of the chosen steps of a pass."""
    return [(told, step) for step in one.steps if chosen(step)]


def chosen_forms(d, causal):
    """Return what the table chooses somewhere: forms of the forward (consumers, and whether
    programs stay), and whether the backward's programs stay."""
    forwards, stays = set(), set()
    for heads, n in itertools.product((1, 16, 1024), (128, 512, 2048, 16384)):
        call = dispatch.Call("bf16", 1, heads, heads, n, n, d, causal)
        forwards.add(dispatch.forward_consumers(call))
        stays.add(dispatch.hopper_backward_stays(call))
    return sorted(form for form in forwards if form[0]), sorted(stays)


def table_work(kernel, precision, BD, causal, tile):
    """Return the step of a kernel of the table with this tile."""
    dispatch.in_two_terms = lambda _: precision == "fp16x3"
    dispatch.keys_per_chunk = lambda _: 128
    tiles.TILES[kernel, precision, BD] = [tiles.Row(kernel, precision, (BD,), tile)]
    dtype = torch.bfloat16 if precision == "ieee" else torch.float32
    one = pass_of(BD, causal, True, dtype=dtype)
    STEPS.get(kernel, forms.Pass._backward_two_sweeps)(one)
    told = {"kernel": kernel, "precision": precision, "head_dim": BD}
    told |= {"causal": causal, "tile": list(tile)}
    return work_of(one, told, lambda step: step.kernel == kernel)


def tiles_of_the_table(every):
    """Every entry of the tile table in bfloat16, which needs what float16 does, and in float32;
    without the causal mask where registers are tight. Or the plain tile, with the mask, of the
    largest heads and in 16 bits of heads of 64."""
    for (kernel, precision, BD), causal in itertools.product(list(tiles.TILES), (True, False)):
        in_16_bits = precision == "ieee"
        some = causal and (BD == 128 or (BD == 64 and in_16_bits))
        for row in tiles.TILES[kernel, precision, BD]:
            asked = causal or (BD >= 64 and row.when not in ("long", "short_causal"))
            if not every:
                asked = some and row.when == "always"
            if asked:
                yield kernel, precision, BD, causal, row.tile


def gluon_work(every):
    """Return what forms.py can launch of Gluon: its name, the step and its tensors.

    Unless every one is asked for, these are heads of 128 with a mask and a ragged end, and of 64
    without: between them each number of consumers, and programs that stay and that do not.
    """
    work = []

    def add(one, **told):
        how = {"gluon": True, "head_dim": d, "causal": causal, "ragged": ragged}
        work.extend(work_of(one, how | told, lambda step: step.descriptors))

    chosen = {}
    for d, causal in itertools.product((64, 128), (True, False)):
        chosen[d, causal] = chosen_forms(d, causal)
    stay = dispatch.hopper_backward_stays
    for d, causal, ragged in itertools.product((64, 128), (True, False), (True, False)):
        if not every and (ragged != causal or causal != (d == 128)):
            continue
        forwards, backwards = chosen[d, causal]
        for form in forwards:
            dispatch.forward_consumers = lambda _, found=form: found
            one = pass_of(d, causal, ragged)
            one._forward_hopper()
            add(one, kernel="forward", form=form)
        for stays in backwards:
            dispatch.hopper_backward_stays = lambda _, found=stays: found
            one = pass_of(d, causal, ragged)
            one._backward_sums("one_sweep")
            add(one, kernel="backward", stays=stays)
        dispatch.hopper_backward_stays = stay
        if ragged == causal:  # each with and without, once: they are apart in the kernel
            one = pass_of(d, causal, ragged)
            dispatch.chunk_queries_of = lambda _: 256
            one._backward_sums("hopper_chunks")
            add(one, kernel="backward", chunk=256)
        if every or causal:
            # In a fixed order, and of heads of keys that two query heads share.
            for heads, ordered in ((1, True), (2, False)):
                one = pass_of(d, causal, ragged, heads, fixed_order=ordered)
                one._backward_sums("one_sweep")
                add(one, kernel="backward", ordered=ordered, group=heads)
    return work


def main(argv):
    driver.set_active(Hopper())
    CUDABackend.make_cubin = _ptxas
    knobs.cache.dir = os.path.join(knobs.cache.dir, "a2lib-ptxas")  # away from kernels that can run
    forms.launches_early = lambda _: True
    if argv not in ([], ["some"]):
        kernel, precision, BD, causal, *tile = argv
        job = kernel, precision, int(BD), causal == "causal", tiles.Tile(*map(int, tile))
        work = table_work(*job)
    else:
        work = gluon_work(every=not argv)
        for job in tiles_of_the_table(every=not argv):
            work += table_work(*job)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for result in pool.map(lambda job: compile_step(*job), work):
            print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
