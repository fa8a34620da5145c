"""The page that sets "Parallelism on paper" beside hardware: every sentence is chosen from data.

``rows.Beside`` holds the rows and puts the formulas' predictions beside them; ``answer`` (the first
screen, thresholds), ``compared`` (all times), ``drawn`` (the figures), ``links`` (the planner with
the links that collectives were fitted to) and ``local`` say what follows. What arithmetic alone
says is there without rows.
"""

from a2lib.report.chapters.parallelism_measured.rows import Beside

__all__ = ["Beside"]
