import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from moelib.core import tree
from moelib.core.param import FanAxes, ParameterSpec
from moelib.learner import optimizers, schedules, transforms
from tests.learner.example import (
    LOOP_SPECS,
    SCAN_SPECS,
    SPECS,
    arrays,
    assert_close,
    fn,
    make_learner,
    run,
    run_optimizer,
    stacked,
    update_of,
)

PARAMS = arrays(SPECS)
ALL = {
    "sgd": fn(optimizers.sgd_optimizer, learning_rate=0.1, momentum=0.9, weight_decay=0.1),
    "adam": fn(optimizers.adam_optimizer, learning_rate=0.1),
    "adamw": fn(optimizers.adamw_optimizer, learning_rate=0.1, weight_decay=0.1),
    "adamw_decoupled": fn(
        optimizers.adamw_decoupled_optimizer, learning_rate=0.1, weight_decay=0.1
    ),
    "lion": fn(optimizers.lion_optimizer, learning_rate=0.1, weight_decay=0.1),
    "adafactor": fn(
        optimizers.adafactor_optimizer,
        learning_rate=0.1,
        min_dim_size_to_factor=4,
        b1=0.9,
        weight_decay=0.1,
    ),
    "muon": fn(optimizers.muon_optimizer, learning_rate=0.1, weight_decay=0.1),
}


WARMUP, FULL = (schedules.constant(peak, warmup_steps=4) for peak in (0.01, 1.0))
ADAM = {"b1": 0.8, "b2": 0.95, "eps": 1e-6}


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (optimizers.sgd_optimizer(0.1), optax.sgd(0.1)),
        (
            optimizers.sgd_optimizer(0.1, momentum=0.9, nesterov=True),
            optax.sgd(0.1, momentum=0.9, nesterov=True),
        ),
        (optimizers.adam_optimizer(0.1, b2=0.9), optax.adam(0.1, b2=0.9)),
        (optimizers.adamw_optimizer(0.1, weight_decay=0.2), optax.adamw(0.1, weight_decay=0.2)),
        (
            optimizers.adamw_optimizer(WARMUP, weight_decay=0.1, **ADAM),
            optax.adamw(lambda count: WARMUP(count + 1), weight_decay=0.1, **ADAM),
        ),
        (  # The rate of the decay is the schedule alone.
            optimizers.adamw_decoupled_optimizer(
                0.01, update_schedule=FULL, weight_decay=0.1, **ADAM
            ),
            optax.chain(
                optax.scale_by_adam(**ADAM),
                optax.scale(0.01),
                optax.add_decayed_weights(0.1),
                optax.scale_by_schedule(lambda count: -FULL(count + 1)),
            ),
        ),
        (optimizers.lion_optimizer(0.1, weight_decay=0.2), optax.lion(0.1, weight_decay=0.2)),
        (
            optimizers.adafactor_optimizer(0.1, min_dim_size_to_factor=4),
            optax.adafactor(0.1, min_dim_size_to_factor=4),
        ),
        (
            optimizers.adafactor_optimizer(
                0.1, b1=0.9, multiply_by_parameter_scale=False, clipping_threshold=None
            ),
            optax.adafactor(
                0.1, momentum=0.9, multiply_by_parameter_scale=False, clipping_threshold=None
            ),
        ),
    ],
)
def test_optimizers_equal_those_of_optax(ours, theirs):
    params = {name: PARAMS["layer"][name] for name in ("scale", "experts")} | PARAMS["emb"]
    assert_close(run_optimizer(ours, params, 6), run_optimizer(theirs, params, 6))


