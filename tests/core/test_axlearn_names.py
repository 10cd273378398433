from moelib.core import axlearn_names
from moelib.core.config import Configurable, config_class


class Trainer(Configurable):
    @config_class
    class Config(Configurable.Config):
        max_step: int = 1


def test_a_named_config_is_overridden():
    make = axlearn_names.with_overrides(Trainer.default_config, max_step=5)
    assert make().max_step == 5
    assert make() is not make()


def test_fields_that_a_config_lacks_are_ignored():
    cfg = axlearn_names.maybe_set_config(Trainer.default_config(), max_step=3, unheard_of=1)
    assert cfg == Trainer.default_config().set(max_step=3)
