"""Draw the launch queue: what a trace's strips show, in a few boxes."""

from a2lib.report.drawing import Drawing, box, stroke, text

PALE, BLUE, GREY, BLACK = "fill: #eeeeee", "fill: #0072b2", "fill: #808080", "fill: #000000"
PYTHON_Y, GPU_Y, HIGH = 22, 86, 22  # upper edges of the two rows, and their height


def rows_of_two(top: float = 0) -> list[str]:
    """Return the names of the rows: Python launches, the GPU runs."""
    return [
        text(2, top + PYTHON_Y + 15, "Python"),
        text(2, top + GPU_Y + 15, "GPU"),
    ]


def arrow(launch: float, start: float, top: float = 0) -> str:
    """Return a line from a launch to the start of its kernel."""
    path = f"M{launch:g} {top + PYTHON_Y + HIGH:g} L{start:g} {top + GPU_Y:g}"
    return stroke(path, "#555555", 1.0)


def queue() -> Drawing:
    """Draw a forward's last kernels that run while Python is already in the backward."""
    elements = rows_of_two()
    for x, width, name in ((62, 104, "forward"), (168, 150, "backward")):
        elements.append(box(x, PYTHON_Y, width, HIGH, PALE, name))
    for i in range(12):
        launch, start, width = 68 + 20 * i, 76 + 30 * i, 28
        if i > 4:
            launch, start, width = 174 + 20 * (i - 5), 226 + 18 * (i - 5), 16
        elements.append(box(start, GPU_Y, width, HIGH, BLUE if i < 5 else GREY))
        elements.append(stroke(f"M{launch} 40 V48", "#000000", 1.6))
        if i in (0, 3, 4, 11):
            elements.append(arrow(launch, start + 2))
    elements.append(stroke("M168 114 V118 H224 V114", "#555555", 1.0))
    words = "launched in the forward, run during the backward"
    return Drawing([*elements, text(196, 132, words, anchor="middle")], 140)


def fed_and_starved() -> Drawing:
    """Draw short kernels that wait for their launches, and long ones whose launches wait."""
    elements = [text(2, 14, "Short kernels: each begins when it is launched", bold=True)]
    elements += rows_of_two()
    for i in range(5):
        launch = 60 + 58 * i
        elements.append(box(launch, PYTHON_Y, 52, HIGH, PALE, "launch"))
        elements.append(box(launch + 54, GPU_Y, 14, HIGH, BLUE))
        elements.append(arrow(launch + 52, launch + 54))
    elements.append(stroke("M130 114 V118 H170 V114", "#555555", 1.0))
    elements.append(text(150, 132, "idle", anchor="middle"))
    top = 146
    elements.append(text(2, top + 14, "Long kernels: launches wait in the queue", bold=True))
    elements += rows_of_two(top)
    for i in range(5):
        elements.append(box(60 + 32 * i, top + PYTHON_Y, 30, HIGH, PALE))
        elements.append(box(92 + 52 * i, top + GPU_Y, 51, HIGH, BLUE))
        elements.append(arrow(90 + 32 * i, 94 + 52 * i, top))
    words = "no gap: Python is ahead"
    return Drawing([*elements, text(222, top + 132, words, anchor="middle")], top + 140)


def full_queue(depth: str) -> Drawing:
    """Draw a launch that blocks until a kernel ends; ``depth``: how many launches are queued."""
    elements = rows_of_two()
    for i in range(3):
        elements.append(box(60 + 14 * i, PYTHON_Y, 12, HIGH, PALE))
    elements.append(box(102, PYTHON_Y, 146, HIGH, BLACK))
    elements.append(text(175, 14, "blocked: the queue is full", anchor="middle"))
    for i in range(3):
        elements.append(box(250 + 14 * i, PYTHON_Y, 12, HIGH, PALE))
    elements.append(text(240, 66, f"about {depth} launches in the queue", anchor="end"))
    for x, width in ((60, 52), (114, 132), (248, 96)):
        elements.append(box(x, GPU_Y, width, HIGH, BLUE))
    elements.append(stroke("M247 84 V46", "#555555", 1.2, "; stroke-dasharray: 3 3"))
    words = "a kernel ends, one place is free, the launch returns"
    return Drawing([*elements, text(196, 128, words, anchor="middle")], 136)
