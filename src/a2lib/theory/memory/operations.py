"""A training step's operations, each with the tensor that it makes and those whose last use it is.

The forward's last uses are those of Python, and end what autograd has not saved; the backward's end
the rest. Names stand for tensors: of ``make`` and ``drop`` several, apart by spaces.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from a2lib.theory.attention import cut_in_chunks, in_one_sweep, tiled_memory
from a2lib.theory.memory.tape import Event, Tape
from a2lib.theory.products import INDEX, WIDE

if TYPE_CHECKING:
    from a2lib.theory.memory.tensors import StepMemory

# Layers whose input autocast has in 16 bits already.
OF_NARROW = ("attn.output_proj", "ffn.w2")
# What the first product of a phase makes: of the forward, and of the backward in fp32, in bf16, and
# where it adds.
FIRST_PRODUCTS = ("0a/q0", "lm_head.grad", "last/dw16", "last/added")


@lru_cache(maxsize=8)  # what is asked of a step comes one after another
def played(step: StepMemory) -> tuple[Event, ...]:
    """The events of a step, from its beginning until all that it made, but the state, is gone."""
    tape = _Step(step)
    tape.play()
    return tape.events()


class _Step(Tape):
    """Sizes in bytes: ``u`` of the residual stream in float32, ``un`` in the width of products,
    ``gn`` of the FFN's hidden, ``s`` and ``sn`` of the scores, ``rows`` of a number a token."""

    def __init__(self, step: StepMemory) -> None:
        super().__init__(saves=step.mode != "inference")
        self.of, self.parameters = step, step.parameters()
        self.block = ""  # how the names of its parameters begin
        self.casts, self.eager = step.precision == "bf16", step.attention == "eager"
        wide, part = step.sizes, 2 if self.casts else 1
        self.u, self.s, self.rows = wide["stream"], wide["scores"], wide["rows"]
        self.un, self.gn, self.sn = (wide[x] // part for x in ("stream", "hidden", "scores"))

    def play(self) -> None:
        step, layers = self.of, range(self.of.shape.num_layers)
        logits = step.sizes["logits"]
        self.make_of_model("x0", self.u, saved=True)
        for i in layers:
            self.attention(i)
            self.ffn(i)
        self.enter("last")
        self.norm()
        self.linear("lm_head", "logits", logits // 2 if self.casts else logits)
        self.drop(f"norm x{len(layers)}")  # the logits live on, as the step's result
        if step.mode in ("inference", "forward"):
            return
        self.loss(logits)
        self.norm_backward("ln_final", f"x{len(layers)}")
        for i in reversed(layers):
            self.ffn_backward(i)
            self.attention_backward(i)
        self.enter("first")
        self.gradient("token_embeddings", "dy added last/dloss")
        self.phase = "optimizer" if step.mode == "train-step" else ""
        if step.mode == "train-step" and step.first:
            for name, size in step.state().items():
                self.make_of_model(name, size)
        if step.fresh:
            self.drop(" ".join(f"{name}.grad" for name in self.parameters))

    def enter(self, where: str, block: str = "", kernel: str = "") -> None:
        self.where, self.block, self.kernel = where, block, kernel

    def cast(self, name: str, size: int, drop: str = "", *, saved: bool = False) -> None:
        """A copy in another width, under autocast alone."""
        if self.casts:
            self.make(name, size, drop, saved=saved)

    def loss(self, logits: int) -> None:
        """And its backward, to the gradient of the head's input."""
        self.phase = "loss"
        self.cast("wide", logits)
        self.make("logp", logits, saved=True)
        self.make("loss", WIDE)
        self.make("weight", WIDE, "wide logits", saved=True)
        self.phase = "backward"
        self.make("dloss", WIDE)
        self.make("dlogp", logits, "weight")
        self.make("dlogits", logits, "dlogp logp")
        self.cast("dlogits16", logits // 2, "dlogits")
        self.linear_backward("lm_head", "dlogits dlogits16", "dnorm", self.u, "norm")

    def linear(self, weight: str, y: str, size: int, *, saved: bool = False) -> None:
        """``y``, of copies of weight and input under autocast."""
        if self.casts:
            self.make(f"{weight}.16", self.parameters[self.block + weight] // 2, saved=True)
            if weight not in OF_NARROW:
                self.make(f"{weight}.x", self.un, saved=True)
        self.make(y, size, f"{weight}.x", saved=saved)

    def gradient(self, weight: str, drop: str = "") -> None:
        """Of a parameter, in float32: its own, or what is ``added`` to the one that is there."""
        name, size = self.block + weight, self.parameters[self.block + weight]
        if self.of.adds:
            self.make("added", size, drop)
        else:
            self.make_of_model(f"{name}.grad", size, drop)

    def linear_backward(
        self, weight: str, dy: str, dx: str, size: int, drop: str = "", total: str = ""
    ) -> None:
        """The gradients of weight and input. ``drop`` is the input, if nothing else needs it;
        ``total``, a name and two parts, is the sum of what several layers have for one input."""
        used = f"{dy} {weight}.16 {weight}.x {drop}"
        if not self.casts:
            self.gradient(weight)
            self.make(dx, size, used)
        else:
            self.make("dw16", self.parameters[self.block + weight] // 2)
            if weight in OF_NARROW:
                self.make(dx, size, used)
            else:
                self.make("d16", self.un, used)
                self.make(dx, size, "d16")
        if total:
            name, *parts = total.split()
            self.make(name, self.u, " ".join(parts))
        if self.casts:
            self.kernel = "widen w2's" if weight == "ffn.w2" else self.kernel
            self.gradient(weight, "dw16")
        self.drop("added")

    def norm(self) -> None:
        self.make("square", self.u)
        self.make("mean", self.rows, "square")
        self.make("shifted", self.rows, "mean")
        self.make("root", self.rows, "shifted", saved=True)
        self.make("normal", self.u, "root", saved=True)
        self.make("norm", self.u, "normal", saved=not self.casts)  # autocast saves copies of it

    def norm_backward(self, gain: str, x: str) -> None:
        """Onto the gradient ``dy`` of the residual stream, if it is there."""
        joins, self.kernel = "dy" in self.alive, "norm"
        self.make("dnormal dgain", self.u)
        self.gradient(gain, "dgain added dnorm normal")
        self.make("dx droots", self.u)
        self.make("droot", self.rows, "droots dnormal")
        if joins:
            self.make("joined", self.u, "dx dy")
        self.make("cube cubes dmean", self.rows, "cubes cube droot root")
        self.make("dsquare", self.u, "dmean")
        self.make("power twice dx2", self.u, f"twice power dsquare {x}")
        self.make_of_model("dy", self.u, "joined dx dx2")

    def turn(self, name: str) -> None:
        """RoPE, in float32, by halves of even and odd places."""
        half = self.u // 2
        self.cast("given", self.u)
        self.make("a b even", half, "b a")
        self.make("a b odd", half, "b a")
        self.cast("turned", self.u, "odd even")
        self.make(name, self.un, "odd even turned given", saved=True)

    def turn_backward(self, name: str) -> None:
        half = self.u // 2
        self.cast("given", self.u, name)
        self.make("a b n c", half, "n")
        self.make("e", half, "c a")
        self.make("f", half, f"{name} given")
        self.make("o", half, "b f")
        self.cast("turned", self.u, "e o")
        self.make(f"{name}0", self.un, "e o turned")

    def attention(self, i: int) -> None:
        """From a block's input x to y, the residual stream between its halves."""
        self.enter(f"{i}a", f"layers.{i}.")
        self.norm()
        for name in "qkv":  # v is saved as it is, where eager saves a copy
            saved = name == "v" and not self.eager
            self.linear(f"attn.{name}_proj", f"{name}0", self.un, saved=saved)
        self.turn("q")
        self.turn("k")
        self.drop("q0 k0")
        if self.eager:
            self.scores()
            self.make("o", self.un, saved=True)
        else:
            for name, size in self.held("forward").items():
                self.make(name, size, saved=name in ("o", "lse"))
            self.drop("lse k_terms v_terms")
        self.linear("attn.output_proj", "out", self.un)
        self.drop("heads o v0 q k norm")
        self.make_of_model(f"y{i}", self.u, "out", saved=True)

    def scores(self) -> None:
        N, u, s = self.of.context, self.un, self.sn
        self.make("qk", s)
        self.make("scores", s, "qk")
        self.make("rows columns", INDEX * N)
        self.make("mask", N * N, "columns", saved=True)
        self.make("masked", s, "scores mask")
        self.cast("wide", self.s)
        self.make("prob", self.s, "wide", saved=True)
        self.cast("prob16", s, saved=True)
        self.make("values", u, saved=True)
        self.make("heads", u, "values prob16 prob masked rows")

    def scores_backward(self) -> None:
        u, s = self.un, self.sn
        self.kernel = "do v^T"
        self.make("dheads", u, "do")
        self.make("dv", u)
        self.make("dprob16" if self.casts else "dprob", s, "dheads values prob16")
        self.kernel = "widen dp" if self.casts else self.kernel
        self.cast("dprob", self.s, "dprob16")
        self.kernel = "softmax"
        if self.of.cuda:
            self.make("weighted", self.s)
        self.make("dwide" if self.casts else "dmasked", self.s, "weighted dprob prob")
        self.cast("dmasked", s, "dwide")
        self.make("dscaled", s, "dmasked mask")
        self.make("dscores", s, "dscaled")
        self.kernel = "rope"
        self.make("dq dk", u, "dscores q k")

    def flash_backward(self) -> None:
        self.kernel = "flash"
        held = self.held("backward")
        for name, size in held.items():
            self.make(name, size)
        self.drop(" ".join(name for name in held if name not in ("dq", "dk", "dv")))
        self.drop("do q k v0 o lse")
        self.kernel = "rope"

    def held(self, pass_: str) -> dict[str, int]:
        """What the library's attention makes in a pass, on a Hopper GPU."""
        n, heads = self.of.context, self.of.shape.num_heads
        d, size = self.of.shape.head_dim, 2 if self.casts else 4
        every = self.of.batch * heads
        chunks = cut_in_chunks(n, n, every, d, True, size)
        forms = {"one_sweep": in_one_sweep(n, every, d, size), "query_chunks": chunks}
        at = self.of.batch, heads, n, n, d, size
        return tiled_memory(*at, pass_, terms=not self.casts, **forms)

    def ffn(self, i: int) -> None:
        self.enter(f"{i}f", f"layers.{i}.")
        self.norm()
        self.linear("ffn.w1", "gate", self.gn, saved=True)
        self.linear("ffn.w3", "value", self.gn, saved=True)
        self.make("silu product", self.gn, "silu", saved=True)
        self.linear("ffn.w2", "down", self.un)
        self.drop("product gate value norm")
        self.make_of_model(f"x{i + 1}", self.u, f"down y{i} x{i}", saved=True)

    def ffn_backward(self, i: int) -> None:
        """From the gradient dy of a block's result to that of y."""
        self.enter(f"{i}f", f"layers.{i}.", "w2")
        self.cast("dy16", self.un)
        self.linear_backward("ffn.w2", "dy16", "dproduct", self.gn, "product")
        self.kernel = "gate"
        self.make("dsilu dvalue", self.gn, "value silu dproduct")
        self.make("dgate", self.gn, "gate dsilu")
        self.kernel = "w1 w3"
        self.linear_backward("ffn.w3", "dvalue", "d3", self.u)
        self.linear_backward("ffn.w1", "dgate", "d1", self.u, "norm", "dnorm d3 d1")
        self.norm_backward("ln2", f"y{i}")

    def attention_backward(self, i: int) -> None:
        """From the gradient of y to that of x."""
        self.enter(f"{i}a", f"layers.{i}.", "output")
        self.cast("dy16", self.un)
        self.linear_backward("attn.output_proj", "dy16", "do", self.un, "o" if self.eager else "")
        if self.eager:
            self.scores_backward()
        else:
            self.flash_backward()
        self.turn_backward("dq")
        self.turn_backward("dk")
        self.make("dqs", self.un, "dq0")
        self.make("dks", self.un, "dk0")
        if self.eager:
            self.make("dvs", self.un, "dv")
        self.kernel = "q k v"
        self.linear_backward("attn.v_proj", "dv dvs", "dn1", self.u)
        self.linear_backward("attn.k_proj", "dks", "dn2", self.u, "", "dn3 dn1 dn2")
        self.linear_backward("attn.q_proj", "dqs", "dn4", self.u, "norm", "dnorm dn3 dn4")
        self.norm_backward("ln1", f"x{i}")
