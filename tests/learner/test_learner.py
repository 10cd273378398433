import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from moelib.core import config_text, tree
from moelib.core.metrics import weighted
from moelib.core.param import is_spec
from moelib.core.precision import cast_floats
from moelib.learner import optimizers, schedules, transforms
from moelib.learner.accumulation import accumulate
from moelib.learner.learner import Learner, LearnerUpdate, UpdateType
from tests.learner.example import (
    SPECS,
    arrays,
    assert_close,
    assert_same_bits,
    ema_config,
    fn,
    gradients_like,
    make_learner,
    run,
    run_optimizer,
    update_of,
)

PARAMS = arrays(SPECS)
ADAMW = fn(optimizers.adamw_optimizer, learning_rate=0.1, weight_decay=0.1)
SGD = fn(optimizers.sgd_optimizer, learning_rate=1.0)


def step(learner, params=PARAMS, state=None, gradients=None, loss=None):
    gradients = gradients_like(params, 0) if gradients is None else gradients
    state = learner.init(params) if state is None else state
    return update_of(learner)(gradients, state, params, loss)


# The optimizer.


def test_third_party_optimizer():
    ours = run(make_learner(fn(optax.adamw, learning_rate=0.1, weight_decay=0.1)), PARAMS, 3)
    trained = tree.select(PARAMS, lambda path: path != "layer/bias")
    theirs = run_optimizer(optax.adamw(0.1, weight_decay=0.1), trained, 3)
    assert_close(tree.select(ours.params, lambda path: path != "layer/bias"), theirs)


def test_third_party_optimizer_that_uses_the_loss():
    optimizer = fn(
        optax.chain,
        args=[
            fn(optax.sgd, learning_rate=1.0),
            fn(optax.contrib.reduce_on_plateau, patience=1, factor=0.5),
        ],
    )
    learner = make_learner(optimizer)
    state = learner.init(PARAMS)
    for _ in range(4):
        out = step(learner, state=state, loss=jnp.float32(1.0))
        state = out.state
    assert float(optax.tree.get(state.optimizer, "scale")) < 1.0


def test_optimizer_that_is_built_already():
    learner = make_learner(optax.sgd(1.0))
    out = step(learner)
    gradient = gradients_like(PARAMS, 0)["layer"]["qkv"]
    np.testing.assert_allclose(out.params["layer"]["qkv"], PARAMS["layer"]["qkv"] - gradient)


def test_specs_reach_optimizers_at_any_depth():
    chained = fn(transforms.chain, args=[fn(transforms.chain, args=[ADAMW])])
    zero = jax.tree.map(jnp.zeros_like, PARAMS)
    out = step(make_learner(chained), gradients=zero)
    np.testing.assert_array_equal(out.params["layer"]["scale"], PARAMS["layer"]["scale"])
    assert np.all(out.params["layer"]["qkv"] != PARAMS["layer"]["qkv"])


def test_config_reads_back_from_its_text():
    rules = [("emb/.*", UpdateType.NO_UPDATE), (".*/scale", SGD)]
    skip = fn(transforms.skip_bad_steps, drop_norm=5.0)
    cfg = Learner.default_config().set(optimizer=ADAMW, update_rules=rules, skip=skip)
    assert config_text.parse(cfg.debug_string()) == cfg


# Metrics.


def test_metrics_of_a_step():
    schedule = fn(schedules.constant, peak_lr=0.4, warmup_steps=4)
    clip = fn(transforms.clip_by_global_norm, max_norm=1e-3)
    adamw = ADAMW.clone(learning_rate=schedule)
    learner = make_learner(fn(transforms.chain, args=[clip, adamw]))
    out = step(learner)
    assert set(out.metrics) == {"gradient_norm", "learning_rate"}
    trained = tree.select(gradients_like(PARAMS, 0), lambda path: path != "layer/bias")
    np.testing.assert_allclose(out.metrics["gradient_norm"], optax.tree.norm(trained), rtol=1e-6)
    np.testing.assert_allclose(out.metrics["learning_rate"], 0.1, rtol=1e-6)
    out = step(learner, state=out.state)
    np.testing.assert_allclose(out.metrics["learning_rate"], 0.2, rtol=1e-6)
    assert all(value.shape == () for value in out.metrics.values())


def test_reported_rate_of_decoupled_adamw_is_the_real_one():
    schedule = fn(schedules.constant, peak_lr=1.0, warmup_steps=4)
    optimizer = fn(
        optimizers.adamw_decoupled_optimizer, learning_rate=0.2, update_schedule=schedule
    )
    np.testing.assert_allclose(
        step(make_learner(optimizer)).metrics["learning_rate"], 0.05, rtol=1e-6
    )


