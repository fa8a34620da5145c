"""Every tensor of a training step, in the order in which PyTorch makes and drops it.

The step is that of ``a2lib.benchmark``: this library's eager model and fused AdamW. It is written
as scores, in which ``+name:size`` makes a tensor, a ``*`` behind it says that autograd saves it
(``'``: in float32 alone, since autocast saves copies of it), and ``-name`` drops it: the forward's
last use in Python, which ends what is not saved, then the backward's. Sizes are letters, with the
bytes of an element after a dot where they are not 4:

    u  B T D      p  half of u    g  B T F     s  B H T T    l  B T V
    r  B T        h  B H T        m  T T       n  T          1  one number
    DD, DF, DV    matrices        D  the gain of a norm

A test holds the scores against what PyTorch does on a CPU, tensor by tensor. There CUDA differs in
one tensor, which ``cuda`` adds: its kernel for the softmax's gradient makes another ``s`` for a
moment. ``a2lib.theory.step_memory`` has what follows from them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

from a2lib.theory.products import check_sizes
from a2lib.theory.saved import PRECISIONS
from a2lib.theory.transformer import Shape

ATTENTIONS = ("eager", "flash")
MODES = ("inference", "forward", "forward-backward", "train-step")
# As a2lib.measure.snapshot has them.
PARAMETERS, OPTIMIZER, GRADIENTS = "parameters", "optimizer state", "gradients"
SAVED, TEMPORARIES, OTHER = "saved for backward", "temporaries", "other"
CATEGORIES = (PARAMETERS, OPTIMIZER, GRADIENTS, SAVED, TEMPORARIES, OTHER)

NORM = "+square:u +mean:r -square +shifted:r -mean +root:r* -shifted +normal:u* -root +norm:u' "
NORM += "-normal "
NORM_BACK = "+dnormal:u +dgain:u +{gain}:D -dgain {added}-dnorm -normal +dx:u +droots:u +droot:r "
NORM_BACK += "-droots -dnormal {join}+cube:r +cubes:r +dmean:r -cubes -cube -droot -root "
NORM_BACK += "+dsquare:u -dmean +power:u +twice:u +dx2:u -twice -power -dsquare -{x} {sum}"
JOIN, SUM = "+joined:u -dx -@dy ", "+@dy:u -{dx} -dx2 "

TURN = "+a:p +b:p +even:p -b -a +a:p +b:p +odd:p -b -a {make} -odd -even "
TURN_BACK = "+a:p +b:p +n:p +c:p -n +e:p -c -a +f:p -{given} +o:p -b -f {make} -e -o "

EAGER = {
    "fp32": "+qk:s +scores:s -qk +rows:n.8 +columns:n.8 +mask:m.1* -columns +masked:s -scores "
            "-mask +prob:s* +values:u* +heads:u -values -prob -masked -rows +o:u* ",
    "bf16": "+qk:s.2 +scores:s.2 -qk +rows:n.8 +columns:n.8 +mask:m.1* -columns +masked:s.2 "
            "-scores -mask +wide:s +prob:s* -wide +prob16:s.2* +values:u.2* +heads:u.2 -values "
            "-prob16 -prob -masked -rows +o:u.2* ",
}  # fmt: skip
EAGER_BACK = {
    "fp32": "+dheads:u -do +dv:u +dprob:s -dheads -values {cuda} +dmasked:s {ended} -dprob "
            "-prob +dscaled:s -dmasked -mask +dscores:s -dscaled +dq:u +dk:u -dscores -q -k ",
    "bf16": "+dheads:u.2 -do +dv:u.2 +dprob16:s.2 -dheads -values -prob16 +dprob:s -dprob16 "
            "{cuda} +dwide:s {ended} -dprob -prob +dmasked:s.2 -dwide +dscaled:s.2 -dmasked -mask "
            "+dscores:s.2 -dscaled +dq:u.2 +dk:u.2 -dscores -q -k ",
}  # fmt: skip
FLASH = {"fp32": "+o:u* +lse:h* -lse ", "bf16": "+o:u.2* +lse:h* -lse "}
# In two sweeps; one has `rows` and `sums` for delta (theory.attention), which no step's peak shows.
FLASH_BACK = {
    "fp32": "+dq:u +dk:u +dv:u +delta:h -delta -do -q -k -v0 -o -lse ",
    "bf16": "+dq:u.2 +dk:u.2 +dv:u.2 +delta:h -delta -do -q -k -v0 -o -lse ",
}
# What the first product of a phase makes: of the forward, and of the backward in fp32, in bf16, and
# where it adds.
FIRST_PRODUCTS = ("0a/q0", "lm_head.grad", "last/dw16", "last/added")


class Event(NamedTuple):
    """A tensor of so many ``bytes`` is made in ``phase``, or dropped if not ``made``. ``category``
    is what a snapshot would call it (``a2lib.measure.snapshot``)."""

    made: bool
    name: str
    bytes: int
    phase: str
    category: str


@dataclass(frozen=True)
class StepMemory:
    """One step of a model of ``shape``: ``mode`` of ``MODES``, ``attention`` of ``ATTENTIONS``,
    ``precision`` as ``a2lib.theory.saved`` has it.

    ``first`` is the first step of a process, which makes the optimizer's state; ``cuda`` False is
    a CPU's. Gradients are made by each backward and dropped with the step, or, if not ``fresh``,
    there already: a backward adds to them (after a ``first`` step, which makes them). Raises
    ValueError, in one line, for other names and sizes.
    """

    shape: Shape
    batch: int = 4
    context: int = 512
    mode: str = "train-step"
    precision: str = "fp32"
    attention: str = "eager"
    first: bool = False
    cuda: bool = True
    fresh: bool = True

    def __post_init__(self) -> None:
        check_sizes(batch=self.batch, context=self.context)
        for name, allowed in (
            ("mode", MODES), ("precision", PRECISIONS), ("attention", ATTENTIONS),
        ):  # fmt: skip
            given = getattr(self, name)
            if given not in allowed:
                raise ValueError(f"{name} {given!r}: allowed are {', '.join(allowed)}")

    @cached_property
    def _elements(self) -> dict[str, int]:
        s, B, T = self.shape, self.batch, self.context
        D, F, V = s.d_model, s.d_ff, s.vocab_size
        heads = B * s.num_heads
        return {"u": B * T * D, "p": B * T * D // 2, "g": B * T * F, "s": heads * T * T,
                "l": B * T * V, "r": B * T, "h": heads * T, "m": T * T, "n": T, "1": 1, "D": D,
                "DD": D * D, "DF": D * F, "DV": D * V}  # fmt: skip

    def size(self, letters: str) -> int:
        """Bytes of a size as the scores write it."""
        name, _, width = letters.partition(".")
        return self._elements[name] * int(width or 4)

    @cached_property
    def _weights(self) -> dict[str, str]:
        block = {"ln1": "D", "attn.q_proj": "DD", "attn.k_proj": "DD", "attn.v_proj": "DD",
                 "attn.output_proj": "DD", "ln2": "D", "ffn.w1": "DF", "ffn.w2": "DF",
                 "ffn.w3": "DF"}  # fmt: skip
        found = {"token_embeddings": "DV"}
        for i in range(self.shape.num_layers):
            found |= {f"layers.{i}.{name}": size for name, size in block.items()}
        return found | {"ln_final": "D", "lm_head": "DV"}

    def parameters(self) -> dict[str, int]:
        """Name -> bytes of each parameter, in the order of the state dict."""
        return {name: self.size(letters) for name, letters in self._weights.items()}

    def state(self) -> dict[str, int]:
        """Name -> bytes of what the optimizer keeps: two moments, and a counter for each tensor."""
        found = {}
        for name, size in self.parameters().items():
            found |= {f"{name}.step": 4, f"{name}.m": size, f"{name}.v": size}
        return found

    def standing(self) -> dict[str, int]:
        """Bytes by category that are there when the step begins: parameters with RoPE's two tables,
        the optimizer's state, the batch and its targets."""
        found = dict.fromkeys(CATEGORIES, 0)
        found[PARAMETERS] = sum(self.parameters().values()) + 4 * self.context * self.shape.head_dim
        if self.mode == "train-step" and not self.first:
            found[OPTIMIZER] = sum(self.state().values())
        if self._adds:
            found[GRADIENTS] = sum(self.parameters().values())
        found[OTHER] = 2 * self.batch * self.context * 8
        return found

    def events(self) -> tuple[Event, ...]:
        """The step from its beginning until all that it made, but the state, is dropped."""
        return _events(self)

    def _played(self) -> tuple[Event, ...]:
        alive: dict[str, tuple[str, str, bool]] = {}
        played: list[tuple[bool, str, str, str, bool]] = []
        ended: dict[int, str] = {}
        numbers: dict[str, int] = {}
        keeps = self.mode != "inference"
        for phase, score in self._phases():
            for token in score.split():
                name, _, size = token[1:].partition(":")
                if token[0] == "+":
                    saved = keeps and (size[-1] == "*" or size[-1] == "'" and not self._narrow)
                    size = size.rstrip("*'")
                    alive[name], numbers[name] = (size, phase, saved), len(played)
                    played.append((True, name, size, phase, saved))
                elif not (alive[name][2] and phase in ("forward", "loss")):
                    size, _, saved = alive.pop(name)
                    ended[numbers[name]] = phase
                    played.append((False, name, size, phase, saved))
        # What is left goes when Python lets go of the step's result.
        for name, (size, _, saved) in alive.items():
            if not name.endswith((".m", ".v", ".step", ".grad")):
                played.append((False, name, size, "", saved))
        category: dict[str, str] = {}
        sizes = {size: self.size(size) for _, _, size, _, _ in played}
        events = []
        for number, (made, name, size, phase, saved) in enumerate(played):
            if made:
                within = ended.get(number) == phase
                category[name] = _category(name, saved, within)
            events.append(Event(made, name, sizes[size], phase, category[name]))
        return tuple(events)

    @property
    def _adds(self) -> bool:
        """Whether a backward adds to gradients that are there."""
        return self.mode in ("forward-backward", "train-step") and not (self.fresh or self.first)

    def _gradient(self, weight: str) -> str:
        return "added" if self._adds else f"^{weight}.grad"

    @property
    def _added(self) -> str:
        return "-added " if self._adds else ""

    @property
    def _narrow(self) -> bool:
        return self.precision == "bf16"

    def _phases(self) -> Iterator[tuple[str, str]]:
        layers = range(self.shape.num_layers)
        # Logits live on as the step's result.
        head = self._linear("lm_head", "DV", "norm", "logits", "l")
        head = _named(f"{NORM}{head}-norm -@x{len(layers)}", "last")
        yield "forward", "+x0:u* " + "".join(map(self._block, layers)) + head
        if self.mode in ("inference", "forward"):
            return
        wide = "+wide:l " if self._narrow else ""
        yield "loss", f"{wide}+logp:l* +loss:1 +weight:1* {'-wide' if wide else ''} -last/logits"
        back = self._linear_back("lm_head", "DV", "dlogits", "norm", "dnorm", last=True)
        back = "+dlogits16:l.2 -dlogits " + back.replace("dlogits ", "dlogits16 ") if wide else back
        norm = self._norm_back("ln_final", f"@x{len(layers)}", joins=False)
        yield "backward", (
            "+dloss:1 +dlogp:l -weight +last/dlogits:l -dlogp -logp "
            + _named(back + norm, "last")
            + "".join(map(self._block_back, reversed(layers)))
            + _named(f"+{self._gradient('token_embeddings')}:DV -@dy {self._added}-@dloss", "first")
        )
        drop = "".join(f"-{name}.grad " for name in self._weights if self.fresh)
        if self.mode == "forward-backward":
            yield "", drop
            return
        state = "".join(f"+{n}.step:1 +{n}.m:{s} +{n}.v:{s} " for n, s in self._weights.items())
        yield "optimizer", (state if self.first else "") + drop

    def _linear(self, weight: str, size: str, x: str, out: str, letter: str) -> str:
        """``out = weight(x)``; under autocast of copies of both, unless x is narrow already."""
        if not self._narrow:
            return f"+{out}:{letter} "
        if x in ("o", "product"):
            return f"+{weight}.16:{size}.2* +{out}:{letter}.2 "
        return f"+{weight}.16:{size}.2* +{weight}.x:u.2* +{out}:{letter}.2 -{weight}.x "

    def _linear_back(self, weight: str, size: str, dout: str, x: str, dx: str, *,
                     letter: str = "u", last: bool = False, join: str = "") -> str:  # fmt: skip
        """The gradients of weight and input. ``last`` drops the float32 input, shared by others;
        ``join`` is what is done with dx before the weight's gradient gets its 32 bits."""
        grad, done = f"+{self._gradient(weight)}:{size} ", f"-{dout} " if dout else ""
        if not self._narrow:
            dropped = f"-{x} " if last else ""
            return f"{grad}+{dx}:{letter} {done}{dropped}{join}{self._added}"
        made = f"+dw16:{size}.2 "
        if x in ("o", "product"):
            dropped = f"-{x} " if last else ""
            return f"{made}+{dx}:{letter}.2 {done}-{weight}.16 {dropped}{grad}-dw16 {self._added}"
        return (f"{made}+d16:u.2 {done}-{weight}.16 -{weight}.x +{dx}:u -d16 {join}{grad}"
                f"-dw16 {self._added}")  # fmt: skip

    def _norm_back(self, gain: str, x: str, joins: bool = True) -> str:
        """Back through a norm; with ``joins`` onto the gradient of the residual stream."""
        total = SUM.format(dx="joined" if joins else "dx")
        return NORM_BACK.format(gain=self._gradient(gain), added=self._added, x=x, sum=total,
                                join=JOIN if joins else "")  # fmt: skip

    def _turn(self, given: str, made: str) -> str:
        if not self._narrow:
            return TURN.format(make=f"+{made}:u*")
        return f"+given:u {TURN.format(make='+turned:u')}+{made}:u.2* -turned -given "

    def _turn_back(self, name: str) -> str:
        if not self._narrow:
            return TURN_BACK.format(given=name, make=f"+{name}0:u")
        turned = TURN_BACK.format(given="given", make="+turned:u")
        return f"+given:u -{name} {turned}+{name}0:u.2 -turned "

    def _block(self, i: int) -> str:
        """The forward of a block, from x to the next block's x."""
        half = ".2" if self._narrow else ""
        eager = self.attention == "eager"
        attn = NORM
        for name in "qkv":
            attn += self._linear(f"attn.{name}_proj", "DD", "norm", f"{name}0", "u")
        if not eager:  # saved as it is, where eager saves a copy
            attn = attn.replace(f"+v0:u{half} ", f"+v0:u{half}* ")
        attn += self._turn("q0", "q") + self._turn("k0", "k") + "-q0 -k0 "
        attn += (EAGER if eager else FLASH)[self.precision]
        attn += self._linear("attn.output_proj", "DD", "o", "out", "u")
        attn += ("-heads " if eager else "") + f"-o -v0 -q -k -norm +@y{i}:u* -out "
        ffn = NORM + self._linear("ffn.w1", "DF", "norm", "gate", "g")
        ffn += self._linear("ffn.w3", "DF", "norm", "value", "g")
        ffn = ffn.replace(f"+gate:g{half} ", f"+gate:g{half}* ")
        ffn = ffn.replace(f"+value:g{half} ", f"+value:g{half}* ")
        ffn += f"+silu:g{half}* +product:g{half}* -silu "
        ffn += self._linear("ffn.w2", "DF", "product", "down", "u")
        ffn += f"-product -gate -value -norm +@x{i + 1}:u* -down -@y{i} -@x{i} "
        return _named(attn, f"{i}a", i) + _named(ffn, f"{i}f", i)

    def _block_back(self, i: int) -> str:
        """The backward of a block, from the gradient dy of its result to that of its input."""
        half = ".2" if self._narrow else ""
        start = "+dy16:u.2 " if self._narrow else ""
        dout = "dy16" if self._narrow else ""
        ffn = start + self._linear_back("ffn.w2", "DF", dout, "product", "dproduct", letter="g",
                                        last=True)  # fmt: skip
        ffn += f"+dsilu:g{half} +dvalue:g{half} -value -silu -dproduct +dgate:g{half} -gate -dsilu "
        ffn += self._linear_back("ffn.w3", "DF", "dvalue", "norm", "d3")
        ffn += self._linear_back("ffn.w1", "DF", "dgate", "norm", "d1", last=True,
                                 join="+dnorm:u -d3 -d1 ")  # fmt: skip
        ffn += self._norm_back("ln2", f"@y{i}")
        eager = self.attention == "eager"
        attn = start + self._linear_back("attn.output_proj", "DD", dout, "o", "do", last=eager)
        attn += (EAGER_BACK if eager else FLASH_BACK)[self.precision].format(
            cuda="+weighted:s" if self.cuda else "", ended="-weighted" if self.cuda else ""
        )
        attn += self._turn_back("dq") + self._turn_back("dk")
        attn += f"+dqs:u{half} -dq0 +dks:u{half} -dk0 "
        attn += f"+dvs:u{half} -dv " if eager else ""
        attn += self._linear_back("attn.v_proj", "DD", "dvs" if eager else "dv", "norm", "dn1")
        attn += self._linear_back("attn.k_proj", "DD", "dks", "norm", "dn2",
                                  join="+dn3:u -dn1 -dn2 ")  # fmt: skip
        attn += self._linear_back("attn.q_proj", "DD", "dqs", "norm", "dn4", last=True,
                                  join="+dnorm:u -dn3 -dn4 ")  # fmt: skip
        attn += self._norm_back("ln1", f"@x{i}")
        return _named(ffn, f"{i}f", i) + _named(attn, f"{i}a", i)


@lru_cache(maxsize=8)  # what is asked of a step comes one after another
def _events(step: StepMemory) -> tuple[Event, ...]:
    return step._played()


def _named(score: str, where: str, block: int | None = None) -> str:
    """The score with names of their own: ``@`` is the model's, ``^`` a parameter's."""
    prefix = "" if block is None else f"layers.{block}."
    tokens = []
    for token in score.split():
        sign, name = token[0], token[1:]
        if name[0] == "@":
            name = name[1:]
        elif name[0] == "^":
            name = prefix + name[1:]
        else:
            name = f"{where}/{name}"
        tokens.append(sign + name)
    return " ".join(tokens) + " "


def _category(name: str, saved: bool, within: bool) -> str:
    if name.endswith(".grad"):
        return GRADIENTS
    if name.endswith((".m", ".v", ".step")):
        return OPTIMIZER
    if saved:
        return SAVED
    return TEMPORARIES if within else OTHER
