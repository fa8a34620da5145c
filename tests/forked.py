"""Scripts in processes that have PyTorch already: forked from a server that imported it once.

To start Python and import PyTorch takes longer than most of the scripts that the tests run.
"""

import multiprocessing
import os
import runpy
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from torch.distributed import TCPStore

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    [
        "torch",
        "torch.distributed",
        "pandas",
        "matplotlib.pyplot",
        "a2lib.model",
        "a2lib.parallel.ddp",
    ]
)


@dataclass
class Done:
    """What each rank of a script printed, and the largest of their exit codes."""

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
    settings = {"CUDA_VISIBLE_DEVICES": "", "MPLBACKEND": "Agg"}
    if ranks > 1:
        # A port that is chosen here and bound in a rank may be another's by then.
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        settings |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
        settings |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
        settings["WORLD_SIZE"] = str(ranks)
    logs = [folder / f"printed-{rank}.txt" for rank in range(ranks)]
    processes = []
    for rank, log in enumerate(logs):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks > 1 else {}
        values = str(script), arguments, str(folder), settings | place, str(log)
        processes.append(_CONTEXT.Process(target=_run, args=values))
    for process in processes:
        process.start()
    end = time.monotonic() + seconds
    for process in processes:
        process.join(max(0, end - time.monotonic()))
    late = [process for process in processes if process.is_alive()]
    for process in late:
        process.kill()
        process.join()
    printed = [log.read_text() for log in logs]
    if late:
        printed.append(f"not done within {seconds:g} s")
    return Done(max(abs(process.exitcode) for process in processes), printed)


def _run(script: str, arguments: tuple[str, ...], folder: str, settings: dict, log: str) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)
    os.chdir(folder)
    os.environ.pop("TRITON_INTERPRET", None)
    os.environ.update(settings)
    import torch

    torch.set_num_threads(1)
    sys.argv = [script, *arguments]
    sys.path.insert(0, os.path.dirname(script))
    runpy.run_path(script, run_name="__main__")
