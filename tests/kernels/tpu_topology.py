"""TPUs to compile for where there are none, in a process of its own."""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import pytest

needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu, which compiles, is not installed"
)


def compile_apart(module: str, *arguments: str) -> list[Any]:
    """Returns the JSON values, one per line, that a module prints in a process set for libtpu."""
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": "v6e-4",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)  # It cannot read programs for TPUs.
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=pathlib.Path(__file__).parents[2],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]
