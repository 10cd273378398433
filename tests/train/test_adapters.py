"""Runs whose adapters are trained and nothing else."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moelib.core import tree
from moelib.core.config import config_for_function
from moelib.core.errors import UserError
from moelib.layers.adapter import is_adapter
from moelib.layers.moe.balance import BiasBalancing
from moelib.learner.learner import Learner
from moelib.learner.optimizers import adamw_optimizer
from moelib.train.adapters import AddAdapters, add_adapters
from moelib.train.init_from import InitFrom
from tests import tiny


def config(directory, *, adapters=True, hidden_dim=24, **fields):
    model = tiny.model_config(tiny.decoder(hidden_dim=hidden_dim))
    cfg = tiny.trainer_config(directory, model=model, evaler=False, **fields)
    return add_adapters(cfg, rank=4, alpha=8.0) if adapters else cfg


def run(cfg):
    trainer = cfg.instantiate(parent=None)
    trainer.run()
    return trainer


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Returns the folder of a run without adapters."""
    folder = tmp_path_factory.mktemp("base")
    with jax.numpy_dtype_promotion("standard"):
        run(config(folder, adapters=False, max_step=2, save_every=2))
    return folder


def from_base(folder, base, **fields):
    return config(folder, **fields).set(init_from=InitFrom.default_config().set(run=str(base)))


@pytest.fixture(scope="module")
def trained(tmp_path_factory, base):
    with jax.numpy_dtype_promotion("standard"):
        return run(from_base(tmp_path_factory.mktemp("trained"), base))


def params_of(trainer):
    return {path: np.asarray(x) for path, x in tree.by_path(trainer.trainer_state.model).items()}


def test_only_adapters_are_trained_and_the_base_is_that_of_the_run(trained, base, tmp_path):
    start = params_of(run(from_base(tmp_path, base, max_step=1)))
    with jax.numpy_dtype_promotion("standard"):
        of_base = params_of(run(config(base, adapters=False, max_step=2, save_every=2)))
    end = params_of(trained)
    for path, x in end.items():
        if not is_adapter(path):
            np.testing.assert_array_equal(x, of_base[path], err_msg=path)
        elif path.endswith("_b"):
            assert np.any(x != start[path]), path
    assert set(end) - set(of_base) == {path for path in end if is_adapter(path)}


def test_the_optimizer_has_a_state_for_adapters_only(trained):
    moments = [
        path
        for path in tree.by_path(tree.to_nested(trained.trainer_state.learner))
        if "/mu/" in path
    ]
    assert moments
    assert all(is_adapter(path) for path in moments)
    num_adapters = sum(map(is_adapter, params_of(trained)))
    assert len(moments) == num_adapters


def test_a_resumed_run_equals_an_unbroken_one(trained, base, tmp_path):
    run(from_base(tmp_path, base, max_step=4))
    tiny.assert_trees_equal(params_of(run(from_base(tmp_path, base))), params_of(trained))


def test_the_compiled_step_has_no_gradient_matmul_of_a_frozen_weight(tmp_path):
    # Sizes that no other array has: a matrix of 16 x 56 is an "up" of an expert or its gradient.
    def products(adapters):
        cfg = config(tmp_path, adapters=adapters, hidden_dim=56)
        text = cfg.instantiate(parent=None).compile_train_step().as_text()
        shapes = re.findall(r"f32\[([\d,]+)\]\S* (?:dot|custom-call)\(", text)
        return [shape for shape in shapes if re.search(r"(^|,)(16,56|56,16)$", shape)]

    assert products(adapters=False)
    assert not products(adapters=True)


def test_the_rank_of_experts_is_shared_by_those_of_a_token():
    cfg = add_adapters(tiny.model_config(), rank=6)
    layer = cfg.decoder.block[0]
    assert layer.self_attention.adapter.rank == 6
    assert layer.feed_forward.experts.adapter.rank == 3  # K is 2.
    assert layer.feed_forward.shared_experts.adapter.rank == 6
    assert (
        add_adapters(tiny.model_config(), rank=1).decoder.block[0].feed_forward.experts.adapter.rank
        == 1
    )
    given = add_adapters(tiny.model_config(), rank=6, rank_of_experts=5)
    assert given.decoder.block[0].feed_forward.experts.adapter.rank == 5


