"""A training step's operations: what each reads and makes, and the tensors whose last use it is.

The forward's last uses are those of Python, and end what autograd has not saved; the backward's end
the rest. What is made and dropped is the step's memory (``events``). On CUDA each is also a kernel,
which moves what it reads and what it makes (``kernels``); an operator that launches two is two (a
mask copies first, the softmax's backward multiplies first, a scattered gradient is cleared first,
what is joined along a fifth dimension is copied part by part). Names stand for tensors, several
apart by spaces; where several are made, of what each is stands apart by commas.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from a2lib.theory.memory.tape import Tape
from a2lib.theory.products import INDEX, WIDE

if TYPE_CHECKING:
    from a2lib.theory.memory.tensors import StepMemory

# Layers whose input autocast has in 16 bits already.
OF_NARROW = ("attn.output_proj", "ffn.w2")
# What the first product of a phase makes: of the forward, and of the backward in fp32, in bf16, and
# where it adds.
FIRST_PRODUCTS = ("0a/q0", "lm_head.grad", "last/dw16", "last/added")


class Operations(Tape):
    """A step from its beginning until all that it made, but the state, is gone; with ``blocks`` a
    step of one block, and its kernels as of one of so many.

    Sizes in bytes: ``u`` of the residual stream in float32, ``un`` in the width of products, ``gn``
    of the FFN's hidden, ``s`` and ``sn`` of the scores, ``qn`` and ``kn`` of queries and of keys,
    ``rows`` of a number a token."""

    def __init__(self, step: StepMemory, blocks: int = 0) -> None:
        super().__init__(step.mode != "inference", blocks)
        self.of, self.parameters = step, step.parameters()
        self.casts, self.eager = step.precision == "bf16", step.attention == "eager"
        wide, part = step.sizes, 2 if self.casts else 1
        self.u, self.s, self.rows = wide["stream"], wide["scores"], wide["rows"]
        names = "stream", "hidden", "scores", "q", "k"
        self.un, self.gn, self.sn, self.qn, self.kn = (wide[x] // part for x in names)
        self.score_flops = 2 * step.shape.head_dim * self.s // WIDE  # of a product, or tiled both
        # What is read beside what is made: parameters; ids, what they pick of the embedding and of
        # the loss; half of a stream, and RoPE's cosines or sines for it.
        self.given |= self.parameters | {"ids": self.rows // WIDE * INDEX, "picked": self.rows}
        self.given |= {"embeddings": self.u, "half": self.u // 2}
        self.given["table"] = WIDE * step.context * step.shape.head_dim // 2
        self.play()

    def play(self) -> None:
        step, layers = self.of, range(self.of.shape.num_layers)
        logits = step.sizes["logits"]
        self.make_of_model("x0", "ids embeddings", self.u, saved=True)
        for i in layers:
            self.attention(i)
            self.ffn(i)
        self.enter("last")
        last = f"x{len(layers)}"
        self.norm("ln_final", last)
        self.linear("lm_head", "norm", "logits", logits // 2 if self.casts else logits)
        self.drop(f"norm {last}")  # the logits live on, as the step's result
        if step.mode in ("inference", "forward"):
            return
        self.loss(logits)
        self.norm_backward("ln_final", last)
        for i in reversed(layers):
            self.ffn_backward(i)
            self.attention_backward(i)
        self.enter("first")
        self.launch("token_embeddings.grad", "dy ids", self.u)
        self.gradient("token_embeddings", "", "dy added last/dloss")
        self.phase = "optimizer" if step.mode == "train-step" else ""
        if step.mode == "train-step" and step.first:
            for name, size in step.state().items():
                self.make_of_model(name, None, size)
        if step.fresh:
            self.drop(" ".join(f"{name}.grad" for name in self.parameters))

    def enter(self, where: str, block: str = "", kernel: str = "") -> None:
        self.where, self.block, self.kernel = where, block, kernel

    def cast(self, name: str, of: str, size: int, drop: str = "", *, saved: bool = False) -> str:
        """A copy in another width, under autocast alone; the name of what there is."""
        if self.casts:
            self.make(name, of, size, drop, saved=saved)
        return name if self.casts else of

    def loss(self, logits: int) -> None:
        """And its backward, to the gradient of the head's input."""
        self.phase = self.part = "loss"
        wide = self.cast("wide", "logits", logits)
        self.make("logp", wide, logits, saved=True)
        self.launch("loss", "ids picked", 2 * WIDE)
        self.make("loss", None, WIDE)
        self.make("weight", None, WIDE, "wide logits", saved=True)
        self.phase = "backward"
        self.make("dloss", "", WIDE)
        self.launch("dlogp", "ids dloss weight", self.rows)
        self.make("dlogp", "", logits, "weight")
        self.make("dlogits", "dlogp logp", logits, "dlogp logp")
        dlogits = self.cast("dlogits16", "dlogits", logits // 2, "dlogits")
        self.part = "elementwise"
        self.linear_backward("lm_head", "norm", dlogits, "dnorm", self.u, "norm")

    def operands(self, weight: str, x: str) -> tuple[str, str, int]:
        """What a product with a weight and its input multiplies, and its operations."""
        elements = self.parameters[self.block + weight] // WIDE
        flops = 2 * self.rows // WIDE * elements
        if not self.casts:
            return weight, x, flops
        return f"{weight}.16", x if weight in OF_NARROW else f"{weight}.x", flops

    def linear(self, weight: str, x: str, y: str, size: int, *, saved: bool = False) -> None:
        """``y``, of copies of weight and input under autocast."""
        w, narrow, flops = self.operands(weight, x)
        if w != weight:
            self.make(w, weight, self.parameters[self.block + weight] // 2, saved=True)
        if narrow != x:
            self.make(narrow, x, self.un, saved=True)
        self.make(y, f"{w} {narrow}", size, f"{weight}.x", saved=saved, flops=flops)

    def gradient(self, weight: str, of: str, drop: str = "", flops: int = 0) -> None:
        """Of a parameter, in float32: its own, or what is ``added`` to the one that is there."""
        name, size = self.block + weight, self.parameters[self.block + weight]
        if self.of.adds:
            self.make("added", of, size, drop)
        else:
            self.make_of_model(f"{name}.grad", of, size, drop, flops=flops)

    def linear_backward(
        self, weight: str, x: str, dy: str, dx: str, size: int, drop: str = "", total: str = ""
    ) -> None:
        """The gradients of weight and input. ``drop`` is the input, if nothing else needs it;
        ``total``, a name and two parts, is the sum of what several layers have for one input."""
        w, narrow, flops = self.operands(weight, x)
        # The residual stream's gradient lives on.
        used = f"{'' if dy == 'dy' else dy} {weight}.16 {weight}.x {drop}"
        if not self.casts:
            self.gradient(weight, f"{dy} {x}", flops=flops)
        else:
            half = self.parameters[self.block + weight] // 2
            self.make("dw16", f"{dy} {narrow}", half, flops=flops)
        if narrow == x:
            self.make(dx, f"{dy} {w}", size, used, flops=flops)
        else:
            self.make("d16", f"{dy} {w}", self.un, used, flops=flops)
            self.make(dx, "d16", size, "d16")
        if total:
            name, *parts = total.split()
            self.make(name, " ".join(parts), self.u, " ".join(parts))
        if self.casts:
            self.kernel = "widen w2's" if weight == "ffn.w2" else self.kernel
            self.gradient(weight, "dw16", "dw16")
        self.drop("added")

    def norm(self, gain: str, x: str) -> None:
        self.make("square", x, self.u)
        self.make("mean", "square", self.rows, "square")
        self.make("shifted", "mean", self.rows, "mean")
        self.make("root", "shifted", self.rows, "shifted", saved=True)
        self.make("normal", f"{x} root", self.u, "root", saved=True)
        # Autocast saves copies of the result.
        self.make("norm", f"normal {gain}", self.u, "normal", saved=not self.casts)

    def norm_backward(self, gain: str, x: str) -> None:
        """Onto the gradient ``dy`` of the residual stream, if it is there."""
        joins, self.kernel = "dy" in self.alive, "norm"
        self.make("dnormal dgain", f"dnorm {gain}, dnorm normal", self.u)
        self.gradient(gain, "dgain", "dgain added dnorm normal")
        self.make("dx droots", f"dnormal root, dnormal {x}", self.u)
        self.make("droot", "droots", self.rows, "droots dnormal")
        if joins:
            self.make("joined", "dx dy", self.u, "dx dy")
        used = "cubes cube droot root"
        self.make("cube cubes dmean", "root, droot, cube cubes", self.rows, used)
        self.make("dsquare", "dmean", self.u, "dmean")
        of, used = f"{x}, power, twice dsquare", f"twice power dsquare {x}"
        self.make("power twice dx2", of, self.u, used)
        self.make_of_model("dy", f"{'joined' if joins else 'dx'} dx2", self.u, "joined dx dx2")

    def interleave(self, name: str, parts: str, half: int, *, saved: bool = False) -> None:
        for part in parts.split():
            self.launch("interleave", part, half)
        of, used = "turned" if self.casts else None, f"{parts} turned given"
        if self.casts:
            self.make("turned", None, 2 * half, parts)
        self.make(name, of, 2 * half * self.un // self.u, used, saved=saved)

    def turn(self, name: str) -> None:
        """RoPE, in float32, by halves of even and odd places."""
        half = self.bytes(f"{name}0") * self.u // self.un // 2
        self.cast("given", f"{name}0", 2 * half)
        self.make("a b even", "half table, half table, a b", half, "b a")
        self.make("a b odd", "half table, half table, a b", half, "b a")
        self.interleave(name, "odd even", half, saved=True)

    def turn_backward(self, name: str) -> None:
        half = self.bytes(name) * self.u // self.un // 2
        self.cast("given", name, 2 * half, name)
        self.make("a b n c", "half table, half table, half, half table", half, "n")
        self.make("e", "c a", half, "c a")
        self.make("f", "half table", half, f"{name} given")
        self.make("o", "b f", half, "b f")
        self.interleave(f"{name}0", "e o", half)

    def attention(self, i: int) -> None:
        """From a block's input x to y, the residual stream between its halves."""
        self.enter(f"{i}a", f"layers.{i}.")
        self.norm("ln1", f"x{i}")
        for name, size in (("q", self.qn), ("k", self.kn), ("v", self.kn)):
            saved = name == "v" and not self.eager  # which saves a copy
            self.linear(f"attn.{name}_proj", "norm", f"{name}0", size, saved=saved)
        self.turn("q")
        self.turn("k")
        self.drop("q0 k0")
        if self.eager:
            self.scores()
        else:
            held = self.of.tiled("forward")
            self.launch("tiled", "q k v0", held["o"] + held["lse"], self.score_flops)
            for name, size in held.items():
                self.make(name, None, size, saved=name in ("o", "lse"))
            self.drop("lse k_terms v_terms")
        self.linear("attn.output_proj", "o", "out", self.un)
        self.drop("heads o v0 q k norm")
        self.make_of_model(f"y{i}", f"x{i} out", self.u, "out", saved=True)

    def masked(self, name: str, of: str, drop: str) -> None:
        self.make(name, of, self.sn)
        self.launch(name, f"{name} mask", self.sn)
        self.drop(drop)

    def scores(self) -> None:
        self.part = "attention"
        N, u, s, flops = self.of.context, self.qn, self.sn, self.score_flops
        self.make("qk", "q k", s, flops=flops)
        self.make("scores", "qk", s, "qk")
        self.make("rows columns", "", INDEX * N)
        self.make("mask", "rows columns", N * N, "columns", saved=True)
        self.masked("masked", "scores", "scores mask")
        wide = self.cast("wide", "masked", self.s)
        self.make("prob", wide, self.s, "wide", saved=True)
        prob = self.cast("prob16", "prob", s, saved=True)
        self.make("values", "v0", self.kn, saved=True)
        self.make("heads", f"{prob} values", u, "values prob16 prob masked rows", flops=flops)
        self.make("o", "heads", u, saved=True)
        self.part = "elementwise"

    def scores_backward(self) -> None:
        self.part = "attention"
        u, s, flops = self.un, self.sn, self.score_flops
        names = "prob16 dprob16 dwide" if self.casts else "prob dprob dmasked"
        prob, dprob, dwide = names.split()
        self.kernel = "do v^T"
        self.make("dheads", "do", u, "do")
        self.make("dv", f"{prob} dheads", u, flops=flops)
        self.make(dprob, "dheads values", s, "dheads values prob16", flops=flops)
        self.kernel = "widen dp" if self.casts else self.kernel
        self.cast("dprob", dprob, self.s, "dprob16")
        self.kernel = "softmax"
        if self.of.cuda:
            self.make("weighted", "dprob prob", self.s)
        self.make(dwide, "dprob prob", self.s, "weighted dprob prob")
        self.cast("dmasked", dwide, s, "dwide")
        self.masked("dscaled", "dmasked", "dmasked mask")
        self.make("dscores", "dscaled", s, "dscaled")
        self.kernel = "rope"
        self.make("dq dk", "dscores k, dscores q", u, "dscores q k", flops=flops)
        self.part = "elementwise"

    def flash_backward(self) -> None:
        self.kernel = "flash"
        held = self.of.tiled("backward")
        for name, size in held.items():
            self.make(name, None, size)
        self.drop(" ".join(name for name in held if name not in ("dq", "dk", "dv")))
        self.drop("do q k v0 o lse")
        self.kernel = "rope"

    def ffn(self, i: int) -> None:
        self.enter(f"{i}f", f"layers.{i}.")
        self.norm("ln2", f"y{i}")
        self.linear("ffn.w1", "norm", "gate", self.gn, saved=True)
        self.linear("ffn.w3", "norm", "value", self.gn, saved=True)
        self.make("silu product", "gate, silu value", self.gn, "silu", saved=True)
        self.linear("ffn.w2", "product", "down", self.un)
        self.drop("product gate value norm")
        used = f"down y{i} x{i}"
        self.make_of_model(f"x{i + 1}", f"y{i} down", self.u, used, saved=True)

    def ffn_backward(self, i: int) -> None:
        """From the gradient dy of a block's result to that of y."""
        self.enter(f"{i}f", f"layers.{i}.", "w2")
        dy = self.cast("dy16", "dy", self.un)
        self.linear_backward("ffn.w2", "product", dy, "dproduct", self.gn, "product")
        self.kernel = "gate"
        self.make("dsilu dvalue", "value dproduct, silu dproduct", self.gn, "value silu dproduct")
        self.make("dgate", "gate dsilu", self.gn, "gate dsilu")
        self.kernel = "w1 w3"
        self.linear_backward("ffn.w3", "norm", "dvalue", "d3", self.u)
        total = "dnorm d3 d1"
        self.linear_backward("ffn.w1", "norm", "dgate", "d1", self.u, "norm", total)
        self.norm_backward("ln2", f"y{i}")

    def attention_backward(self, i: int) -> None:
        """From the gradient of y to that of x."""
        self.enter(f"{i}a", f"layers.{i}.", "output")
        dy, used = self.cast("dy16", "dy", self.un), "o" if self.eager else ""
        self.linear_backward("attn.output_proj", "o", dy, "do", self.un, used)
        if self.eager:
            self.scores_backward()
        else:
            self.flash_backward()
        self.turn_backward("dq")
        self.turn_backward("dk")
        self.part, u, dv = "attention", self.u, "dvs" if self.eager else "dv"
        for name, of in (("dqs", "dq0"), ("dks", "dk0"), ("dvs", "dv"))[: 3 if self.eager else 2]:
            self.make(name, of, self.un, of)
        self.part, self.kernel = "elementwise", "q k v"
        self.linear_backward("attn.v_proj", "norm", dv, "dn1", u)
        self.linear_backward("attn.k_proj", "norm", "dks", "dn2", u, "", "dn3 dn1 dn2")
        self.linear_backward("attn.q_proj", "norm", "dqs", "dn4", u, "norm", "dnorm dn3 dn4")
        self.norm_backward("ln1", f"x{i}")
