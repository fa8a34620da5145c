"""Without a GPU the Triton kernels run in Triton's interpreter, decided before any import."""

import gc
import os

# Work this small waits longer for a second thread than it takes alone, here and in what is started.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest  # noqa: E402
import torch  # noqa: E402
from hypothesis import settings  # noqa: E402

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


@pytest.fixture
def no_garbage():
    """For a test that counts bytes on the GPU: a cycle that an earlier test left, such as a
    traceback, would be there before the count and collected after."""
    gc.collect()
    torch.cuda.empty_cache()  # a cached block may be larger than what is asked of it


@pytest.fixture
def configured():
    """The switches of a measuring process, for one test: they would refuse a later one to compile
    again."""
    import torch._dynamo
    import torch._functorch.config
    import torch._inductor.config

    from a2lib.experiments.flash import peers

    modules = torch._dynamo.config, torch._functorch.config, torch._inductor.config
    before = [module.get_config_copy() for module in modules]
    precision = torch.get_float32_matmul_precision()
    torch._dynamo.reset()
    peers.configure()
    yield
    torch.set_float32_matmul_precision(precision)
    for module, switches in zip(modules, before, strict=True):
        for name, value in module.get_config_copy().items():
            if value != switches[name]:
                setattr(module, name, switches[name])
    torch._dynamo.reset()
    assert [module.get_config_copy() for module in modules] == before


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(items):
    # File by file, the slow tests of every file before all others: no worker is alone with a long
    # one at the end, and a fixture of a module is made once.
    items.sort(key=lambda item: "slow" not in item.keywords)
    for item in items:
        if not item.get_closest_marker("xdist_group"):
            file = item.nodeid.partition(".py::")[0].removeprefix("tests/")
            slow = "-slow" if "slow" in item.keywords else ""
            item.add_marker(pytest.mark.xdist_group(file + slow))
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))
