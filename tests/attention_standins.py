"""Stands in for compiled kernels: every launch, whichever way it came, is logged."""

from a2lib.attention import dispatch, launches, tiles


class Kernel:
    """Logs (its name, programs, arguments); only the order of its arguments matters here: tensors
    or their addresses, then numbers, then constants."""

    packed_metadata, arg_names, function = (), (), None

    def __init__(self, name, log):
        self.name, self.log = name, log

    def __getitem__(self, grid):
        return lambda *args, **named: self.log.append((self.name, grid[0], args)) or self

    def run(self, n_programs, _y, _z, *given):
        """Log a launch as PyTorch's compiler makes it: before the arguments stand six others."""
        self.log.append((self.name, n_programs, given[6:]))


def stand_in(monkeypatch, log):
    """For every kernel; nothing is kept from test to test."""
    monkeypatch.setattr(launches, "_kept", {})
    monkeypatch.setattr(launches, "_interpreted", lambda: True)
    monkeypatch.setattr(launches, "kernel_of", lambda name: Kernel(name, log))


def watch_steps(monkeypatch, steps, launch=True):
    """Have each ``forms.Step`` that is launched the long way put into ``steps``."""
    real = launches._launch_steps

    def watch(new, *rest):
        steps.extend(new)
        return real(new, *rest) if launch else [None] * len(new)

    monkeypatch.setattr(launches, "_launch_steps", watch)


def use_tile(monkeypatch, key, tile):
    """Have the table choose one tile."""
    kernel, precision, columns = key
    row = tiles.Row(kernel, precision, (columns,), tiles.Tile(*tile))
    monkeypatch.setitem(tiles.TILES, key, [row])


def call(dtype="bf16", heads=16, n=1024, d=64, causal=True, **more):
    """Return a call of self-attention, of one sequence unless said."""
    sizes = {"batch": 1, "heads": heads, "kv_heads": heads, "n_queries": n, "n_keys": n}
    return dispatch.Call(dtype, **{**sizes, "head_dim": d, "causal": causal, **more})


def run(q, k, v, causal=True, scale=None, needs=(True, True, True)):
    """Both passes' tensors by name."""
    o, lse = launches.forward(q, k, v, causal, scale)
    dq, dk, dv = launches.backward(o, q, k, v, o, lse, causal, scale, needs)
    return dict(q=q, k=k, v=v, o=o, lse=lse, dq=dq, dk=dk, dv=dv)
