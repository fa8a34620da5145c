"""A training step that several ranks take together and the ways to take it, as the tasks and the
rows have them. No torch."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from a2lib.experiments import step_parameters
from a2lib.experiments.harness import Ranks, Task, parameters
from a2lib.experiments.harness.parameters import ParameterError, count, names, parameter
from a2lib.experiments.steps import Configuration
from a2lib.lab import Section

# Bucketed, and AdamW's update of each bucket once it is the mean, while later ones travel.
UPDATING = "updating"
FSDP, FSDP2 = "fsdp", "fsdp2"
# PyTorch's, launched as their users run them. torch_ddp_view has gradient_as_bucket_view.
PEERS = ("torch_ddp", "torch_ddp_view", FSDP2)
# Whole models in FSDP's setting, and their optimizers: where only the memory is read.
WHOLE = {"ddp": "plain", "zero1": "sharded"}
SENT_DTYPES = {"fp32": 4, "bf16": 2}
# Of our buckets, and of PyTorch's.
BEST_MB, TORCH_MB = 100, 25
# On a GPU what trains fastest, on the CPU a trial.
DEFAULTS = {
    "cuda": {"model": "xl25", "batch": 4, "context": 512, "precision": "bf16",
             "attention": "flash", "compile": "blocks"},
    "cpu": {"model": "tiny", "batch": 2, "context": 16, "precision": "fp32",
            "attention": "eager", "compile": "none"},
}  # fmt: skip
HOW = ("precision", "attention", "compile")
# As the handouts have them.
PLAIN = {"precision": "fp32", "attention": "eager", "compile": "none"}
# The step whose memory is read: the first has no moments of AdamW yet, and gathers nothing ahead.
STEADY = 3
# Making, wrapping and compiling a model, or capturing steps of one.
SILENCE_S = 240


@dataclass(frozen=True)
class Way:
    """Who averages gradients or shards, and who updates: the key columns that are not the
    setting's. ``bucket_mb`` is 0 where there are no buckets."""

    wrapper: str
    bucket_mb: int = 0
    carrier: str = "backend"
    sent_dtype: str = "fp32"
    optimizer: str = "plain"

    @classmethod
    def from_key(cls, key: Mapping[str, Any]) -> Self:
        """That of a row's key."""
        return cls(**{f.name: key[f.name] for f in dataclasses.fields(cls) if f.name in key})

    @property
    def label(self) -> str:
        parts = [self.wrapper, f"{self.bucket_mb} MB" * bool(self.bucket_mb)]
        others = dataclasses.fields(self)[2:]
        parts += [value for f in others if (value := getattr(self, f.name)) != f.default]
        return " ".join(filter(None, parts))


@dataclass(frozen=True, kw_only=True)
class Setting(Configuration):
    """A training step that every one of ``ranks`` takes on a batch of its own."""

    ranks: Ranks

    @classmethod
    def usual(cls, ranks: Ranks, **given: object) -> Self:
        """That of the ranks' device, launched, with what is ``given`` in place."""
        return cls(ranks=ranks, **{**DEFAULTS[ranks.device], **given})

    def spec(self) -> dict[str, object]:
        """What the ranks make it from."""
        return {name: getattr(self, name) for name in (*DEFAULTS["cuda"], "capture")}

    def key(self, section: Section, way: Way, **more: object) -> dict[str, object]:
        """Of the row of ``way``, where ``more`` are the key columns of neither."""
        known = {**self.spec(), **vars(self.ranks), **vars(way), **more}
        return {column: known[column] for column in section.key}

    @property
    def label(self) -> str:
        how = "captured" if self.capture else "launched"
        return f"{self.model} {how} {unusual(self.spec(), self.ranks.device)}".rstrip()


def unusual(spec: Mapping[str, object], device: str) -> str:
    """What of ``HOW`` a setting has that others on ``device`` have not, in words."""
    found = [str(spec[name]) for name in HOW if spec[name] != DEFAULTS[device][name]]
    return " ".join("uncompiled" if value == "none" else value for value in found)


