"""What a worker can be asked about Inductor."""


def counters(job):
    """How often its caches were hit and missed."""
    from torch._dynamo.utils import counters

    job.emit({**counters["inductor"], **counters["aot_autograd"]})


def isa(job):
    """The instruction set it compiles for."""
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    job.emit({"isa": str(pick_vec_isa())})
