"""The learner's state in host memory changes no number of a run."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from moelib.core import tree
from moelib.core.config import config_for_function
from moelib.data.batches.input import batch_spec
from moelib.data.batches.prefetch import row_sharding
from moelib.learner import offload
from moelib.learner.optimizers import adafactor_optimizer
from moelib.learner.transforms import chain, clip_by_global_norm, global_norm, skip_bad_steps
from moelib.parallel.mesh import mesh_shape_from_axes
from moelib.planning.compiled.compile_step import no_compilation_cache
from moelib.planning.hardware.topologies import topology
from tests import tiny


def offloaded(cfg, value=True):
    cfg.learner.offload_state = value
    return cfg


def kinds(state):
    return {path: x.sharding.memory_kind for path, x in tree.flatten_items(state)}


def assert_same(a, b):
    """Up to how a CPU fuses products and sums: of some meshes the last bit of a term differs."""
    a, b = dict(tree.flatten_items(a)), dict(tree.flatten_items(b))
    assert a.keys() == b.keys()
    for path in a:
        x, y = np.asarray(a[path]), np.asarray(b[path])
        largest = np.max(np.abs(y), initial=0.0)  # Small elements are differences of such terms.
        np.testing.assert_allclose(x, y, rtol=1e-6, atol=3e-7 * largest, err_msg=path)


def with_everything(directory, **mesh):
    """A run whose learner has an average and a skip policy, and steps that are not taken."""
    cfg = tiny.trainer_config(directory, mesh_shape=mesh_shape_from_axes(**mesh))
    cfg.learner.ema.decay = 0.9
    cfg.learner.skip = config_for_function(skip_bad_steps).set(drop_norm=0.075)
    cfg.learner.optimizer = config_for_function(chain).set(
        args=[config_for_function(clip_by_global_norm).set(max_norm=0.1), cfg.learner.optimizer]
    )
    return cfg


@pytest.mark.parametrize(
    "mesh",
    [
        {"data": 2, "fsdp": 2, "model": 2},
        *(pytest.param(mesh, marks=pytest.mark.slow) for mesh in ({"data": 8}, {"fsdp": 8})),
    ],
    ids=str,
)
def test_offloaded_run_equals_the_run(tmp_path, mesh):
    runs = []
    for value in (False, True):
        directory = tmp_path / str(value)
        trainer = offloaded(with_everything(directory, **mesh), value).instantiate(parent=None)
        out = trainer.run()
        runs.append((trainer, out, tiny.losses(directory)))
    (plain, out, losses), (other, other_out, other_losses) = runs
    assert_same(plain.trainer_state, other.trainer_state)
    assert other_losses == pytest.approx(losses, rel=1e-6)
    assert 0 < plain.trainer_state.learner.skipped_steps < 8
    assert out["evaler_summaries"].keys() == other_out["evaler_summaries"].keys()


def test_state_of_one_device_is_offloaded(tmp_path):
    cfg = offloaded(tiny.trainer_config(tmp_path, max_step=2, evaler=False))
    trainer = cfg.instantiate(parent=None, devices=jax.devices()[:1])
    trainer.run()
    assert "pinned_host" in kinds(trainer.trainer_state).values()


def test_arrays_with_dimensions_are_in_host_memory_and_scalars_are_not(tmp_path):
    mesh = {"data": 2, "fsdp": 2, "model": 2}  # That of the test above, whose programs are cached.
    trainer = offloaded(with_everything(tmp_path, **mesh)).instantiate(parent=None)
    trainer.init()
    first = kinds(trainer.trainer_state)
    trainer.run()
    assert kinds(trainer.trainer_state) == first
    for path, spec in tree.flatten_items(trainer.trainer_state_specs):
        is_offloaded = path.startswith("learner/") and len(spec.shape) > 0
        assert (first[path] == "pinned_host") == is_offloaded, path
    assert sum(kind == "pinned_host" for kind in first.values()) == 6  # mu, nu and average of two.


def test_the_state_is_donated(tmp_path):
    trainer = offloaded(tiny.trainer_config(tmp_path, evaler=False)).instantiate(parent=None)
    trainer.init()
    before = trainer.trainer_state
    with jax.set_mesh(trainer.mesh()):
        trainer.run_step(
            {
                name: jax.device_put(
                    np.ones(shape, np.int32), row_sharding(trainer.batch_sharding, len(shape))
                )
                for name, shape in batch_spec(8, 16).items()
            }
        )
    moments = [x for x in jax.tree.leaves(before.learner) if x.ndim]
    assert len(moments) == 4
    assert all(x.is_deleted() for x in moments)


@pytest.mark.slow
@pytest.mark.parametrize("first", [False, True])
def test_run_resumes_with_the_other_setting(tmp_path, first):
    unbroken = with_everything(tmp_path / "a", fsdp=8).instantiate(parent=None)
    unbroken.run()
    offloaded(with_everything(tmp_path / "b", fsdp=8), first).set(max_step=4).instantiate(
        parent=None
    ).run()
    resumed = offloaded(with_everything(tmp_path / "b", data=8), not first)
    resumed = resumed.set(mesh_shape=unbroken.config.mesh_shape).instantiate(parent=None)
    assert resumed.restore_checkpoint() == 4
    assert ("pinned_host" in kinds(resumed.trainer_state).values()) == (not first)
    resumed.run()
    assert_same(resumed.trainer_state, unbroken.trainer_state)


@pytest.mark.slow
def test_factored_moments_are_offloaded_too(tmp_path):
    cfg = offloaded(tiny.trainer_config(tmp_path, max_step=2, evaler=False))
    cfg.learner.optimizer = config_for_function(adafactor_optimizer).set(learning_rate=0.02)
    trainer = cfg.instantiate(parent=None)
    trainer.run()
    assert "pinned_host" in kinds(trainer.trainer_state.learner).values()


def test_devices_without_host_memory_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(offload, "MEMORY_KIND", "drum")
    trainer = offloaded(tiny.trainer_config(tmp_path)).instantiate(parent=None)
    with pytest.raises(ValueError, match=r"learner.offload_state.*True.*'cpu'.*'drum'"):
        trainer.init()


@pytest.mark.slow
def test_on_a_tpu_the_state_is_an_argument_in_host_memory(tmp_path):
    pytest.importorskip("libtpu")
    devices = topology("v6e:2x2x1").devices
    analyses = []
    for value in (False, True):
        cfg = tiny.trainer_config(tmp_path, mesh_shape=mesh_shape_from_axes(fsdp=-1), evaler=False)
        cfg.model.set(vocab_size=2048, dim=512)
        trainer = offloaded(cfg, value).instantiate(parent=None, devices=devices)
        with no_compilation_cache():
            analyses.append(trainer.compile_train_step().memory_analysis())
    plain, other = analyses
    moments = 2 * 2 * 4 * 2048 * 512 // 4  # mu and nu of two matrices in float32, on one device.
    assert plain.host_argument_size_in_bytes == 0
    assert other.host_argument_size_in_bytes == moments
    assert other.host_alias_size_in_bytes == moments  # Donated.
    fewer = plain.argument_size_in_bytes - other.argument_size_in_bytes
    assert fewer == pytest.approx(moments, abs=4096)  # Scalars are padded.


def pulled_together(limit):
    """SGD with momentum, whose step is as long as the momenta of all parameters together take."""

    def update(updates, state, params=None):
        state = jax.tree.map(lambda m, g: 0.9 * m + g, state, updates)
        norm = global_norm(state)
        return jax.tree.map(lambda m: -limit * m / (1 + norm), state), state

    return optax.GradientTransformation(lambda params: jax.tree.map(jnp.zeros_like, params), update)


@pytest.mark.slow
def test_moments_that_one_result_requires_are_copied_together(tmp_path):
    runs = []
    for value in (False, True):
        cfg = offloaded(tiny.trainer_config(tmp_path / str(value), evaler=False), value)
        cfg.learner.optimizer = config_for_function(pulled_together).set(limit=0.1)
        runs.append(cfg.instantiate(parent=None))
        runs[-1].run()
    assert_same(runs[0].trainer_state, runs[1].trainer_state)
