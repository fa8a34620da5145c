"""Without a GPU the Triton kernels run in Triton's interpreter, decided before any import."""

import ctypes
import gc
import importlib.util
import multiprocessing.util
import os
import random
import signal
import subprocess
import sys
import zlib
from pathlib import Path
from types import SimpleNamespace

# A shell starts what it puts into the background deaf to Ctrl-C, which is what some tests send.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Work this small waits longer for a second thread than it takes alone, here and in what is started.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Each empty cache of Inductor's begins with half a dozen compilations that find out which vector
# instructions the CPU has. Which it would use is nothing that a test asks.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")

# What a run records of this checkout: git would be started for each of some hundred runs.
os.environ.setdefault("A2LIB_GIT", "0" * 12)

# With more, each process that compiles starts a pool of others, which import torch first.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

# matplotlib's list of fonts: one that another environment left names fonts that are gone.
os.environ["MPLCONFIGDIR"] = str(Path(__file__).resolve().parents[1] / "build" / "matplotlib")

# What tests store need not outlive the machine; each flush waits for a disk.
os.fsync = lambda descriptor: None

import pytest  # noqa: E402
import torch  # noqa: E402
from hypothesis import settings  # noqa: E402

from a2lib.paths import cache_dir, quote_torch  # noqa: E402

# There is none on a Mac.
HAS_TRITON = importlib.util.find_spec("triton") is not None

if not torch.cuda.is_available():
    if HAS_TRITON:
        os.environ["TRITON_INTERPRET"] = "1"
        import quick_interpreter

        quick_interpreter.install()

    # torch would name one folder for all that is started, where it also keeps the headers that it
    # compiled: after a worker that was killed, as tests do, the next one drops what is there.
    own = os.environ.get("PYTEST_XDIST_WORKER", "tests")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(cache_dir() / f"inductor-{own}")

quote_torch()  # of what compiles in the tests' own processes

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


@pytest.fixture(scope="session", autouse=True)
def a_short_address():
    """The socket of the server of forked.py lies in multiprocessing's folder, which is made once: a
    test that moves temporary folders into its own would make its name too long for a socket."""
    multiprocessing.util.get_temp_dir()


@pytest.fixture(scope="module", autouse=True)
def garbage_is_looked_for_among_new_objects():
    """The clock collects garbage before it times, which takes a quarter of a second where the heap
    holds all modules that tests import. What there is when a file's tests begin is left out of it.

    Not where there is a GPU: what a failed test keeps could then never give its memory back.
    """
    if not torch.cuda.is_available():
        gc.collect()
        gc.freeze()


@pytest.fixture
def python():
    """``python(code, *arguments)``: another Python with this package, ended with the test."""
    started = []

    def start(code, *arguments):
        source = str(Path(__file__).resolve().parents[1] / "src")
        path = os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH")]))
        command = [sys.executable, "-c", code, *map(str, arguments)]
        env = {**os.environ, "PYTHONPATH": path}
        pipes = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
        child = subprocess.Popen(command, env=env, text=True, stdin=subprocess.DEVNULL, **pipes)
        started.append(child)
        return child

    yield start
    for child in started:
        child.kill()
        child.communicate()


@pytest.fixture
def forked_workers(monkeypatch):
    """A sweep's processes have PyTorch already. How it starts real ones is tested in tests/lab."""
    import forked

    from a2lib.lab import processes

    names = SimpleNamespace(**{**vars(subprocess), "Popen": forked.Worker})
    monkeypatch.setattr(processes, "subprocess", names)


@pytest.fixture
def gpus(monkeypatch):
    """``gpus(n)``: so many are there."""
    return lambda n: monkeypatch.setattr("torch.cuda.device_count", lambda: n)


@pytest.fixture
def two_gpus():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")


