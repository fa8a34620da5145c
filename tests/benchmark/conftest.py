"""The smallest model, and the command on it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from a2lib.benchmark import Config

SOURCE = str(Path(__file__).resolve().parents[2] / "src")
TINY = {
    "d_model": 8, "d_ff": 12, "num_layers": 2, "num_heads": 2, "vocab_size": 11, "context": 6,
    "batch": 2, "warmup": 1, "steps": 2, "device": "cpu",
}  # fmt: skip


@pytest.fixture(autouse=True)
def one_thread():
    """Work this small waits longer for a second thread than it takes alone."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def tiny():
    """A Config of the smallest model; options by name replace its own."""
    return lambda **options: Config(**{**TINY, **options})


@pytest.fixture
def tiny_arguments():
    """The same as options of the command; more follow as given, and a later one wins."""

    def make(*more):
        options = [f"--{name.replace('_', '-')}={value}" for name, value in TINY.items()]
        return [*options, *map(str, more)]

    return make


@pytest.fixture
def command():
    """Start the command as a process of its own; it is ended with the test."""
    started = []

    def start(*arguments, prefix=("-m", "a2lib.benchmark"), **options):
        child = subprocess.Popen(
            [sys.executable, *prefix, *map(str, arguments)],
            env={**os.environ, "PYTHONPATH": SOURCE, "OMP_NUM_THREADS": "1"}, text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options,
        )  # fmt: skip
        started.append(child)
        return child

    yield start
    for child in started:
        child.kill()
        child.communicate()
