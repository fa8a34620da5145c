"""A process that launches, and is killed while its ranks stand still: python killed.py FOLDER."""

import sys

from a2lib.parallel import launch

if __name__ == "__main__":
    launch(
        "launched:fails",
        {"how": "stands still", "pids": sys.argv[1]},
        processes=2,
        time_limit_s=300,
        device=None,
    )