def test_reported_rates_of_rules_and_of_optax():
    hyper = optax.inject_hyperparams(optax.adam)(learning_rate=0.3)
    out = step(make_learner(hyper, update_rules=[("emb/.*", SGD)]))
    np.testing.assert_allclose(out.metrics["learning_rate"], 0.3)
    np.testing.assert_allclose(out.metrics["learning_rate/rule0"], 1.0)


def test_unknown_learning_rate_is_a_warning(caplog):
    rules = [("emb/.*", SGD), ("layer/qkv", fn(optax.lion, learning_rate=0.1))]
    make_learner(fn(optax.adamw, learning_rate=0.1), update_rules=rules).state_specs()
    assert [record.args[-1] for record in caplog.records] == ["main", "rule1"]
    caplog.clear()
    hyper = fn(optax.inject_hyperparams(optax.adamw), learning_rate=0.1)
    make_learner(hyper).state_specs()
    make_learner(optax.adamw(0.1)).state_specs()  # Built already; no setting would change it.
    assert not caplog.records


# Which parameters are updated.


def test_untrainable_parameters_are_not_updated():
    learner = make_learner(ADAMW, ema=ema_config(0.9))
    assert not learner.is_updated("layer/bias")
    state_paths = [path for path, _ in tree.flatten_items(learner.init(PARAMS))]
    assert not any("bias" in path for path in state_paths)
    out = run(learner, PARAMS, 2)
    assert_same_bits(out.params["layer"]["bias"], PARAMS["layer"]["bias"])
    assert np.all(out.params["layer"]["qkv"] != PARAMS["layer"]["qkv"])


@pytest.mark.parametrize("what", ["zeros", "nan", "none", "absent"])
def test_gradients_of_untrainable_parameters_may_be_anything(what):
    gradients = gradients_like(PARAMS, 0)
    expected = step(make_learner(ADAMW), gradients=gradients)
    layer = dict(gradients["layer"])
    if what == "absent":
        layer.pop("bias")
    else:
        values = {"zeros": jnp.zeros(4), "nan": jnp.full(4, jnp.nan), "none": None}
        layer["bias"] = values[what]
    out = step(make_learner(ADAMW), gradients={**gradients, "layer": layer})
    assert_same_bits(out, expected)


def test_frozen_parameters_keep_their_bits_and_have_no_state():
    learner = make_learner(
        ADAMW, update_rules=[("layer/(qkv|scale)", UpdateType.NO_UPDATE)], ema=ema_config(0.9)
    )
    params = {**PARAMS, "layer": {**PARAMS["layer"], "scale": jnp.asarray([-0.0] * 5 + [jnp.nan])}}
    out = run(learner, params, 2)
    for name in ("qkv", "scale"):
        assert_same_bits(out.params["layer"][name], params["layer"][name])
        assert not any(name in path for path, _ in tree.flatten_items(out.state))
    assert np.all(out.params["layer"]["experts"] != params["layer"]["experts"])


def test_everything_frozen():
    out = step(make_learner(ADAMW, update_rules=[(".*", UpdateType.NO_UPDATE)]))
    assert_same_bits(out.params, PARAMS)
    assert out.state.optimizer == {}
    assert float(out.metrics["gradient_norm"]) == 0.0


def test_rules_have_their_own_optimizers():
    rules = [("layer/qkv", UpdateType.OPTIMIZERS), ("layer/.*", SGD.clone(learning_rate=0.5))]
    out = step(make_learner(ADAMW, update_rules=rules))
    gradients = gradients_like(PARAMS, 0)
    expected = PARAMS["layer"]["scale"] - 0.5 * gradients["layer"]["scale"]
    np.testing.assert_allclose(out.params["layer"]["scale"], expected, rtol=1e-6)
    plain = step(make_learner(ADAMW))
    assert_same_bits(out.params["layer"]["qkv"], plain.params["layer"]["qkv"])
    assert set(out.state.optimizer) == {"main", "rule1"}
    moments = tree.by_path(out.state.optimizer["main"][0].mu)
    assert set(moments) == {"emb/weight", "layer/qkv"}


# Steps that are not taken.