@pytest.fixture
def plain_frames():
    """For a test that counts a step's tensors: Python's own evaluator of frames.

    Where a compiled function breaks its graph within an autograd.Function PyTorch leaves its own
    evaluator on for good (2.13). A Python function then keeps its arguments until it returns, also
    those it has put another value in the place of: a residual stream more.
    """
    python = ctypes.pythonapi
    python.PyInterpreterState_Get.restype = ctypes.c_void_p
    python._PyInterpreterState_SetEvalFrameFunc.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    python._PyInterpreterState_SetEvalFrameFunc.restype = None
    python._PyInterpreterState_SetEvalFrameFunc(
        python.PyInterpreterState_Get(), python._PyEval_EvalFrameDefault
    )


@pytest.fixture
def no_garbage(plain_frames):
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

    from a2lib.lab import inductor

    modules = torch._dynamo.config, torch._functorch.config, torch._inductor.config
    before = [module.get_config_copy() for module in modules]
    precision = torch.get_float32_matmul_precision()
    torch._dynamo.reset()
    inductor.configure()
    yield
    torch.set_float32_matmul_precision(precision)
    for module, switches in zip(modules, before, strict=True):
        for name, value in module.get_config_copy().items():
            if value != switches[name]:
                setattr(module, name, switches[name])
    torch._dynamo.reset()
    assert [module.get_config_copy() for module in modules] == before


def turn(item):
    """When a test has its turn: the file that builds the book first; the slow ones, which take
    another worker longer than the book does; those that read the book; and the quick ones last, so
    that no worker is alone with a long file.
    """
    slow = "slow" in item.keywords
    if item.path.name == "test_book.py":
        return 0
    if item.path.parent.name == "book":  # a file's tests stay together: the quick ones as well
        return 2
    return 1 if slow else 3


MARK = "mark.gpu"


def pytest_report_header():
    if not torch.cuda.is_available():
        return "no GPU here: tests/gpu is left out"


def pytest_ignore_collect(collection_path, config):
    """A machine that only measures runs `-m gpu` with little installed: what has no such test is
    not imported there. Without a GPU tests/gpu is not imported but under `-m gpu`, since 600 tests
    would be collected to be skipped."""
    if config.option.markexpr != "gpu":
        is_of_gpus = collection_path == Path(__file__).with_name("gpu")
        return True if is_of_gpus and not torch.cuda.is_available() else None
    if "tests" not in collection_path.parts:
        return None
    files = [collection_path]
    if collection_path.is_dir():
        files = collection_path.rglob("test_*.py")
    elif not collection_path.name.startswith("test_"):
        return None
    return None if any(MARK in file.read_text(encoding="utf-8") for file in files) else True


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    """Without Triton a file that imports it is skipped."""
    report = yield
    error = report.failed and report.call.excinfo.value
    missing = getattr(error, "__cause__", None) or error  # pytest tells a failed import anew
    if not HAS_TRITON and isinstance(missing, ModuleNotFoundError):
        if (missing.name or "").partition(".")[0] == "triton":
            report.outcome = "skipped"
            report.longrepr = (str(collector.path), 0, "Skipped: needs Triton")
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    """Without Triton a test of what the library refuses for want of it is skipped."""
    report = yield
    if report.failed and not HAS_TRITON and "needs Triton, which is missing" in report.longreprtext:
        report.outcome = "skipped"
        report.longrepr = (str(item.path), item.location[1], "Skipped: needs Triton")
    return report


def pytest_runtest_setup(item):
    """Without a GPU a test draws the same numbers every time, whatever its process ran before;
    `make fuzz` and GPUs draw others."""
    if not torch.cuda.is_available() and item.config.option.hypothesis_profile != "fuzz":
        seed = zlib.crc32(item.nodeid.encode())
        random.seed(seed)
        torch.manual_seed(seed)


def pytest_collection_modifyitems(items):
    items.sort(key=turn)
    for item in items:
        if item.get_closest_marker("gpu") and MARK not in item.path.read_text(encoding="utf-8"):
            raise pytest.UsageError(f"{item.path} is marked gpu without the words {MARK}")
    for item in items:
        if "triton" in item.keywords and not HAS_TRITON:
            item.add_marker(pytest.mark.skip(reason="needs Triton"))
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))
