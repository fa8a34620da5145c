"""Scripts and a sweep's workers in processes that have PyTorch already: forked from a server that
imported it once.

To start Python and import PyTorch takes longer than most of what the tests run.
"""

import gc
import multiprocessing
import os
import runpy
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from torch.distributed import TCPStore

from a2lib.lab import training, worker

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    [
        "torch",
        "torch._dynamo",
        "torch._functorch.config",
        "torch._inductor.config",
        "torch.distributed.fsdp",
        "pandas",
        "matplotlib.pyplot",
        "a2lib.lab.worker",
        "a2lib.lab.training",
        "a2lib.model",
        "a2lib.parallel.ddp",
        "a2lib.parallel.fsdp",
    ]
)
STEPS = 3


@dataclass
class Done:
    """The output of each rank of a script, and the largest of their exit codes."""

    returncode: int
    by_rank: list[str]

    @property
    def printed(self) -> str:
        return "".join(self.by_rank)


def run_script(
    script: Path, *arguments: str, folder: Path, ranks: int = 1, seconds: float = 300
) -> Done:
    """Run `python SCRIPT ARGUMENTS` in a folder, without a GPU; several ranks as torchrun's, each
    with its environment, the store being this process's."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "MPLBACKEND": "Agg"}
    environment.pop("TRITON_INTERPRET", None)
    logs = [folder / f"printed-{rank}.txt" for rank in range(ranks)]
    for log in logs:
        log.write_text("")
    processes = Ranks(_run_script, (script, arguments, folder), environment, logs)
    is_late = not processes.end_within(seconds)
    printed = [log.read_text() for log in logs]
    if is_late:
        printed.append(f"not done within {seconds:g} s")
    return Done(processes.returncode, printed)


class Ranks:
    """One process for each of `logs` that calls `function`; of several each has what torchrun says
    in its environment."""

    def __init__(self, function, arguments, environment, logs) -> None:
        self._processes = []
        if len(logs) > 1:
            # A port that is chosen here and bound in a rank may be another's by then.
            self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            environment = environment | {
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(self._store.port),
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                "TORCHELASTIC_RESTART_COUNT": "0",
                "WORLD_SIZE": str(len(logs)),
            }
        for rank, log in enumerate(logs):
            if len(logs) > 1:
                environment = environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            values = function, arguments, environment, str(log)
            process = _CONTEXT.Process(target=_begin, args=values)
            process.start()
            self._processes.append(process)

    @property
    def returncode(self) -> int:
        return max(map(abs, self._codes()))

    def _codes(self) -> list[int | None]:
        return [process.exitcode for process in self._processes]

    def end_within(self, seconds: float) -> bool:
        """Wait for all, end those that are late, and return whether there was none."""
        end = time.monotonic() + seconds
        for process in self._processes:
            process.join(max(0, end - time.monotonic()))
        in_time = True
        for process in self._processes:
            if process.is_alive():
                in_time = False
                process.kill()
                process.join()
        return in_time


class Worker(Ranks):
    """A sweep's processes, in the place of the `subprocess.Popen` that starts them; of a training
    step they time STEPS."""

    def __init__(self, command, *, stdout, env, **streams) -> None:
        ranks = 1
        for word in command:
            if word.startswith("--nproc-per-node="):
                ranks = int(word.partition("=")[2])
        folder = command[-1]
        super().__init__(_work, (Path(folder),), env, [stdout.name] * ranks)

    def poll(self) -> int | None:
        """Return the exit code once all have ended; one that failed ends the others."""
        codes = self._codes()
        if any(codes):
            self.terminate()
        if None in codes:
            return None
        return self.returncode

    def wait(self, seconds: float = 60) -> int:
        self.end_within(seconds)
        return self.returncode

    def terminate(self) -> None:
        for process in self._processes:
            process.terminate()


def _begin(function, arguments: tuple, environment: dict[str, str], log: str) -> None:
    """Call a function with this environment, and with what is printed in a file."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)
    os.environ.clear()
    os.environ.update(environment)
    gc.freeze()  # what is timed is timed after a collection, which would go through all modules
    os.fsync = lambda descriptor: None  # as in tests/conftest.py
    import torch

    torch.set_num_threads(1)
    function(*arguments)


def _work(folder: Path) -> None:
    training.STEPS = training.FEWEST = STEPS
    worker.main(folder)


def _run_script(script: Path, arguments: tuple[str, ...], folder: Path) -> None:
    os.chdir(folder)
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.parent))
    runpy.run_path(str(script), run_name="__main__")
