"""A device of round numbers and small models, for tests of the planner."""

from dataclasses import replace

from a2lib.theory.devices import Device
from a2lib.theory.jobs import Job
from a2lib.theory.transformer import GroupedShape, Shape

# Round numbers: 1,000 operations, 10 bytes to a device of the node (of two), 1 byte to others.
TOY = Device("toy", 1e3, 1e6, 1e30, 10.0, 1.0, 2)
TINY = Shape(d_model=4, d_ff=6, num_layers=2, num_heads=2, vocab_size=10)
FREE = replace(TOY, link=1e30, network=1e30)
FAST = replace(TOY, link=1e4, network=1e3)
WIDE = Shape(d_model=8, d_ff=16, num_layers=12, num_heads=4, vocab_size=64)

# A block of TINY whose FFN is four experts of width 3, of which a token goes to one, and a shared
# one, but for the first block's; 36 parameters each, four rows of the router, a bias each.
MIXED = GroupedShape(4, 6, 2, 2, 10, experts=4, top_k=1, shared=1, dense=1)

# What a device holds, by component.
NOTHING = dict.fromkeys(
    ("parameters", "gradients", "optimizer", "working weights", "activations", "temporaries"), 0
)


def job(devices=8, batch=4, context=4, shape=TINY, device=TOY, headroom=0.0):
    return Job(shape, device, devices, batch, context, headroom, efficiency=1.0)
