"""The environment of all tests: eight simulated CPU devices, strict numerics, checked shapes.

Environment variables are set before JAX is imported, and subprocesses inherit them.
Tests marked `gpu` run with `JAX_PLATFORMS=cuda,cpu pytest -m gpu`.
"""

import os
import pathlib

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # Silences TensorFlow's greeting on stderr.

# Several processes compile for TPUs at a time, without a request to a cloud's metadata server.
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")

# The persistent compilation cache: the learner's tests take 22 s instead of 90 s.
os.environ.setdefault(
    "JAX_COMPILATION_CACHE_DIR", str(pathlib.Path(__file__).parents[1] / ".cache/jax")
)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

# LLVM takes most of the time of tests on CPUs; unoptimized code computes the same.
if os.environ["JAX_PLATFORMS"] == "cpu":
    os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")

import jax
import jaxtyping
import pytest

from tests import runtime_types

_TESTS = pathlib.Path(__file__).parent

# Shapes and types in the signatures of these packages are checked at every call.
_CHECKED_PACKAGES = ("moelib.kernels", "moelib.layers", "moelib.models")

# Folders that run optimizers: Optax mixes dtypes in its updates.
_STANDARD_PROMOTION = (
    "benchmarks",
    "learner",
    "train",
    "cli",
    "end_to_end",
    "experiments",
    "planning",
    "verify",
)


def pytest_configure(config: pytest.Config) -> None:
    """Enables JAX's checks, and the type checker for later imports."""
    del config
    jax.config.update("jax_numpy_rank_promotion", "raise")
    checker = f"{runtime_types.__name__}.checked"
    jaxtyping.install_import_hook(list(_CHECKED_PACKAGES), checker)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Sets dtype promotion by the test's folder, before its fixtures run."""
    folder = item.path.relative_to(_TESTS).parts[0]
    mode = "standard" if folder in _STANDARD_PROMOTION else "strict"
    jax.config.update("jax_numpy_dtype_promotion", mode)
