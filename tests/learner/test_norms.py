"""Norms by group equal NumPy's on whole arrays, on any mesh, in micro-batches and in a pipeline."""

import jax
import numpy as np
import optax
import pytest

from moelib.core import tree
from moelib.core.errors import UserError
from moelib.learner import optimizers
from moelib.learner.learner import Learner, UpdateType
from moelib.learner.norms import group_paths, norms_of
from moelib.parallel import sharding
from moelib.parallel.pipeline.schedule import Schedule
from moelib.train import state as state_lib
from moelib.train.metrics import unpack
from moelib.train.pipeline import PipelineConfig
from moelib.train.step import make_train_step
from tests import tiny
from tests.learner.example import SPECS, arrays, fn, gradients_like, make_learner, update_of

PARAMS = arrays(SPECS)
SGD = fn(optimizers.sgd_optimizer, learning_rate=1.0)
UPDATED = ["emb/weight", "layer/experts", "layer/qkv", "layer/scale"]


def norm(values, paths):
    """Returns the norm of some arrays of a tree."""
    leaves = [np.ravel(np.float64(tree.by_path(values)[path])) for path in paths]
    return np.linalg.norm(np.concatenate(leaves))


def check(metrics, groups, gradients, before, after):
    """Asserts that metrics have the norms of the groups, and of no other."""
    difference = jax.tree.map(lambda a, b: np.float32(a) - np.float32(b), after, before)
    kinds = {"gradient_norm": gradients, "parameter_norm": before, "update_norm": difference}
    for name, paths in groups.items():
        for kind, values in kinds.items():
            want = norm(values, paths)
            np.testing.assert_allclose(metrics[f"{kind}/{name}"], want, rtol=2e-5, atol=1e-7)
        want = norm(difference, paths) / norm(before, paths)
        np.testing.assert_allclose(metrics[f"update_ratio/{name}"], want, rtol=2e-5, atol=1e-7)
    assert {name.partition("/")[2] for name in metrics if "norm/" in name} == set(groups)


def update(**fields):
    """Returns (metrics, gradients, parameters after a step)."""
    learner = make_learner(**{"optimizer": SGD, **fields})
    gradients = gradients_like(PARAMS, 0)
    out = update_of(learner)(gradients, learner.init(PARAMS), PARAMS)
    return out.metrics, gradients, out.params


def test_norms_of_regexes_with_and_without_capture_groups():
    metrics, gradients, after = update(norms_of=["layer/qkv", "(emb|layer)/.*"])
    groups = {"layer/qkv": ["layer/qkv"], "emb": UPDATED[:1], "layer": UPDATED[1:]}
    check(metrics, groups, gradients, PARAMS, after)


def test_named_groups_take_the_first_match_and_the_rest_is_other():
    metrics, gradients, after = update(norms_of={"wide": ".*/(qkv|weight)", "layer": "layer/e.*"})
    groups = {
        "wide": ["emb/weight", "layer/qkv"],
        "layer": ["layer/experts"],
        "other": ["layer/scale"],
    }
    check(metrics, groups, gradients, PARAMS, after)


def test_a_regex_that_is_none_is_named():
    with pytest.raises(UserError, match=r"norms_of: '\(' is no regular expression"):
        group_paths(UPDATED, ["("], "norms_of")


def test_there_is_no_other_group_if_every_parameter_has_a_name():
    groups = group_paths(UPDATED, {"all": ".*"}, "norms_of")
    assert groups == {"all": UPDATED}


def test_gradients_are_those_before_clipping_and_updates_those_of_each_rule():
    clipped = fn(
        optax.chain,
        args=[fn(optax.clip_by_global_norm, max_norm=0.01), fn(optax.sgd, learning_rate=1.0)],
    )
    rules = [("layer/qkv", SGD), ("layer/scale", UpdateType.NO_UPDATE)]
    metrics, gradients, after = update(
        optimizer=clipped, update_rules=rules, norms_of={"qkv": "layer/qkv"}
    )
    groups = {"qkv": ["layer/qkv"], "other": ["emb/weight", "layer/experts"]}
    check(metrics, groups, gradients, PARAMS, after)
    assert metrics["update_norm/other"] == pytest.approx(0.01, rel=1e-4)


def test_a_group_without_update_has_a_ratio_of_0():
    zeros = jax.tree.map(np.zeros_like, PARAMS)
    learner = make_learner(SGD, norms_of={"all": ".*"})
    out = update_of(learner)(zeros, learner.init(zeros), zeros)
    assert out.metrics["update_ratio/all"] == 0


def test_a_group_whose_update_is_not_finite_has_no_ratio():
    bad = jax.tree.map(lambda x: np.full_like(x, np.nan), PARAMS)
    found = norms_of({"all": UPDATED}, PARAMS, PARAMS, bad)
    assert np.isnan(found["update_ratio/all"])


MOE = {"experts": ".*/experts/.*", "attention": ".*/self_attention/.*"}
HEAD = {"head": "head"}


@pytest.mark.parametrize(
    ("model", "frozen", "norms_of", "axes", "schedule"),
    [
        (tiny.TinyModel.default_config(), [], HEAD, {"data": 2, "fsdp": 2, "model": 2}, None),
        pytest.param(
            *(tiny.model_config(), ["embedding/.*"], MOE),
            *({"expert": 2, "fsdp": 2, "model": 2}, None),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *(tiny.model_config(), ["embedding/.*"], MOE),
            *({"pipeline": 2, "expert": 2, "data": 2}, Schedule.GPIPE),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_norms_on_a_mesh_are_those_of_whole_arrays(model, frozen, norms_of, axes, schedule):
    model = model.clone(name="model").instantiate(parent=None)
    specs = model.create_parameter_specs_recursively()
    cfg = Learner.default_config().set(name="learner", optimizer=optax.sgd(1.0))
    cfg.set(norms_of=norms_of, update_rules=[(regex, UpdateType.NO_UPDATE) for regex in frozen])
    learner = cfg.instantiate(parent=None, param_specs=specs)
    pipeline = schedule and PipelineConfig(schedule, axes["pipeline"], uniform=True)
    step = make_train_step(model, learner, num_microbatches=2, pipeline=pipeline)
    mesh = tiny.mesh(**axes)
    rules = sharding.PIPELINE_RULES if schedule else {}
    with jax.set_mesh(mesh), sharding.sharding_rules(rules):
        shardings = state_lib.state_shardings(state_lib.state_specs(model, learner), learner, mesh)
        state = state_lib.init_state(model, learner, 0, shardings)
        before = jax.device_get(state.model)
        run = jax.jit(step, out_shardings=(shardings, None))
        after, packed = run(state, tiny.packed_batch())
    after, metrics = jax.device_get(after.model), unpack(packed)
    groups = group_paths(list(filter(learner.is_updated, tree.by_path(before))), norms_of, "")
    gradients = jax.tree.map(np.subtract, before, after)  # SGD with a rate of 1.
    check(metrics, groups, gradients, before, after)
    assert set(groups) == {*norms_of, "other"}
