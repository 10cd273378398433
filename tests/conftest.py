"""The environment of all tests: eight simulated CPU devices, strict numerics, checked shapes.

Environment variables are set before JAX is imported, and subprocesses inherit them.
Tests marked `gpu` run with `JAX_PLATFORMS=cuda,cpu pytest -m gpu`.
"""

import faulthandler
import fnmatch
import gc
import logging
import os
import pathlib
import sys
import threading
import uuid
from collections.abc import Iterator

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # Errors of XLA, no greeting of TensorFlow.

# Several processes compile for TPUs at a time, without a request to a cloud's metadata server.
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")

# Every program is kept: the learner's tests take 22 s instead of 90 s.
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

# LLVM takes most of the time of tests on CPUs; unoptimized code computes the same.
if os.environ["JAX_PLATFORMS"] == "cpu":
    os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")

import jax
import jaxtyping
import pytest

from moelib.runtime import storage
from tests import runtime_types
from tests.compiled_programs import CompiledPrograms
from tests.limits import Limits

_TESTS = pathlib.Path(__file__).parent

# Shapes and types in the signatures of these packages are checked at every call, by the tests of
# these folders: a checked trace takes half as long again.
_CHECKED_PACKAGES = ("moelib.kernels", "moelib.layers", "moelib.models")
_CHECKED_FOLDERS = ("kernels", "layers", "models", "test_conftest.py")

# Folders that run optimizers: Optax mixes dtypes in its updates.
_STANDARD_PROMOTION = (
    "benchmarks",
    "learner",
    "runs",
    "tasks",
    "train",
    "cli",
    "docs",
    "end_to_end",
    "experiments",
    "operations",
    "planning",
    "verify",
)


# Files of `make test-fast`, which skips those of their tests that compile a program.
_FAST = (
    "test_*.py",
    "checkpoint/*.py",
    "cli/test_config.py",
    "cli/test_verify.py",
    "core/*.py",
    "runtime/*.py",
    "data/test_[!t]*.py",
    "docs/*.py",
    "experiments/test_named_configs.py",
    "parallel/*.py",
    "planning/h*/*.py",
    "planning/report/*.py",
    "train/test_settings.py",
    "verify/test_meshes.py",
    "verify/test_report.py",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds --fast and --run_seconds."""
    parser.addoption("--fast", action="store_true", help="run quick tests that compile no program")
    parser.addoption("--run_seconds", type=int, default=3600, help="limit of a run with -n")


def pytest_ignore_collect(collection_path: pathlib.Path, config: pytest.Config) -> bool | None:
    """Ignores files that --fast does not run."""
    if not config.getoption("--fast") or collection_path.suffix != ".py":
        return None
    path = collection_path.relative_to(_TESTS).as_posix()
    return None if any(fnmatch.fnmatchcase(path, pattern) for pattern in _FAST) else True


def _skip_compilation(event: str, **unused: object) -> None:
    del unused
    in_test = threading.current_thread() is threading.main_thread()
    if in_test and event == "/jax/compilation_cache/compile_requests_use_cache":
        pytest.skip("compiles a program")


def pytest_configure(config: pytest.Config) -> None:
    """Enables JAX's checks, the type checker for later imports, and the limits of a process."""
    limits = Limits(config)
    config.pluginmanager.register(limits)
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        config.pluginmanager.register(CompiledPrograms())
    else:  # A run whose workers answer no more.
        faulthandler.dump_traceback_later(config.getoption("run_seconds"), exit=True)
    jax.config.update("jax_numpy_rank_promotion", "raise")
    checker = f"{runtime_types.__name__}.checked"
    jaxtyping.install_import_hook(list(_CHECKED_PACKAGES), checker)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Keeps what is imported out of garbage collection; from here on, --fast skips compilation."""
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)  # A sixth of the time of tests whose programs are kept.
    if session.config.getoption("--fast"):
        jax.monitoring.register_event_listener(_skip_compilation)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Sets dtype promotion by the test's folder, and quick compilation, before fixtures run."""
    folder = item.path.relative_to(_TESTS).parts[0]
    mode = "standard" if folder in _STANDARD_PROMOTION else "strict"
    jax.config.update("jax_numpy_dtype_promotion", mode)
    jaxtyping.config.update("jaxtyping_disable", folder not in _CHECKED_FOLDERS)
    if (state := sys.modules.get("moelib.train.state")) is not None:  # A trainer's initial state.
        state._ON_CPU["xla_backend_optimization_level"] = 0


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    """A server of S3's protocol on loopback; returns its address."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    yield "http://{}:{}".format(*server.get_host_and_port())
    server.stop()


@pytest.fixture
def s3(s3_server: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of an empty bucket, whose server all packages use."""
    variables = {
        "AWS_ENDPOINT_URL": s3_server,
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    bucket = f"bucket-{uuid.uuid4().hex[:12]}"
    storage.filesystem("s3://").mkdir(bucket)
    return f"s3://{bucket}"
