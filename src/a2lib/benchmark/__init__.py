"""Time the Transformer's training step, from a terminal or a notebook, with or without a profiler.

    python -m a2lib.benchmark --size small --context 256 --mode train-step --precision bf16

    from a2lib.benchmark import Config, run
    result = run(Config(size="small", context=256, mode="train-step", precision="bf16"))
    result.summary()["backward"].mean_ms

Importing this needs no torch; running does.
"""

from a2lib.benchmark.config import MODES, PHASES, Config
from a2lib.benchmark.result import Result, StepTimes, Summary
from a2lib.benchmark.run import check_here, run

__all__ = ["MODES", "PHASES", "Config", "Result", "StepTimes", "Summary", "check_here", "run"]