@pytest.mark.parametrize("consistent_rms", [None, 0.2])
def test_muon_equals_that_of_optax_on_plain_matrices(consistent_rms):
    shapes = {"wide": (4, 9), "tall": (8, 3), "square": (5, 5), "scale": (6,)}
    specs = {
        name: ParameterSpec(
            shape,
            (None,) * len(shape),
            "float32",
            fan_axes=FanAxes((0,), (1,)) if len(shape) == 2 else None,
        )
        for name, shape in shapes.items()
    }
    params = arrays(specs)
    ours = optimizers.muon_optimizer(
        0.1, consistent_rms=consistent_rms, weight_decay=0.1, param_specs=specs
    )
    theirs = optax.contrib.muon(
        0.1, consistent_rms=consistent_rms, weight_decay=0.1, adam_weight_decay=0.1, adam_b2=0.95
    )
    got, expected = run_optimizer(ours, params), run_optimizer(theirs, params)
    # Optax gives the other parameters an Adam with Nesterov momentum, too.
    adamw = optax.adamw(0.1, b2=0.95, weight_decay=0.1)
    expected["scale"] = run_optimizer(adamw, {"scale": params["scale"]})["scale"]
    assert_close(got, expected)


def test_muon_makes_each_stacked_matrix_orthogonal():
    spec = SCAN_SPECS["layers"]["experts"]  # [L, E, D, F]
    optimizer = optimizers.muon_optimizer(1.0, param_specs={"w": spec}, ns_steps=10)
    grads = arrays({"w": spec}, seed=3)
    updates, _ = jax.jit(optimizer.update)(grads, optimizer.init(grads), grads)
    scale = (8 / 6) ** 0.5
    singular = np.linalg.svd(np.asarray(updates["w"]) / scale, compute_uv=False)
    assert singular.shape == (2, 4, 6)
    assert singular.min() > 0.6  # Newton-Schulz leaves them between about 0.7 and 1.2.
    assert singular.max() < 1.3


def test_adam_updates_embeddings_vectors_and_named_weights_of_muon():
    optimizer = optimizers.muon_optimizer(1.0, param_specs=SPECS, adam_paths=[".*/qkv"])
    state = optimizer.init(PARAMS)
    matrices = tree.by_path(state["matrices"][0][0].mu)
    others = tree.by_path(state["others"][0].nu)
    assert set(matrices) == {"layer/experts"}
    assert set(others) == {"emb/weight", "layer/scale", "layer/qkv", "layer/bias"}


@pytest.mark.parametrize("name", ALL)
def test_scan_and_loop_get_the_same_update(name):
    clip = fn(transforms.clip_by_global_norm, max_norm=1.0)
    optimizer = fn(transforms.chain, args=[clip, ALL[name]])
    params = arrays(LOOP_SPECS)
    loop = run(make_learner(optimizer, LOOP_SPECS), params, 3)
    scan = run(make_learner(optimizer, SCAN_SPECS), stacked(params), 3)
    assert_close(stacked(loop.params), scan.params, rtol=1e-5, atol=1e-5)
    moved = loop.params["layer0"]["scale"] - params["layer0"]["scale"]
    assert float(jnp.min(jnp.abs(moved))) > 0


@pytest.mark.parametrize("name", ALL)
def test_moments_of_low_precision_parameters_are_float32(name):
    learner = make_learner(ALL[name])
    params = arrays(SPECS, dtype="bfloat16")
    state = jax.eval_shape(learner.init, params)
    out = jax.eval_shape(update_of(learner), params, state, params)
    assert out.params["layer"]["qkv"].dtype == jnp.bfloat16
    moments = tree.flatten_items(out.state.optimizer)
    assert all(leaf.dtype in (jnp.float32, jnp.int32) for _, leaf in moments)


@pytest.mark.parametrize("name", ["sgd", "adamw", "adamw_decoupled", "lion", "adafactor", "muon"])
def test_decay_follows_the_specs(name):
    zero = jax.tree.map(jnp.zeros_like, PARAMS)
    learner = make_learner(ALL[name])
    out = update_of(learner)(zero, learner.init(PARAMS), PARAMS)
    rate = 0.1 if name == "adamw_decoupled" else 0.01
    shrunk = jax.tree.map(lambda p: (1 - rate) * p, PARAMS)
    for group, leaf in (("layer", "experts"), ("emb", "weight")):
        assert_close(out.params[group][leaf], shrunk[group][leaf])
    np.testing.assert_array_equal(out.params["layer"]["scale"], PARAMS["layer"]["scale"])
