"""What a configuration takes is told before it is tried; and what is said while it runs."""

import dataclasses
import errno
import json
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
from refusals import refused_command
from torch.profiler import profile

from a2lib.benchmark import __main__ as command
from a2lib.benchmark import run
from a2lib.benchmark.config import least_bytes
from a2lib.lab import memory
from a2lib.theory.memory.step import MODES, StepMemory, peak
from a2lib.theory.transformer import state_bytes


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("mode", MODES)
def test_a_step_takes_what_its_fullest_moment_holds(tiny, mode, device):
    for precision, attention, *counted in (
        ("fp32", "eager", "fp32", "eager"),
        ("tf32", "sdpa_flash", "fp32", "flash"),
        ("bf16", "flash", "bf16", "flash"),
    ):
        config = tiny(mode=mode, precision=precision, attention=attention)
        step = StepMemory(config.shape, 2, 6, mode, *counted)
        scores = step.sizes["scores"] if (device, attention) == ("cpu", "eager") else 0
        assert least_bytes(config, device) == peak(step).total - scores


UNCOUNTED = {"compile": True, "compile_blocks": True, "checkpointing": "block"}
UNCOUNTED |= {"precision": "bf16_weights", "mode": "overlapped-step", "autocast_cache": False}
UNCOUNTED |= {"attention": "sdpa_math"}


@pytest.mark.parametrize("option", UNCOUNTED)
def test_what_is_not_counted_takes_its_state(tiny, option):
    config = tiny(d_model=512, d_ff=2048, **{option: UNCOUNTED[option]})
    state = state_bytes(config.shape)
    plain = peak(StepMemory(config.shape, config.batch, config.context)).total
    assert state.parameters < least_bytes(config) <= plain
    wide = dataclasses.replace(config, vocab_size=4000, context=2**16)
    assert least_bytes(wide) > 2 * 2 * 2**16 * 4000


def test_what_will_not_fit_is_refused_on_the_cpu_and_said_on_a_gpu(
    tiny_arguments, calls, monkeypatch, capsys
):
    monkeypatch.setattr(memory, "free_bytes", lambda device: 10**4)
    line = "a step takes at least 0.0 GB of memory, and 0.0 GB are left here; allowed is what fits"
    assert line in refused_command(command.main, tiny_arguments(), capsys) and "build" not in calls
    assert command.main(tiny_arguments("--device=cuda")) == 0
    out, err = capsys.readouterr()
    assert err.count("\n") == 1 and line in err and "it is tried" in err
    assert "measured steps" in out and "build" in calls


def test_a_long_run_says_where_it_is(tiny_arguments, monkeypatch, capsys):
    def slow(config, into):
        time.sleep(0.5)
        return run(config, into=into)

    monkeypatch.setattr(command, "PROGRESS_S", 0.01)
    monkeypatch.setattr(command, "run", slow)
    assert command.main(tiny_arguments("--json")) == 0
    out, err = capsys.readouterr()
    assert " s: 0 of 1 warm-up steps and 0 of 2 measured\n" in err
    assert json.loads(out)["status"] == "ok"


def written(arguments, path, capsys):
    """The one line that a command says of a file that it could not write."""
    assert command.main(arguments) == 1
    out, err = capsys.readouterr()
    assert "2 measured steps" in out and "total" in out and "Traceback" not in err
    # Where a loaded machine takes long, a line of progress stands beside it.
    (line,) = (line for line in err.splitlines() if "could not be written" in line)
    assert line.startswith(f"{command.PROGRAM}: {path} could not be written: ")
    return line


def test_a_full_device_is_a_line(tiny_arguments, calls, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "free_bytes", lambda device: 10**12)
    path = tmp_path / "full"
    path.symlink_to("/dev/full")
    line = written(tiny_arguments("--device=cuda", f"--memory-history={path}"), path, capsys)
    assert line.endswith("No space left on device")


def test_a_trace_that_is_cut_off_is_a_line(tiny_arguments, capsys, tmp_path, monkeypatch):
    path = tmp_path / "trace.json"
    for export, why in (
        (lambda _, path: Path(path).write_text('{"traceEvents": ['), "the trace is cut off"),
        (lambda _, path: Path(f"{path}.tmp").touch(), "the trace is cut off"),
        (Mock(side_effect=OSError(errno.EDQUOT, "Disk quota exceeded")), "Disk quota exceeded"),
    ):
        # Not on a device: PyTorch writes beside the path and puts that in its place.
        monkeypatch.setattr(profile, "export_chrome_trace", export)
        path.write_text("{}")  # of an earlier run
        assert written(tiny_arguments(f"--torch-profile={path}"), path, capsys).endswith(why)
