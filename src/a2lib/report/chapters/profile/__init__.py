"""The chapter on what the kernels of a step are, and the pictures of a step that any trace gives.

    from a2lib.report.chapters import profile
    profile.strip("report.sqlite").save("strip.png")         # or a chrome trace of torch.profiler
    profile.step_bar("report.sqlite").save("step.png")
    profile.memory("memory.pickle").save("memory.png")       # or a pickle of _dump_snapshot

``drawing`` has those. ``rows.Profile`` holds the chapter's rows; ``answer`` (the first screen, the
top kernels, what is no product), ``timer`` (the trace beside the timer, and the host),
``estimate`` (kernels by count, their floors), ``softmax``, ``listing``, ``checks``, ``published``
and ``local`` say what follows from them. Without rows each says so.
"""

from a2lib.report.chapters.profile.drawing import CATEGORIES, KINDS, memory, step_bar, strip

__all__ = ["CATEGORIES", "KINDS", "memory", "step_bar", "strip"]
