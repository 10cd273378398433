"""Types of configs, as the type checker sees them."""

import pathlib
import re
import subprocess
import sys

_ROOT = pathlib.Path(__file__).parents[2]

_RIGHT = """
from typing import assert_type

import jax.numpy as jnp

from moelib.core.config import REQUIRED, Required, config_class, config_for_function
from moelib.layers.base import BaseLayer
from moelib.layers.feed_forward import FeedForward
from moelib.layers.initializers import normal


class Ffn(BaseLayer):
    @config_class
    class Config(BaseLayer.Config):
        input_dim: Required[int] = REQUIRED
        act: str = "silu"
        inner: BaseLayer.Config = FeedForward.default_config()

    def forward(self) -> int:
        return self.config.input_dim


class Renamed(Ffn):
    "Borrows the Config of Ffn."


cfg = Ffn.default_config().set(name="ffn", input_dim=8, dtype=jnp.bfloat16)
cfg.set(param_init=config_for_function(normal).set(std=0.02))
assert_type(cfg, Ffn.Config)
assert_type(Renamed.default_config(), Ffn.Config)
assert_type(cfg.clone(input_dim=4).input_dim, int)
assert_type(Ffn.Config(act="gelu").act, str)
cfg.inner.clone(hidden_dim=3)  # A field for any layer takes the fields of every layer.
"""

_WRONG = """
from right import Ffn

Ffn.default_config().set(input_dims=8)  # unexpected-keyword
Ffn.default_config().set(input_dim="8")  # bad-argument-type
Ffn.default_config().clone(inputdim=8)  # unexpected-keyword
Ffn.Config(actt="gelu")  # unexpected-keyword
text: str = Ffn.default_config().input_dim  # bad-assignment
"""


def test_mistakes_in_configs_are_found_and_nothing_else(tmp_path):
    (tmp_path / "right.py").write_text(_RIGHT)
    (tmp_path / "wrong.py").write_text(_WRONG)
    settings = f'python-interpreter-path = "{sys.executable}"\nsearch-path = ["{_ROOT}"]\n'
    (tmp_path / "pyrefly.toml").write_text(settings)
    command = [pathlib.Path(sys.executable).parent / "pyrefly", "check", "--output-format=min-text"]
    checked = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    found = re.findall(r"ERROR (\S+?):(\d+):.*\[([\w-]+)\]", checked.stdout)
    lines = enumerate(_WRONG.splitlines(), 1)
    expected = [("wrong.py", str(i), line.split("# ")[1]) for i, line in lines if "# " in line]
    assert found == expected, checked.stdout + checked.stderr
