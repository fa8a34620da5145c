import subprocess
import sys
from types import SimpleNamespace

import forked
import pytest

from a2lib import lab


@pytest.fixture
def forked_workers(monkeypatch):
    """A sweep's processes have PyTorch already. How it starts real ones is tested in tests/lab."""
    names = SimpleNamespace(**{**vars(subprocess), "Popen": forked.Worker})
    monkeypatch.setattr(sys.modules[lab.sweep.__module__], "subprocess", names)
