"""Devices by their data sheets, and one's own.

The figures are those of data/reference/devices.csv, each with its source there; a test holds the
two equal. None is measured. Another device, network or node is ``Device(...)``, or one of these
with other numbers:
``replace(DEVICES["H100"], slug="mine", memory=94e9, network=12.5e9, node=4)``.
"""

from dataclasses import dataclass

from a2lib.checks import check_sizes
from a2lib.theory.collectives import positive

WORKSPACE = 32 * 2**20  # bytes of cuBLAS for one thread and stream, on Hopper


@dataclass(frozen=True)
class Device:
    """One device, the links of its node and the network, in SI units.

    - ``slug``: its name in data/reference
    - ``flops``: dense bf16 FLOPs per second
    - ``memory``, ``memory_bandwidth``: bytes, and bytes per second
    - ``link``: bytes per second that it sends over the fast links of its node
    - ``network``: bytes per second that it sends to other nodes
    - ``node``: devices of a node
    - ``workspace``: bytes that matmuls keep, whatever their sizes

    Raises ValueError for a number that is not above 0, or a workspace below 0.
    """

    slug: str
    flops: float
    memory: float
    memory_bandwidth: float
    link: float
    network: float
    node: int
    workspace: float = 0.0

    def __post_init__(self) -> None:
        check_sizes(node=self.node)
        positive(**{name: value for name, value in vars(self).items() if name != "workspace"})
        if not self.workspace >= 0:
            raise ValueError(f"workspace is {self.workspace!r}; allowed are numbers from 0")


# From Hopper on cuBLAS has a workspace for each of the two threads, of forward and of backward.
TWO = 2.0 * WORKSPACE
DEVICES = {
    "H100": Device("nvidia-h100-80gb-hbm3", 989.4e12, 80e9, 3.35e12, 450e9, 50e9, 8, TWO),
    "H200": Device("nvidia-h200", 989.4e12, 141e9, 4.8e12, 450e9, 50e9, 8, TWO),
    "H800": Device("nvidia-h800", 989.4e12, 80e9, 3.35e12, 200e9, 50e9, 8, TWO),
    "A100": Device("nvidia-a100-80gb", 312e12, 80e9, 2.039e12, 300e9, 25e9, 8),
}
