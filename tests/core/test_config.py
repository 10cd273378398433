import sys
import types
from pathlib import Path
from typing import Any

import pytest

import moelib.core.config as config_lib
from moelib.core.config import (
    Configurable,
    InvalidConfigNameError,
    UnknownFieldError,
    config_class,
    get_named_trainer_config,
    with_overrides,
)


class Trainer(Configurable):
    @config_class
    class Config(Configurable.Config):
        max_step: int = 1


def experiment(**configs: Any) -> types.ModuleType:
    module = types.ModuleType("experiment")
    module.__dict__["named_trainer_configs"] = lambda: configs
    return module


def test_every_listed_name_is_there():
    assert [name for name in config_lib.__all__ if not hasattr(config_lib, name)] == []


def test_a_named_config_is_found():
    module = experiment(tiny=Trainer.default_config)
    assert get_named_trainer_config("tiny", config_module=module)() == Trainer.default_config()


def test_an_unknown_name_is_refused_with_the_nearest():
    module = experiment(**{"moe-tiny": Trainer.default_config, "moe-large": Trainer.default_config})
    with pytest.raises(
        InvalidConfigNameError,
        match="no config 'moe-tinny'; did you mean 'moe-tiny'",
    ):
        get_named_trainer_config("moe-tinny", config_module=module)


def test_a_module_without_configs_is_refused():
    with pytest.raises(InvalidConfigNameError, match=r"math defines no named_trainer_configs\(\)"):
        get_named_trainer_config("tiny", config_module="math")


def test_an_error_of_an_experiment_module_is_its_own(tmp_path: Path, monkeypatch: Any):
    (tmp_path / "experiment_with_an_error.py").write_text("import no_such_package_here\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="no_such_package_here") as error:
        get_named_trainer_config("tiny", config_module="experiment_with_an_error")
    assert error.traceback[-1].path.name == "experiment_with_an_error.py"
    assert "experiment_with_an_error" not in sys.modules


def test_a_config_is_made_with_other_values():
    make = with_overrides(Trainer.default_config, max_step=5)
    assert make().max_step == 5
    assert make() is not make()
    with pytest.raises(UnknownFieldError, match="no field 'max_steps'; did you mean 'max_step'"):
        with_overrides(Trainer.default_config, max_steps=5)()
