"""Names that a config file may use, and those that would undo the rule."""

import sys
import types

import pytest

from moelib.core import trusted_code
from moelib.core.config_types import reference
from moelib.core.errors import UserError
from moelib.core.trusted_code import UntrustedNameError, resolve

ALLOWED = [
    "moelib.layers.norm:RMSNorm",
    "moelib.layers.activation:Activation.SWIGLU",
    "moelib.checkpoint.policy:every_n_steps_and_last_policy",
    "moelib.core.config:InstantiableConfig",
    "experiments.flame_moe:named_trainer_configs",
    "tests.tiny:TinyModel",  # This process has imported it.
    "optax:adamw",
    "optax.contrib:schedule_free_adamw",
    "numpy:float32",
    "ml_dtypes:bfloat16",
]
REFUSED = [
    "os:system",
    "sys:exit",
    "builtins:eval",
    "pytest:main",
    "numpy:load",
    "jax.numpy:load",
    "hostile:x",
    "moelib:__builtins__",
    "moelib.runtime.files:os.replace",
    "moelib.runtime.files:write_json",
    "moelib.core.context:threading.Thread",
    "moelib.core.config:config_for_function",
    "moelib.core.config_types:resolve_reference",
    "moelib.launch:import_module",
    "moelib.cli.main:run",
    "moelib.huggingface.pretrained:save_pretrained",
    "moelib.learner.learner:Learner.__init__.__globals__",
    "moelib.layers.base:BaseLayer.__class__",
    "optax._src.base:Callable",
    "jax._src.nn.functions:partial",
    "tests.tiny:json.loads",
    "tests.tiny:os.system",
]


@pytest.mark.parametrize("name", ALLOWED)
def test_components_and_own_code_may_be_named(name):
    import tests.tiny  # noqa: F401

    assert resolve(name) is not None


@pytest.mark.parametrize("name", REFUSED)
def test_other_code_may_not_be_named(name, tmp_path, monkeypatch):
    (tmp_path / "hostile.py").write_text("raise SystemExit")
    monkeypatch.setattr(trusted_code, "_modules", set())  # Other tests allow some.
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UntrustedNameError, match=name):
        resolve(name)
    assert (
        resolve("os:system", names={"os:system": print}) is print
    )  # The user's own config has it.


def test_a_refused_standard_module_is_not_recommended():
    with pytest.raises(UntrustedNameError, match="standard library") as error:
        resolve("os:system")
    assert "--module" not in str(error.value)


@pytest.mark.parametrize("name", ["os:system", "posix:system", "sys:exit", "builtins:eval"])
def test_the_current_folder_allows_no_module_without_a_file(name, tmp_path, monkeypatch):
    monkeypatch.setattr(trusted_code, "_folders", set())
    monkeypatch.setattr(sys, "path", sys.path.copy())
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_layers.py").write_text("class Layer: pass")
    trusted_code.allow_folder(".")
    with pytest.raises(UntrustedNameError, match=name):
        resolve(name)
    assert resolve("own_layers:Layer").__name__ == "Layer"
    sys.modules.pop("own_layers")


def test_code_of_a_notebook_may_be_named(monkeypatch):
    notebook = types.ModuleType("__main__")
    notebook.Own = type("Own", (), {"__module__": "__main__"})  # pyrefly: ignore
    monkeypatch.setitem(sys.modules, "__main__", notebook)
    assert reference(notebook.Own) == "__main__:Own"  # pyrefly: ignore
    assert resolve("__main__:Own") is notebook.Own  # pyrefly: ignore


def test_config_modules_is_a_list():
    module = types.ModuleType("mine")
    module.CONFIG_MODULES = "flax"  # pyrefly: ignore
    with pytest.raises(UserError, match="CONFIG_MODULES='flax'"):
        trusted_code.allow_module(module)