def test_balancing_stops_unless_the_router_is_trained(tmp_path):
    def model():
        cfg = tiny.model_config()
        balancing = BiasBalancing.default_config()
        cfg.decoder.block[0].feed_forward.router.bias_balancing = balancing
        return tiny.trainer_config(tmp_path, model=cfg, evaler=False)

    stopped = add_adapters(model()).model.decoder.block[0].feed_forward
    assert stopped.load_balance_loss.weight == stopped.router_z_loss.weight == 0
    assert stopped.router.bias_balancing.rate == 0
    cfg = add_adapters(model(), train_router=True)
    assert cfg.model.decoder.block[0].feed_forward.load_balance_loss.weight > 0
    specs = cfg.model.instantiate(parent=None).create_parameter_specs_recursively()
    learner = cfg.learner.clone(name="learner").instantiate(parent=None, param_specs=specs)
    updated = {
        path
        for path in tree.by_path(tiny.initial(cfg.model.instantiate(parent=None)))
        if learner.is_updated(path)
    }
    assert {path.rpartition("/")[2] for path in updated if not is_adapter(path)} == {"weight"}
    assert not learner.is_frozen(
        next(p for p in learner._labels if p.endswith("bias_balancing/bias"))
    )


def test_a_modifier_adds_the_same_adapters(tmp_path):
    cfg = config(tmp_path, adapters=False)
    changed = AddAdapters.default_config().set(rank=4, alpha=8.0).instantiate()(cfg)
    assert changed.debug_string() == config(tmp_path).debug_string()


def test_targets_that_match_nothing_are_refused_with_those_that_exist():
    with pytest.raises(UserError, match=r"targets='.*attn'.*decoder\.block\[0\]\.self_attention"):
        add_adapters(tiny.model_config(), ".*attn")
    with pytest.raises(UserError, match=r"targets='\('"):
        add_adapters(tiny.model_config(), "(")


@pytest.mark.parametrize("field", ["rank", "rank_of_experts"])
def test_a_rank_of_0_is_refused(field):
    with pytest.raises(ValueError, match="rank"):
        add_adapters(tiny.model_config(), **{field: 0})


def test_a_base_of_other_shapes_is_refused(base, tmp_path):
    with pytest.raises(UserError, match=r"\[2, 4, 24, 16\].*\[2, 4, 32, 16\]"):
        run(from_base(tmp_path, base, hidden_dim=32))


def test_a_weight_with_an_adapter_does_not_decay_without_rules_too():
    model = add_adapters(tiny.model_config(), ".*self_attention").instantiate(parent=None)
    specs, params = model.create_parameter_specs_recursively(), tiny.initial(model)
    optimizer = config_for_function(adamw_optimizer).set(learning_rate=0.1, weight_decay=0.5)
    learner = Learner.default_config().set(name="learner", optimizer=optimizer)
    learner = learner.instantiate(parent=None, param_specs=specs)
    update = learner.update(
        gradients=jax.tree.map(jnp.zeros_like, params),
        state=learner.init(params),
        params=params,
        loss=jnp.ones(()),
    )
    after, before = tree.by_path(update.params), tree.by_path(params)
    norm = lambda x: float(np.linalg.norm(np.ravel(x)))
    share = {path: norm(x) / norm(before[path]) for path, x in after.items() if np.any(x)}
    attention = {p: x for p, x in share.items() if "/self_attention/" in p and not is_adapter(p)}
    assert set(attention.values()) == {1.0}
    assert share["embedding/weight"] == pytest.approx(1 - 0.1 * 0.5)
    assert share[next(path for path in share if path.endswith("_lora_a"))] == pytest.approx(0.95)
