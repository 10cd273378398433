import dataclasses
import inspect
import sys
import types
from collections.abc import Callable
from typing import Any, ClassVar

import pytest

from moelib.core.config import (
    REQUIRED,
    ConfigBase,
    Configurable,
    DType,
    FrozenConfigError,
    InvalidConfigClassError,
    InvalidConfigNameError,
    InvalidConfigValueError,
    MissingConfigClassDecoratorError,
    NonConfigFieldError,
    Required,
    UnknownFieldError,
    config_class,
    config_for_function,
    config_origin,
    get_named_trainer_config,
)
from moelib.core.errors import UserError
from tests.python_process import finish, start


@config_class
class Inner(ConfigBase):
    dim: int = REQUIRED
    rate: float = 0.5


@dataclasses.dataclass(frozen=True)
class Record:
    sizes: list[int]
    inner: Inner


@config_class
class Outer(ConfigBase):
    name: Required[str] = REQUIRED
    inner: Inner = Inner(dim=3)
    inners: list[Inner] = []
    by_name: dict[str, Inner] = {}
    pair: tuple[int, int] | None = None
    act: Callable[[Any], Any] = abs
    dtype: DType = "float32"
    anything: Any = None


def here() -> str:
    """Returns the file:line of the caller."""
    frame = inspect.currentframe()
    assert frame is not None
    assert frame.f_back is not None
    return f"{__file__}:{frame.f_back.f_lineno}"


def test_the_config_files_import_no_jax():
    code = (
        "import sys, moelib.core.config, moelib.core.config_text, moelib.core.config_modifier;"
        "print('jax' in sys.modules)"
    )
    assert finish(start("-c", code))[0][0].strip() == "False"


def test_a_field_is_in_a_config_by_its_name():
    assert "rate" in Inner()
    assert "rat" not in Inner()
    assert not hasattr(Inner(), "rat")
    with pytest.raises(UnknownFieldError, match=r"'rat'.*'rate'"):
        _ = Inner().rat  # pyrefly: ignore[missing-attribute]


@pytest.mark.parametrize(
    ("field", "value", "error", "named"),
    [
        ("names", 3, UnknownFieldError, r"Outer.*'names'.*'name'"),
        ("xyzzy", 3, UnknownFieldError, r"xyzzy.*act, anything, by_name"),
        ("name", 3, InvalidConfigValueError, r"Outer.name=3:.*int.*str"),
        ("name", None, InvalidConfigValueError, r"NoneType.*str"),
        ("inner", 3, InvalidConfigValueError, r"int.*Inner"),
        ("inners", [3], InvalidConfigValueError, r"\[3\]:.*list.*list\["),
        ("by_name", {1: Inner()}, InvalidConfigValueError, r"dict.*dict"),
        ("pair", (1, 2, 3), InvalidConfigValueError, r"tuple\[int, int\] \| None"),
        ("pair", (1, True), InvalidConfigValueError, "tuple"),
        ("act", 3, InvalidConfigValueError, r"int.* Callable\[\[Any\], Any\]"),
        ("dtype", "float33", InvalidConfigValueError, r"Outer.dtype: 'float33'.*'float3"),
        ("anything", {"a": (object(),)}, NonConfigFieldError, r"Outer.anything: .*cannot hold"),
        ("anything", {1.5: 2}, NonConfigFieldError, r"Outer.anything: .*has the key"),
    ],
)
def test_a_value_that_a_field_cannot_hold_is_refused_and_changes_nothing(
    field, value, error, named
):
    cfg = Outer()
    with pytest.raises(error, match=named) as refused:
        cfg.set(**{field: value})
    assert isinstance(refused.value, UserError)
    assert cfg == Outer()


def test_a_representation_has_what_differs_from_the_defaults_on_two_levels():
    cfg = Outer(name="x" * 100, inners=[Inner(dim=1, rate=2.0)] * 5, by_name={"a": Inner(dim=1)})
    assert repr(cfg) == (
        f"Outer(name='{'x' * 37}...{'x' * 38}', inners=[Inner(...), Inner(...), Inner(...), ...], "
        "by_name={'a': Inner(...)})"
    )
    assert repr(Outer(inner=Inner(dim=4))) == "Outer(inner=Inner(dim=4))"


def test_an_object_that_is_not_built_yet_has_a_representation():
    class Broken(Configurable):
        def __init__(self, cfg):
            raise ValueError(f"bad {self!r}")

    with pytest.raises(ValueError, match=r"bad <.*Broken object at"):
        Broken.default_config().instantiate()


def test_unset_required_fields_can_be_read_and_are_false():
    assert Outer().name is REQUIRED
    assert not REQUIRED


