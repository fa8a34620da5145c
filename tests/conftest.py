"""Without a GPU the Triton kernels run in Triton's interpreter, decided before any import."""

import os

import pytest
import torch
from hypothesis import settings

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# An interpreted kernel takes what it takes; hypothesis' deadline is about speed alone.
settings.register_profile("a2lib", deadline=None, max_examples=25, print_blob=True)
settings.load_profile("a2lib")


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))