@pytest.fixture(scope="module")
def cautious():
    """A learner with everything that a bad step could change, and its state after two steps."""
    schedule = fn(schedules.constant, warmup_steps=9)
    learner = make_learner(
        fn(optimizers.adamw_optimizer, learning_rate=schedule),
        skip=fn(transforms.skip_bad_steps, drop_norm=100.0),
        ema=ema_config(0.9),
    )
    params, state = PARAMS, learner.init(PARAMS)
    for _ in range(2):
        params, state, _ = step(learner, params, state, loss=jnp.float32(1.0))
    return learner, params, state


@pytest.mark.parametrize("bad", ["nan_gradient", "inf_gradient", "nan_loss", "large_norm"])
def test_bad_step_changes_no_bit(bad, cautious):
    learner, params, state = cautious
    gradients = gradients_like(params, 2)
    value = {"nan_gradient": jnp.nan, "inf_gradient": jnp.inf, "large_norm": 200.0}.get(bad, 0.0)
    gradients["layer"]["experts"] = gradients["layer"]["experts"].at[0, 0, 0].add(value)
    loss = jnp.float32(jnp.nan if bad == "nan_loss" else 1.0)
    out = step(learner, params, state, gradients, loss)
    assert_same_bits(out.params, params)
    assert_same_bits(out.state._replace(skipped_steps=state.skipped_steps), state)
    assert int(out.state.skipped_steps) == 1
    assert float(out.metrics["skipped"]) == 1.0
    good = gradients_like(params, 2)
    after = step(learner, out.params, out.state, good, jnp.float32(1.0))
    unbroken = step(learner, params, state, good, jnp.float32(1.0))
    assert_same_bits(after.params, unbroken.params)
    assert float(after.metrics["skipped"]) == 0.0
    assert float(after.metrics["skipped_steps"]) == 1.0


def test_without_a_policy_a_bad_step_is_taken():
    gradients = jax.tree.map(lambda g: g * jnp.nan, PARAMS)
    out = step(make_learner(ADAMW), gradients=gradients, loss=jnp.float32(jnp.nan))
    assert np.all(np.isnan(out.params["layer"]["qkv"]))
    assert "skipped" not in out.metrics


# The average.