def test_a_field_takes_a_config_of_a_subclass():
    @config_class
    class Wider(Inner):
        more: int = 1

    assert Outer().set(inner=Wider(dim=1)).inner.more == 1  # pyrefly: ignore

    @config_class
    class Strict(ConfigBase):
        inner: Wider = Wider()

    with pytest.raises(InvalidConfigValueError, match="Wider"):
        Strict().set(inner=Inner())


def test_clones_share_no_container_and_no_config():
    cfg = Outer().set(
        inners=[Inner(dim=1)] * 2,
        by_name={"a": Inner(dim=2)},
        anything=[{"x": [1]}, Record([1], Inner(dim=1))],
    )
    other = cfg.clone(name="other")
    assert other.set(name="same") == cfg.set(name="same")
    other.inner.dim = 7
    other.inners[0].dim = 7
    other.inners.append(Inner())
    other.by_name["a"].dim = 7
    other.anything[0]["x"].append(7)
    other.anything[1].sizes.append(2)
    other.anything[1].inner.dim = 2
    assert (cfg.inner.dim, cfg.by_name["a"].dim) == (3, 2)
    assert [inner.dim for inner in cfg.inners] == [1, 1]
    assert [inner.dim for inner in other.inners[:2]] == [7, 1]  # Of one config, twice in a list.
    assert cfg.anything == [{"x": [1]}, Record([1], Inner(dim=1))]


def test_a_value_is_copied_when_it_is_set():
    inner, sizes = Inner(dim=1), [1]
    cfg = Outer().set(inner=inner, anything=(sizes, {"a": inner}, Record(sizes, inner)))
    inner.dim = 2
    sizes.append(2)
    cfg.inner.rate = 0.1
    same = Inner(dim=1)
    assert cfg.inner == Inner(dim=1, rate=0.1)
    assert cfg.anything == ([1], {"a": same}, Record([1], same))


def test_defaults_are_not_shared_between_configs():
    first = Outer()
    first.inner.dim = 9
    first.inners.append(Inner())
    assert Outer().inner.dim == 3
    assert Outer().inners == []


def test_a_frozen_config_refuses_changes_at_any_depth():
    cfg = Outer().set(inners=[Inner()], by_name={"a": Inner()}, anything=Record([], Inner()))
    cfg.freeze()
    for inner in (cfg, cfg.inner, cfg.inners[0], cfg.by_name["a"], cfg.anything.inner):
        with pytest.raises(FrozenConfigError, match=r"clone\(\)"):
            inner.set(**{next(iter(inner.keys())): REQUIRED})
    assert cfg.clone().inner.set(dim=8).dim == 8


def test_a_value_knows_the_line_that_set_it():
    cfg = Outer()
    assert cfg.origin("name") == f"default of {__name__}:Outer"
    cfg.name = "x"; line = here()  # fmt: skip # noqa: E702
    assert cfg.origin("name") == line
    cfg.inner.set(dim=4); line = here()  # fmt: skip # noqa: E702
    assert cfg.clone().inner.origin("dim") == line
    cfg.set_recursively("inner.dim", value=5); line = here()  # fmt: skip # noqa: E702
    assert cfg.inner.origin("dim") == line


def test_a_value_knows_the_flag_that_set_it():
    cfg = Outer()
    with config_origin("--set name=x"):
        cfg.set(name="x")
    cfg.set(pair=(1, 2))
    assert cfg.origin("name") == "--set name=x"
    assert cfg.origin("pair").startswith(__file__)


UNSET = object()


@pytest.mark.parametrize(
    ("base", "field", "annotation", "value", "error", "named"),
    [
        (ConfigBase, "x", int, UNSET, InvalidConfigClassError, r"Bad.x.*`= REQUIRED`"),
        (ConfigBase, "x", UNSET, 3, InvalidConfigClassError, r"Bad.x"),
        (ConfigBase, "x", UNSET, max, InvalidConfigClassError, r"Bad.x"),
        (ConfigBase, "x", int, "a", InvalidConfigClassError, r"Bad.x='a':.*str.*int"),
        (ConfigBase, "_private", int, 1, InvalidConfigNameError, r"Bad._private"),
        (ConfigBase, "clone", int, 1, InvalidConfigNameError, r"Bad.clone"),
        (Inner, "dim", UNSET, lambda self: 3, InvalidConfigClassError, r"Bad.dim.*:Inner"),
        (Inner, "dim", UNSET, property(abs), InvalidConfigClassError, r"Bad.dim.*:Inner"),
        (Inner, "dim", UNSET, 3, InvalidConfigClassError, r"Bad.dim.*:Inner"),
        (object, "x", int, 3, InvalidConfigClassError, "ConfigBase"),
    ],
)
def test_a_class_with_a_field_that_cannot_be_one_is_refused(
    base, field, annotation, value, error, named
):
    body = {"__module__": __name__, "__annotations__": {field: annotation}, field: value}
    if annotation is UNSET:
        del body["__annotations__"]
    if value is UNSET:
        del body[field]
    with pytest.raises(error, match=named):
        config_class(type("Bad", (base,), body))


