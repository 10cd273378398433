"""Layers of other libraries, sharded by a trace of the model that holds them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moelib.core import tree
from moelib.core.config import config_for_function
from moelib.core.param import is_spec
from moelib.layers.external import ExternalLayer
from moelib.layers.transformer import ScanStack
from moelib.parallel.mesh import MESH_AXIS_NAMES, mesh_shape_from_axes
from moelib.tasks.task import Task
from moelib.train.shardings import shard_external_layers, shardings_table
from tests import tiny
from tests.inference.models import decoder, layer
from tests.layers.test_external import plain

_HIDDEN = 2048  # Parameters of 16 x 2048: large enough to be stored in parts.


def _config(directory, axes=(), **fields):
    """Returns a run of one attention layer and an external feed-forward layer, in a scan."""
    part = ExternalLayer.default_config().set(
        functions=config_for_function(plain).set(hidden_dim=_HIDDEN), token_by_token=True, axes=axes
    )
    cfg = tiny.trainer_config(directory, evaler=False, max_step=3)
    return cfg.set(**fields, model=tiny.model_config(decoder(layer(part), kind=ScanStack)))


def _specs(trainer):
    specs = tree.by_path(trainer.trainer_state_specs.model, is_spec)
    return {path: spec.axes for path, spec in specs.items() if "feed_forward/" in path}


def test_they_are_split_like_hand_written_ones(tmp_path):
    mesh = mesh_shape_from_axes(fsdp=2, model=4)
    trainer = _config(tmp_path, mesh_shape=mesh, auto_sharding=True).instantiate(parent=None)
    found = {path.partition("feed_forward/")[2]: axes for path, axes in _specs(trainer).items()}
    assert found == {
        "up": ("layers", "fsdp", "model"),
        "down/0": ("layers", "model", "fsdp"),
        "down/1": ("layers", None),
    }
    plain_trainer = _config(tmp_path, mesh_shape=mesh).instantiate(parent=None)
    assert all(axes[1:] in ((None, None), (None,)) for axes in _specs(plain_trainer).values())


def test_a_rule_without_axes_keeps_a_parameter_whole(tmp_path):
    """The hidden dimension of `down/0` follows it; only its storage is sharded."""
    mesh = mesh_shape_from_axes(fsdp=2, model=4)
    axes = [("up", (None, None))]
    cfg = _config(tmp_path, axes=axes, mesh_shape=mesh, auto_sharding=True)
    up, down = (
        next(axes for path, axes in _specs(cfg.instantiate(parent=None)).items() if name in path)
        for name in ("/up", "/down/0")
    )
    assert up == ("layers", None, None)
    assert down == ("layers", "fsdp", "model")


def test_a_rule_of_a_task_without_axes_keeps_a_parameter_whole():
    """The hidden dimension of `down` follows it."""
    init = lambda key: {"up": jnp.zeros((32, 1024)), "down": jnp.zeros((1024, 8))}

    def loss(params, batch, key, is_training):
        return jnp.square(jnp.tanh(batch["x"] @ params["up"]) @ params["down"]).mean()

    task = Task.default_config().set(name="task", init=init, loss=loss, axes=[("up", (None, None))])
    model = task.instantiate(parent=None)
    mesh = mesh_shape_from_axes(fsdp=2, model=4)
    batch = {"batch": {"x": jax.ShapeDtypeStruct((4, 32), "float32")}}
    shard_external_layers(model, dict(zip(MESH_AXIS_NAMES, mesh, strict=True)), lambda: batch)
    specs = model.create_parameter_specs_recursively()
    assert specs["up"].axes == (None, None)
    assert specs["down"].axes == (None, "model")


@pytest.mark.slow
@pytest.mark.parametrize("axes", [{"fsdp": 2, "model": 4}, {"fsdp": 8}, {"data": 2, "model": 4}])
def test_a_mesh_trains_them_as_one_device_does(tmp_path, axes):
    for name, fields in (
        ("one", {}),
        ("eight", {"mesh_shape": mesh_shape_from_axes(**axes), "auto_sharding": True}),
    ):
        _config(tmp_path / name, **fields).instantiate(parent=None).run()
    want, got = tiny.losses(tmp_path / "one"), tiny.losses(tmp_path / "eight")
    np.testing.assert_allclose(list(got.values()), list(want.values()), rtol=1e-5)


def test_the_table_has_every_parameter_with_its_bytes_and_reason(tmp_path):
    mesh = mesh_shape_from_axes(fsdp=2, model=4)
    trainer = _config(tmp_path, mesh_shape=mesh, auto_sharding=True).instantiate(parent=None)
    table = shardings_table(trainer)
    rows = {row[0]: row for row in table.rows}
    assert rows.keys() == tree.by_path(trainer.trainer_state_specs.model, is_spec).keys()
    up = next(row for path, row in rows.items() if path.endswith("feed_forward/up"))
    assert up[2] == "(None, 'fsdp', 'model')"
    assert up[4] == "[1] fsdp over fsdp; [2] model over model"
    assert "fsdp=2,model=4" in table.footnotes[0]