# What makes a usual setting with some fields in place of its own.
Usual = Callable[..., Setting]
# A sweep, what answers most questions first; a setting may come again.
Steps = Iterator[tuple[Setting, Iterable[Way]]]
# Each setting once, with its ways, in the order of measuring.
Asked = Mapping[Setting, Sequence[Way]]


def asked(given: Any, ways: Iterable[Way], sweep: Callable[[str, Usual], Steps]) -> Asked:
    """The sweep that a notebook's parameters name, or the setting, with ``ways``; without
    PyTorch's where it is captured.

    Raises ParameterError for what these ranks cannot do.
    """
    ranks = given.ranks()
    usual = functools.partial(Setting.usual, ranks)
    if given.sweep != "shape":
        if ranks.device != "cuda" or ranks.world_size < 2:
            raise ParameterError(
                f"sweep = {given.sweep!r}: allowed on two GPUs or more; shape is anywhere"
            )
        found = sweep(given.sweep, usual)
    else:
        if given.capture and ranks.device != "cuda":
            raise ParameterError("capture = True: allowed with nccl, since a CUDA graph is a GPU's")
        named = parameters.filled(given, DEFAULTS[ranks.device])
        found = [(usual(capture=given.capture, **named), ways)]
    return _merged(
        (setting, (way for way in every if not (setting.capture and way.wrapper in PEERS)))
        for setting, every in found
    )


def launched(settings: Asked, **how: object) -> Asked:
    """The same ways, not captured and with ``how`` in place: where memory is read."""
    return _merged(
        (dataclasses.replace(setting, capture=False, **how), ways)
        for setting, ways in settings.items()
    )


def _merged(found: Iterable[tuple[Setting, Iterable[Way]]]) -> Asked:
    known: dict[Setting, dict[Way, None]] = {}
    for setting, ways in found:
        known.setdefault(setting, {}).update(dict.fromkeys(ways))
    return {setting: list(ways) for setting, ways in known.items()}


def tasks(
    section: Section, settings: Asked, more: Callable[[Setting], Iterable[Mapping]] | None = None
) -> list[Task]:
    """A task for each setting. The optimizers of a wrapper take turns: they are one culprit. With
    ``more``, key columns of a setting's rows, each way is one by itself."""
    made = []
    for setting, ways in settings.items():
        rows: dict[str, tuple] = {}
        for way in ways:
            culprit = way if more else dataclasses.replace(way, optimizer="plain")
            known = more(setting) if more else [{}]
            keys = tuple(setting.key(section, way, **one) for one in known)
            rows[culprit.label] = rows.get(culprit.label, ()) + keys
        made.append(Task(setting.label, setting.spec(), rows, ranks=setting.ranks))
    return made


@dataclass(frozen=True)
class Asking(parameters.OnRanks, parameters.WithSweep):
    """The base of the parameters of those who ask; PyTorch's wrappers cannot be captured."""

    beside = parameters.OF_RANKS

    model: str = step_parameters.model("xl25", "GPUs")
    batch: int | None = count(None, "sequences a rank; None: 4 on GPUs, 2 on the CPU", 2**16)
    context: int | None = step_parameters.context(512, 16, "tokens of a sequence", "GPUs")
    capture: bool = parameter(False, "replay each step from a CUDA graph")

    def __post_init__(self) -> None:
        super().__post_init__()
        for peer in PEERS:
            if self.capture and peer in names(self.wrappers):
                raise ParameterError(f"capture = True: allowed without {peer}, which is launched")


def chosen(name: str, what: str, names: Sequence[str]) -> Any:
    """A field of ``HOW``, one of ``names``; ``what`` goes before the usual ones in its comment."""
    usual = f"auto: {DEFAULTS['cuda'][name]} on GPUs, {DEFAULTS['cpu'][name]} on the CPU"
    return parameter("auto", f"{what}; {usual}", choices=("auto", *names))
