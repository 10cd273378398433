"""Code of a model: what ends it, and that it is not run unasked."""

import pathlib
import time

import pytest

from moelib.core.errors import UserError
from moelib.tasks.code_reward import run_code


def test_code_with_its_tests_passes_or_not():
    code = "def add(a, b):\n    return a + b\n"
    assert run_code(f"{code}assert add(2, 3) == 5", allow=True) == (True, "")
    failed = run_code(f"{code}assert add(2, 3) == 6", allow=True)
    assert not failed.passed
    assert "AssertionError" in failed.output


@pytest.mark.parametrize(
    "code",
    [
        "while True: pass",
        "x = bytearray(1 << 30)",
        "import time; time.sleep(100)",
        "open('file', 'wb').write(bytes(1 << 22))",
        "print('x' * (1 << 22))",
        "import os; os._exit(1)",
        "import os; os._exit(0)\nassert False",
        "import sys; sys.exit(0)\nassert False",
        "raise SystemExit\nassert False",
        "import numpy",
        "import os; os.environ['HOME']",
        "def broken(",
    ],
)
def test_code_beyond_a_limit_fails(code):
    assert not run_code(code, allow=True, seconds=1).passed


def test_what_it_prints_is_kept_in_part():
    found = run_code("print('a' * 20_000)", allow=True)
    assert found.passed
    assert len(found.output) == 10_000


def test_processes_of_the_code_end_with_it(tmp_path):
    file = tmp_path / "late"
    child = f"import time; time.sleep(1); open({str(file)!r}, 'w')"
    code = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {child!r}])"
    assert run_code(code, allow=True).passed
    time.sleep(1.5)
    assert not pathlib.Path(file).exists()


@pytest.mark.parametrize(
    ("fields", "message"), [({}, "allow=True"), ({"allow": True, "seconds": 0}, "limits above 0")]
)
def test_it_is_off_by_default(fields, message):
    with pytest.raises(UserError, match=message):
        run_code("", **fields)
