"""Time the Transformer's training step, for the experiments that are not in notebooks yet.

    from a2lib.experiments.workload import Config, run
    result = run(Config(size="small", context=256, mode="train-step", precision="bf16"))
    result.summary()["backward"].mean_ms

Importing this needs no torch; running does.
"""

from a2lib.experiments.workload.config import MODES, PHASES, Config
from a2lib.experiments.workload.result import Result, StepTimes, Summary
from a2lib.experiments.workload.run import check_here, run

__all__ = ["MODES", "PHASES", "Config", "Result", "StepTimes", "Summary", "check_here", "run"]