def test_average_lags_behind_and_excludes_parameters_without_updates():
    learner = make_learner(ADAMW, ema=ema_config(0.5))
    first = run(learner, PARAMS, 1)
    second = step(learner, params=first.params, state=first.state)
    params = {**second.params, "layer": {**second.params["layer"], "bias": jnp.full(4, 7.0)}}
    average = learner.eval_params(second.state, params)
    expected = (first.params["layer"]["qkv"] + 2 * second.params["layer"]["qkv"]) / 3
    np.testing.assert_allclose(average["layer"]["qkv"], expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(average["layer"]["bias"], np.full(4, 7.0))


def test_average_has_the_dtype_of_the_parameters():
    learner = make_learner(ADAMW, ema=ema_config(0.5))
    params = arrays(SPECS, dtype="bfloat16")
    average = jax.eval_shape(lambda p: learner.eval_params(learner.init(p), p), params)
    assert {leaf.dtype for leaf in jax.tree.leaves(average)} == {jnp.dtype("bfloat16")}


def test_without_an_average_the_parameters_are_evaluated():
    learner = make_learner(ADAMW)
    assert learner.eval_params(learner.init(PARAMS), PARAMS) is PARAMS


@pytest.mark.parametrize("skip", [None, fn(transforms.skip_bad_steps)])
def test_schedule_free_optimizers_are_evaluated_at_their_own_point(skip):
    optimizer = optax.contrib.schedule_free_adamw(0.1, b1=0.9)
    rules = [
        ("emb/.*", fn(optax.contrib.schedule_free_sgd, learning_rate=0.1)),
        ("layer/scale", SGD),
    ]
    learner = make_learner(optimizer, update_rules=rules, skip=skip)
    out = run(learner, PARAMS, 3)
    found = learner.eval_params(out.state, out.params)
    inner = out.state.optimizer["main"]
    trained = tree.select(out.params, lambda path: path in ("layer/experts", "layer/qkv"))
    want = optax.contrib.schedule_free_eval_params(inner, trained)
    for name in ("experts", "qkv"):
        np.testing.assert_array_equal(found["layer"][name], want["layer"][name])
        assert np.any(found["layer"][name] != out.params["layer"][name])
    assert np.any(found["emb"]["weight"] != out.params["emb"]["weight"])
    for name in ("scale", "bias"):
        np.testing.assert_array_equal(found["layer"][name], out.params["layer"][name])


# On a mesh, and in other forms.


@pytest.mark.parametrize(
    "optimizer",
    [
        pytest.param(ADAMW, marks=pytest.mark.slow),
        fn(optimizers.adafactor_optimizer, learning_rate=0.1, min_dim_size_to_factor=4),
        pytest.param(fn(optimizers.muon_optimizer, learning_rate=0.1), marks=pytest.mark.slow),
    ],
)
def test_update_on_a_mesh_is_the_same_with_the_state_sharded_as_specified(optimizer):
    clip = fn(transforms.clip_by_global_norm, max_norm=1.0)
    learner = make_learner(
        fn(transforms.chain, args=[clip, optimizer]),
        skip=fn(transforms.skip_bad_steps),
        ema=ema_config(0.9),
    )
    mesh = jax.make_mesh((2, 2), ("fsdp", "expert"), axis_types=(AxisType.Auto,) * 2)
    table = {"embed": "fsdp", "experts": "expert", "vocab": "expert"}
    sharding_of = lambda spec: NamedSharding(mesh, PartitionSpec(*map(table.get, spec.axes)))
    shardings = jax.tree.map(sharding_of, SPECS, is_leaf=is_spec)
    state_shardings = jax.tree.map(sharding_of, learner.state_specs(), is_leaf=is_spec)
    gradients, state = gradients_like(PARAMS, 0), learner.init(PARAMS)
    update = jax.jit(
        lambda g, s, p: learner.update(gradients=g, state=s, params=p),
        in_shardings=(shardings, state_shardings, shardings),
        out_shardings=LearnerUpdate(shardings, state_shardings, None),
    )
    on_mesh = update(
        jax.device_put(gradients, shardings),
        jax.device_put(state, state_shardings),
        jax.device_put(PARAMS, shardings),
    )
    assert_close(jax.device_get(on_mesh), jax.device_get(step(learner)), rtol=1e-5)


@pytest.mark.parametrize(
    "optimizer",
    [
        fn(optax.adafactor, learning_rate=0.1),
        fn(optax.contrib.schedule_free_adamw, learning_rate=0.1),
    ],
)
def test_third_party_optimizers_under_a_skip_policy(optimizer):
    learner = make_learner(optimizer, skip=fn(transforms.skip_bad_steps))
    params, state = PARAMS, learner.init(PARAMS)
    out = step(learner, gradients=jax.tree.map(lambda p: p * jnp.nan, PARAMS))
    assert_same_bits(out.params, params)
    out = step(learner, params=params, state=out.state)
    assert_close(out.params, step(make_learner(optimizer), state=state).params)


# With accumulation.


def test_accumulated_step_is_the_step_of_the_whole_batch():
    learner = make_learner(fn(optimizers.adamw_optimizer, learning_rate=0.1, eps=1e-3))
    batch = np.random.default_rng(5).standard_normal((8, 6), np.float32)

    def gradients(batch, state):
        def objective(params):
            hidden = batch * params["layer"]["scale"][None]
            return jnp.mean(jnp.square(hidden @ params["emb"]["weight"].T))

        loss, grads = jax.value_and_grad(objective)(PARAMS)
        return loss, batch.shape[0], grads, {"loss": weighted(loss, batch.shape[0])}, state

    results = []
    for num_microbatches in (1, 4):
        total = accumulate(gradients, batch, num_microbatches=num_microbatches)
        results.append(step(learner, gradients=total.gradients, loss=total.objective))
    assert_close(results[0].params, results[1].params)


def test_gradients_of_low_precision_are_clipped_and_scaled_in_float32():
    clipped = fn(transforms.chain, args=[fn(transforms.clip_by_global_norm, max_norm=0.1), SGD])
    learner = make_learner(optimizer=clipped)
    gradients = cast_floats(gradients_like(PARAMS, 0), jnp.bfloat16)
    low = step(learner, gradients=gradients)
    assert_close(low.params, step(learner, gradients=cast_floats(gradients, "float32")).params)


def test_optimizers_of_optax_compute_in_float32_for_parameters_of_low_precision():
    learner = make_learner(optimizer=fn(optax.adam, learning_rate=0.1))
    low = step(learner, params=cast_floats(PARAMS, "bfloat16"))
    floats = [
        x for x in jax.tree.leaves(low.state.optimizer) if jnp.issubdtype(x.dtype, jnp.floating)
    ]
    assert {x.dtype for x in floats} == {jnp.dtype("float32")}
    assert {x.dtype for x in jax.tree.leaves(low.params)} == {jnp.dtype("bfloat16")}
