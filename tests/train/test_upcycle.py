"""Models whose experts begin as copies of a dense model's layers."""

import jax
import numpy as np
import pytest

from moelib.core.errors import UserError
from moelib.core.module import functional
from moelib.layers.moe.router import Router, Score
from moelib.layers.transformer import LoopStack, ScanStack
from moelib.train.init_from import InitFrom
from moelib.train.upcycle import Upcycle
from tests import tiny

DENSE_HIDDEN = 16


def model(feed_forward, stack=ScanStack):
    layer = tiny.transformer_layer(feed_forward)
    return tiny.model_config(tiny.stacked(layer, num_layers=2, stack=stack))


def experts(hidden_dim=DENSE_HIDDEN, num_experts=4, per_token=2, **router):
    score = {"score": Score.SOFTMAX_AFTER_TOP_K} | router
    return tiny.plain_moe(
        hidden_dim=hidden_dim,
        num_experts=num_experts,
        num_experts_per_token=per_token,
        router=Router.default_config().set(**score),
    )


def config(directory, model_cfg, **fields):
    cfg = tiny.trainer_config(directory, model=model_cfg, max_step=2, evaler=False)
    return cfg.set(**fields)


@pytest.fixture(scope="module", params=[ScanStack, LoopStack], ids=["scan", "loop"])
def dense(request, tmp_path_factory):
    """A dense run of two steps: its stack, folder and trainer."""
    folder = tmp_path_factory.mktemp("dense")
    trainer = config(folder, model(None, request.param)).instantiate(parent=None)
    trainer.run()
    return request.param, folder, trainer


def upcycled(dense, directory, feed_forward, **fields):
    stack, folder, _ = dense
    upcycle = Upcycle.default_config().set(**fields)
    start = InitFrom.default_config().set(run=str(folder), upcycle=upcycle)
    cfg = config(directory, model(feed_forward, stack), init_from=start, prng_seed=7)
    trainer = cfg.instantiate(parent=None)
    trainer.init()
    return trainer


def loss_of(trainer):
    @jax.jit
    def loss(params, batch):
        (loss, _), _ = functional(trainer.model, None, params, (batch,), is_training=False)
        return loss.mean

    return float(loss(jax.device_get(trainer.trainer_state.model), tiny.packed_batch()))


@pytest.mark.parametrize(
    ("hidden_dim", "num_experts", "per_token", "scaling_factor"),
    [(16, 4, 2, 1.0), (16, 3, 1, 1.0), (8, 4, 2, 1.0), (4, 8, 8, 2.5)],
)
def test_the_loss_begins_with_that_of_the_dense_model(
    dense, tmp_path, hidden_dim, num_experts, per_token, scaling_factor
):
    feed_forward = experts(hidden_dim, num_experts, per_token, scaling_factor=scaling_factor)
    trainer = upcycled(dense, tmp_path, feed_forward)
    assert loss_of(trainer) == pytest.approx(loss_of(dense[2]), rel=1e-6)
    if per_token == 1:
        assert trainer.run()["step"] == 2  # Trains: each copy gets other tokens.


def test_other_weights_of_a_token_begin_elsewhere(dense, tmp_path):
    feed_forward = experts(score=Score.SOFTMAX_BEFORE_TOP_K)  # Whose sum is below 1.
    assert loss_of(upcycled(dense, tmp_path, feed_forward)) != pytest.approx(loss_of(dense[2]))


def test_a_part_of_the_hidden_units_is_drawn_anew(dense, tmp_path):
    stack, _, before = dense
    old = jax.device_get(before.model_params_for_eval()["decoder"])
    trainer = upcycled(dense, tmp_path, experts(), reinitialized=0.25)
    new = jax.device_get(trainer.trainer_state.model["decoder"])
    for layer in ("repeated0",) if stack is ScanStack else ("layer0", "layer1"):
        was, now = old[layer]["feed_forward"], new[layer]["feed_forward"]["experts"]
        is_new = {
            "up": (now["up"] != np.expand_dims(was["up"], -4)).any((-3, -2)),
            "down": (now["down"] != np.expand_dims(was["down"], -3)).any(-1),
        }
        np.testing.assert_array_equal(is_new["up"], is_new["down"])
        np.testing.assert_array_equal(is_new["up"].sum(-1), 4)
        chosen = np.unique(is_new["up"].reshape(-1, 16), axis=0)
        assert len(chosen) > 1  # Other units in each expert.
        drawn = now["down"][is_new["down"]]
        assert np.std(drawn) == pytest.approx(np.std(was["down"]), rel=0.35)


def test_a_part_of_less_than_a_hidden_unit_is_refused(dense, tmp_path):
    with pytest.raises(UserError, match=r"reinitialized is 0.01, less .* 16 hidden .* 0.062 or"):
        upcycled(dense, tmp_path, experts(), reinitialized=0.01)


@pytest.mark.parametrize(
    ("feed_forward", "message"),
    [
        (experts(hidden_dim=12), "hidden_dim of the experts .* a divisor"),
        (experts(hidden_dim=8, num_experts=3), "num_experts is a multiple"),
        (None, "no layer with experts is a dense one there"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(dense, tmp_path, feed_forward, message):
    with pytest.raises(UserError, match=message):
        upcycled(dense, tmp_path, feed_forward)
