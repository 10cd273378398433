"""Configs that name classes, functions, enum members and fields as earlier versions did."""

import inspect

import pytest

from experiments import flame_moe
from moelib.core import moved_names
from moelib.core.config import config_for_function
from moelib.core.config_parse import parse
from moelib.core.config_types import reference, resolve_reference
from moelib.data.lm_input import InputMode, LMInput
from moelib.learner.schedules import constant


def test_every_moved_name_leads_to_something():
    for name in moved_names.MOVED.values():
        assert reference(resolve_reference(name)) == name
    for owner, _ in moved_names.MOVED_FIELDS:
        resolve_reference(owner)


@pytest.fixture
def moved(monkeypatch):
    names = {"moelib.old:Rows": "moelib.data.lm_input:LMInput"}
    names["moelib.old:Mode"] = "moelib.data.lm_input:InputMode"
    names["moelib.old:flat"] = "moelib.learner.schedules:constant"
    monkeypatch.setattr(moved_names, "MOVED", names)
    fields = {
        ("moelib.data.input:Input", "rows"): "global_batch_size",
        ("moelib.data.lm_input:LMInput", "shuffle"): None,
        ("moelib.learner.schedules:constant", "rate"): "peak_lr",
    }
    monkeypatch.setattr(moved_names, "MOVED_FIELDS", fields)


@pytest.mark.usefixtures("moved")
def test_old_text_is_read_as_todays_config():
    text = "klass: moelib.old:Rows\nmode: moelib.old:Mode.EVALUATE\nrows: 4\nshuffle: True\n"
    expected = LMInput.default_config().set(mode=InputMode.EVALUATE, global_batch_size=4)
    assert parse(text) == expected
    assert parse("fn: moelib.old:flat\nrate: 0.5\n") == config_for_function(constant).set(
        peak_lr=0.5
    )


@pytest.mark.usefixtures("moved")
def test_a_class_inside_one_that_moved_is_found():
    assert resolve_reference("moelib.old:Rows.Config") is LMInput.Config


@pytest.mark.parametrize("package", ["experiments", "moelib_experiments"])
def test_named_configs_are_found_under_the_name_of_repository_and_wheel(package):
    # An editable installation has both names; otherwise one of them stands for the other.
    found = moved_names.find_module(f"{package}.flame_moe")
    assert found in ("experiments.flame_moe", "moelib_experiments.flame_moe")
    config = resolve_reference(f"{package}.flame_moe:tiny")
    assert inspect.getsourcefile(config) == flame_moe.__file__


@pytest.mark.parametrize("name", ["experiments.nothing", "json.nothing", "json.decoder.nothing"])
def test_a_module_that_does_not_exist_is_not_found(name):
    assert moved_names.find_module(name) is None
