"""A device of round numbers and small models, for tests of the evaluator of layouts."""

from a2lib.shapes import Shape
from a2lib.theory.devices import Device
from a2lib.theory.layout_memory import kept_by_block
from a2lib.theory.layouts import Case, Layout, Training

# Round numbers: 1,000 operations, 10 bytes to a device of the node (of two), 1 byte to others.
TOY = Device("toy", 1e3, 1e6, 1e30, 10.0, 1.0, 2)
TINY = Shape(d_model=4, d_ff=6, num_layers=2, num_heads=2, vocab_size=10)
WIDE = Shape(d_model=8, d_ff=16, num_layers=12, num_heads=4, vocab_size=64)

# What a device holds, by component.
NOTHING = dict.fromkeys(
    ("parameters", "gradients", "optimizer", "working weights", "activations", "temporaries"), 0
)


def training(batch=4, context=4, shape=TINY, **more):
    """Return a training at the whole of the peak."""
    return Training(shape, batch, context, efficiency=1.0, **more)


def kept(job):
    """Bytes that a token of a block leaves on one device, but for eager attention's mask."""
    case = Case(job, Layout(), TOY)
    block = kept_by_block(case)
    mask = job.context**2 if job.attention == "eager" else 0
    return (block.total - mask) / case.tokens
