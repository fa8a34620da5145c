"""What a worker can be asked about Inductor."""


def counters(job):
    """How often its caches were hit and missed."""
    from torch._dynamo.utils import counters

    job.emit({**counters["inductor"], **counters["aot_autograd"]})
