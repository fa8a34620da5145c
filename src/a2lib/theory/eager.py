"""Memory and kernels of attention written down as its definition, tensor by tensor.

The code meant is ``a2lib.attention.attention_reference`` on ``(B, N, d)`` inputs, as PyTorch runs
it on CUDA: which tensors live after each kernel, which of them wait for the backward, and what each
kernel must compute and move. All sizes are in bytes.

    M  B N N scores       T  B N d, the size of q       mask  N N of one byte, shared by the batch
"""

from dataclasses import dataclass

from a2lib.theory.attention import VECTORS, tiled_memory
from a2lib.theory.compiling import PASSES, attention_kernels, eager_kernels
from a2lib.theory.memory import allocator
from a2lib.theory.products import INDEX, WIDE, check_name, check_sizes, largest
from a2lib.theory.roofline import Kernel

HOW = ("tensors", "blocks", "tiled")


@dataclass(frozen=True)
class Eager:
    """Eager attention on ``batch`` sequences of ``n`` tokens and vectors of ``d``.

    Raises ValueError for a size that is not a positive integer.
    """

    batch: int
    n: int
    d: int
    causal: bool
    element_bytes: int = 4

    def __post_init__(self) -> None:
        sizes = {"batch": self.batch, "n": self.n, "d": self.d}
        check_sizes(**sizes, element_bytes=self.element_bytes)

    @property
    def matrix(self) -> int:
        """Bytes of the scores of all sequences, and of every tensor of their shape."""
        return allocator.rounded(self.batch * self.n**2 * self.element_bytes)

    @property
    def written(self) -> str:
        return "causal" if self.causal else "plain"

    @property
    def tensor(self) -> int:
        """Bytes of q, and of every tensor of its shape."""
        return allocator.rounded(self.batch * self.n * self.d * self.element_bytes)

    def inputs(self, pass_: str) -> dict[str, int]:
        """What is there before a pass, by name: backward includes what forward has left."""
        given = dict.fromkeys(("q", "k", "v"), self.tensor)
        if pass_ == "forward":
            return given
        return given | {"do": self.tensor, "o": self.tensor} | self.waiting()

    def waiting(self) -> dict[str, int]:
        """What waits for the backward beside the inputs: the weights p, and the mask if causal."""
        return {"p": self.matrix} | ({"mask": allocator.rounded(self.n**2)} if self.causal else {})

    def saved(self) -> dict[str, int]:
        """Every tensor that autograd saves, by name."""
        return dict.fromkeys(("q", "k", "v"), self.tensor) | self.waiting()

    def moments(self, pass_: str) -> list[tuple[str, dict[str, int]]]:
        """For each kernel of a pass in order: its name, and the bytes of every tensor beyond
        ``inputs(pass_)`` that lives when it ends, its operands included. Raises ValueError for
        another pass."""
        check_name("pass", pass_, PASSES)
        sizes = dict.fromkeys(VECTORS, self.tensor) | {"mask": allocator.rounded(self.n**2)}
        sizes |= dict.fromkeys(("queries", "keys"), allocator.rounded(INDEX * self.n))
        live, found = {}, []
        for name, _, made, used in eager_kernels("eager", self.written, pass_):
            live[made] = sizes.get(made, self.matrix)
            found.append((name, dict(live)))
            live = {name: size for name, size in live.items() if name not in used.split(",")}
        return found

    def peak(self, pass_: str) -> int:
        """The most a pass allocates beyond what is there on entry."""
        return max(sum(live.values()) for _, live in self.moments(pass_))

    def total(self, pass_: str) -> int:
        """All that its tensors take at the peak of a pass, inputs included."""
        return sum(self.inputs(pass_).values()) + self.peak(pass_)

    def kernels(self, pass_: str) -> list[Kernel]:
        """What each kernel of a pass computes and moves, a matrix passing once for each use."""
        sizes = self.batch, self.n, self.d, self.element_bytes
        return attention_kernels("eager", self.written, pass_, *sizes)

    def history(self, pass_: str) -> list[dict[str, int]]:
        """Every tensor that lives after each kernel of a pass, inputs included; of a backward
        after each kernel of its forward as well, where ``do`` is there from the beginning."""
        given = self.inputs("forward") | ({"do": self.tensor} if pass_ == "backward" else {})
        history = [given, *(given | live for _, live in self.moments("forward"))]
        if pass_ == "backward":
            before = self.inputs(pass_)
            history += [before, *(before | live for _, live in self.moments(pass_))]
        return history


def longest(
    batch: int, d: int, causal: bool, room: int, pass_: str, *, step: int = 1, how: str = "tensors"
) -> int:
    """The longest sequence, a multiple of ``step``, whose pass in fp32 fits ``room`` bytes; 0 for
    none.

    ``pass_`` is "forward" or "backward", which needs its forward too. By ``how`` what fits are the
    "tensors" of eager attention, the "blocks" that PyTorch's allocator takes for them, or the
    tensors of "tiled" attention. Raises ValueError as ``Eager``, or for another ``how``.
    """
    check_sizes(room=room, step=step)
    check_name("how", how, HOW)

    def fits(n: int) -> bool:
        if how == "tiled":
            return tiled_total(batch, n, d, pass_) <= room
        shape = Eager(batch, n, d, causal)
        if how == "blocks":
            return allocator.fits(room, shape.history(pass_))
        return max(sum(live.values()) for live in shape.history(pass_)) <= room

    return step * largest(lambda n: fits(n * step))


def tiled_total(batch: int, n: int, d: int, pass_: str) -> int:
    """What the tensors of tiled attention in fp32 take at the peak of a pass, inputs included."""
    given = (3 if pass_ == "forward" else 4) * batch * n * d * WIDE
    whole = "forward" if pass_ == "forward" else "end_to_end"
    made = tiled_memory(1, batch, n, n, d, WIDE, whole)
    return given + sum(made.values())


def by_hand_saved(shape: Eager) -> dict[str, int]:
    """What autograd saves where the softmax is written out as exp(s - max) / sum: the exponentials
    and the weights, the sums, and the places of the maxima."""
    rows = shape.batch * shape.n
    return shape.saved() | {
        "exponentials": shape.matrix,
        "sums": allocator.rounded(rows * WIDE),
        "places of the maxima": allocator.rounded(rows * INDEX),
    }
