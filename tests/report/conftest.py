import importlib.util
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def synthetic():
    """The module that writes invented rows in the shape of a sweep."""
    file = Path(__file__).with_name("synthetic.py")
    spec = importlib.util.spec_from_file_location("a2lib_tests_synthetic", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def complete(synthetic, tmp_path_factory):
    """A data folder with a complete synthetic sweep of the published device."""
    return synthetic.write(tmp_path_factory.mktemp("complete"))


@pytest.fixture(scope="session")
def partial(synthetic, tmp_path_factory):
    """A data folder of two implementations, bf16, up to 8,192 tokens, and no ceiling."""
    def keep(shape):
        implementation, dtype, batch, heads, seq_len, *_ = shape
        return (implementation in ("eager", "a2lib") and dtype == "bf16" and seq_len <= 8192
                and batch == heads == 1)  # fmt: skip

    return synthetic.write(tmp_path_factory.mktemp("partial"), keep=keep, ceiling=False)
