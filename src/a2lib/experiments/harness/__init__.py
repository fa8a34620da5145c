"""What every section of the report needs to be measured; it names none of them. The names that an
experiment is written with are here."""

from a2lib.experiments.harness import parameters, view
from a2lib.experiments.harness.experiment import Experiment, Run, Table
from a2lib.experiments.harness.ranks import RankJob, Ranks
from a2lib.experiments.harness.sweep import Key, Task
from a2lib.experiments.harness.view import Plot
from a2lib.experiments.harness.worker import Job, Row, free_memory

__all__ = ["Experiment", "Job", "Key", "Plot", "RankJob", "Ranks", "Row", "Run", "Table", "Task"]
__all__ += ["free_memory", "parameters", "view"]
