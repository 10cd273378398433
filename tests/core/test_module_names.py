"""Modules with two names."""

import inspect

import pytest

from experiments import flame_moe
from moelib.core.config_types import resolve_reference
from moelib.core.module_names import find_module


@pytest.mark.parametrize("package", ["experiments", "moelib_experiments"])
def test_named_configs_are_found_under_the_name_of_repository_and_wheel(package):
    # An editable installation has both names; otherwise one of them stands for the other.
    found = find_module(f"{package}.flame_moe")
    assert found in ("experiments.flame_moe", "moelib_experiments.flame_moe")
    config = resolve_reference(f"{package}.flame_moe:tiny")
    assert inspect.getsourcefile(config) == flame_moe.__file__


@pytest.mark.parametrize("name", ["experiments.nothing", "json.nothing", "json.decoder.nothing"])
def test_a_module_that_does_not_exist_is_not_found(name):
    assert find_module(name) is None
