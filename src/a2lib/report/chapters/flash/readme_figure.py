"""Write the README's picture from the committed data.

    python -m a2lib.report.chapters.flash.readme_figure
"""

from __future__ import annotations

import sys
from pathlib import Path

from a2lib.paths import ROOT, data_dir
from a2lib.report.chapters.flash.figures import headline
from a2lib.report.chapters.flash.rows import Flash

PICTURE = ROOT / "book" / "_static" / "flash-e2e.png"


def write(file: Path = PICTURE) -> Path:
    """Draw end to end latency of the handout's sweep into a PNG.

    Raises RuntimeError where the data hold no end to end time of the published device.
    """
    flash = Flash([data_dir()])
    total = flash.handout[flash.handout["pass"] == "end_to_end"]
    if not total["ms"].notna().any():
        raise RuntimeError(f"{data_dir()}: no end to end time of an {flash.device}; nothing drawn")
    headline(flash.handout).save(file, dpi=160, metadata={"Software": None})
    return file


if __name__ == "__main__":
    try:
        print(write())
    except RuntimeError as error:
        sys.exit(str(error))
