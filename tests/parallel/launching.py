"""A process that launches, to be interrupted or killed.

The first line of its input holds the arguments of launch as JSON. The last line it prints is JSON
too: the error's class ("none"), its message, and what launches have left behind. With "daemon" it
launches in a daemon thread, and ends when its input does.
"""

import json
import os
import sys
import tempfile
import threading

from a2lib.parallel import LaunchError, launch
from a2lib.parallel.lifeline import PREFIX

if __name__ == "__main__":
    options = json.loads(sys.stdin.readline())
    if options.pop("daemon", False):
        threading.Thread(target=launch, kwargs=options, daemon=True).start()
        sys.stdin.read()
    else:
        error = None
        try:
            launch(**options)
        except LaunchError as caught:
            error = caught
        kind = type(error).__name__ if error else "none"
        text = str(error) if error else "no error"
        folders = [x for x in os.listdir(tempfile.gettempdir()) if x.startswith(PREFIX)]
        print(json.dumps([kind, text, folders]))
