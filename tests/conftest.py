"""Without a GPU the Triton kernels run in Triton's interpreter, decided before any import."""

import os

import pytest
import torch
from hypothesis import settings

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# An interpreted kernel takes what it takes; hypothesis' deadline is about speed alone. The gate has
# the same examples every time: what `make fuzz` finds beyond them becomes an @example of its test.
settings.register_profile(
    "a2lib", deadline=None, max_examples=25, derandomize=True, database=None, print_blob=True
)
settings.register_profile("fuzz", deadline=None, max_examples=100, print_blob=True)
settings.load_profile("a2lib")


@pytest.fixture(scope="session", autouse=True)
def locks_of_their_own(tmp_path_factory):
    """Tests measure nothing that counts: they wait for nobody, and nobody for them."""
    os.environ["A2LIB_LOCKS"] = str(tmp_path_factory.mktemp("locks"))


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))