def test_a_subclass_without_the_decorator_is_refused():
    class Bad(Inner):
        pass

    with pytest.raises(MissingConfigClassDecoratorError, match="Bad"):
        Bad()


def test_methods_properties_and_class_variables_of_a_config_are_no_fields():
    @config_class
    class WithMethods(Inner):
        limit: ClassVar[int] = 3

        @property
        def half(self) -> float:
            return self.dim / 2

        def twice(self) -> int:
            return 2 * self.dim

    cfg = WithMethods(dim=4)
    assert (cfg.half, cfg.twice(), cfg.limit) == (2.0, 8, 3)
    assert list(cfg.keys()) == ["dim", "rate"]


def test_a_subclass_can_change_a_default_without_moving_the_field():
    @config_class
    class Sub(Inner):
        rate: float = 0.1
        more: int = 1

    assert list(Sub().items()) == [("dim", REQUIRED), ("rate", 0.1), ("more", 1)]


def test_equal_configs_are_of_one_class_with_equal_values():
    @config_class
    class Twin(Inner):
        pass

    assert Inner(dim=1) == Inner(dim=1)
    assert Inner(dim=1) != Inner(dim=2)
    assert Inner(dim=1) != Twin(dim=1)
    assert config_for_function(here) == config_for_function(here)


def test_values_are_read_and_set_by_path():
    cfg = Outer().set(inners=[Inner(dim=1), Inner(dim=2)], by_name={"a.b": Inner(dim=3)})
    assert cfg.get_recursively("inners[1].dim") == 2
    assert cfg.get_recursively("inners.1.dim") == 2
    assert cfg.get_recursively(["inner", "dim"]) == 3
    assert cfg.get_recursively("by_name['a.b'].dim") == 3
    cfg.set_recursively("inners[1].dim", value=5)
    cfg.set_recursively(("by_name", "a.b", "dim"), value=6)
    cfg.set_recursively("inners[0]", value=Inner(dim=7))
    assert [inner.dim for inner in cfg.inners] == [7, 5]
    assert cfg.by_name["a.b"].dim == 6


def test_flat_dict_holds_every_leaf_by_path_except_the_given_defaults():
    cfg = Outer().set(inner=Inner(dim=0), inners=[Inner(dim=1)], pair=(1, 2))
    flat = cfg.to_flat_dict(omit_default_values=[None, 0.5, 1])
    assert not flat.keys() & {"anything", "inner.rate", "inners[0].rate"}
    assert (flat["name"], flat["inner.dim"], flat["inners[0].dim"]) == (REQUIRED, 0, 1)
    assert flat["pair"] == (1, 2)
    visited: dict[str, Any] = {}
    cfg.visit(visited.__setitem__)
    assert visited == cfg.to_flat_dict()
    assert visited["inner.rate"] == 0.5


# -- Named configs -------------------------------------------------------------------------------


class Trainer(Configurable):
    @config_class
    class Config(Configurable.Config):
        max_step: int = 1


def experiment(**configs: Any) -> types.ModuleType:
    module = types.ModuleType("experiment")
    module.__dict__["named_trainer_configs"] = lambda: configs
    return module


def test_a_named_config_is_found():
    module = experiment(**{"moe-tiny": Trainer.default_config, "moe-large": Trainer.default_config})
    found = get_named_trainer_config("moe-tiny", config_module=module)
    assert found() == Trainer.default_config()
    with pytest.raises(InvalidConfigNameError, match=r"'moe-tinny'.*'moe-tiny'"):
        get_named_trainer_config("moe-tinny", config_module=module)
    with pytest.raises(InvalidConfigNameError, match=r"named_trainer_configs\(\)"):
        get_named_trainer_config("tiny", config_module="math")


def test_an_error_of_an_experiment_module_is_its_own(tmp_path, monkeypatch):
    (tmp_path / "experiment_with_an_error.py").write_text("import no_such_package_here\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="no_such_package_here") as error:
        get_named_trainer_config("tiny", config_module="experiment_with_an_error")
    assert error.traceback[-1].path.name == "experiment_with_an_error.py"
    assert "experiment_with_an_error" not in sys.modules
