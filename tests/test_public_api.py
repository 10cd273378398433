"""The public functions of `moelib`: lazy, documented, and hidden by no module."""

import ast
import importlib
import inspect
import os
import pathlib
import pkgutil
import subprocess
import sys

import pytest

import moelib

FUNCTIONS = [name for name in moelib.__all__ if name != "__version__"]
TREE = ast.parse(pathlib.Path(moelib.__file__).read_text())


def test_functions_are_listed_once_for_people_and_for_type_checkers():
    typed = next(node for node in TREE.body if isinstance(node, ast.If))
    imported = {n.name: node.module for node in typed.body for n in node.names}
    assert imported == moelib._MODULES
    assert set(FUNCTIONS) == set(imported)
    assert set(moelib.__all__) <= set(dir(moelib))


def test_no_function_has_the_name_of_a_module():
    assert not set(moelib.__all__) & {
        module.name for module in pkgutil.iter_modules(moelib.__path__)
    }


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_are_documented_and_stay_after_imports_of_modules(name):
    importlib.import_module(moelib._MODULES[name])
    function = getattr(moelib, name)
    text = inspect.getdoc(function) or ""
    if inspect.isclass(function):
        assert text
        return
    assert inspect.isfunction(function)
    for parameter in inspect.signature(function).parameters:
        assert f"{parameter}: " in text, f"{name} does not document {parameter}"


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no_such_function"):
        _ = moelib.no_such_function


ORDER = "--xla_cpu_enable_concurrency_optimized_scheduler"


@pytest.mark.parametrize(
    ("own", "want"),
    [
        ("", f"{ORDER}=false"),
        ("--xla_cpu_enable_fast_math=false", f"--xla_cpu_enable_fast_math=false {ORDER}=false"),
        (f"{ORDER}=true", f"{ORDER}=true"),
    ],
)
def test_collectives_of_cpus_have_one_order_unless_the_user_says_otherwise(own, want):
    script = "import moelib, os; print(os.environ['XLA_FLAGS'])"
    assert printed(script, XLA_FLAGS=own) == want


def printed(script, **environment):
    """Returns what a Python process prints that has these variables in its environment."""
    command, environment = [sys.executable, "-c", script], os.environ | environment
    got = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return got.stdout.strip()


@pytest.mark.parametrize(
    ("environment", "more"),
    [
        ({"JAX_NUM_CPU_DEVICES": "64"}, ""),
        ({"XLA_FLAGS": "--xla_force_host_platform_device_count=64"}, ""),
        ({"JAX_NUM_CPU_DEVICES": "64", "PJRT_NPROC": "4"}, ""),
        ({}, "from moelib.runtime import simulated; simulated.simulate_devices(64); "),
    ],
)
def test_each_simulated_device_has_threads_to_wait_in_several_collectives(environment, more):
    script = f"import moelib, os; {more}print(os.environ['PJRT_NPROC'])"
    unset = {"JAX_NUM_CPU_DEVICES": "1", "XLA_FLAGS": "", "PJRT_NPROC": ""}
    assert int(printed(script, **unset | environment)) >= 8 * 64


def test_a_single_device_has_no_more_threads_than_cores():
    script = "import moelib, os; print(os.environ['PJRT_NPROC'])"
    assert printed(script, JAX_NUM_CPU_DEVICES="1", XLA_FLAGS="", PJRT_NPROC="") == ""
