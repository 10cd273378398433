"""Layers of Flax linen, Flax NNX, Equinox, and plain functions."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

from moelib.core import tree
from moelib.core.config import config_for_function
from moelib.core.param import is_spec
from moelib.inference.generate import Settings, generate_tokens
from moelib.layers.external import ExternalLayer, InitApply, Updated
from moelib.layers.transformer import LoopStack
from tests import tiny
from tests.inference.models import compiled_whole_logits, decoder, layer, with_parameters
from tests.layers.calling import build, call, call_and_collect, initial

D = 8
X = np.random.default_rng(0).normal(size=(2, 5, D)).astype(np.float32)


def plain(input_dim, hidden_dim=6):
    """Returns a layer of one matrix and back, and a bias."""

    def init(key):
        up, down = jax.random.split(key)
        return {
            "up": jax.random.normal(up, (input_dim, hidden_dim)),
            "down": [jax.random.normal(down, (hidden_dim, input_dim)), jnp.ones(input_dim)],
        }

    def apply(params, x, mask=None):
        del mask
        weight, bias = params["down"]
        return jnp.tanh(x @ params["up"]) @ weight + bias[None, None]

    return init, apply


# --8<-- [start:linen]
class Gated(linen.Module):
    """A feed-forward layer in Flax linen."""

    hidden_dim: int

    @linen.compact
    def __call__(self, x):
        gate, up = (linen.Dense(self.hidden_dim, use_bias=False)(x) for _ in range(2))
        return linen.Dense(x.shape[-1])(linen.silu(gate) * up)


def gated(input_dim, hidden_dim):
    """Returns the two functions of a gated feed-forward layer."""
    module = Gated(hidden_dim)

    def init(key):
        return module.init(key, jnp.zeros((1, 1, input_dim)))["params"]

    def apply(params, x, mask=None):
        del mask  # Each token is computed separately.
        return module.apply({"params": params}, x)

    return init, apply


# --8<-- [end:linen]


# --8<-- [start:nnx]
def nnx_mlp(input_dim, hidden_dim):
    """Returns the two functions of a feed-forward layer in Flax NNX."""

    def make(key):
        rngs = nnx.Rngs(key)
        up = nnx.Linear(input_dim, hidden_dim, rngs=rngs)
        return nnx.Sequential(up, nnx.relu, nnx.Linear(hidden_dim, input_dim, rngs=rngs))

    def apply(params, x, mask=None):
        del mask
        module = nnx.eval_shape(make, jax.random.key(0))
        return nnx.merge(nnx.graphdef(module), params)(x)

    return lambda key: nnx.state(make(key), nnx.Param), apply


# --8<-- [end:nnx]


# --8<-- [start:equinox]
def equinox_mlp(input_dim, hidden_dim):
    """Returns the two functions of a feed-forward layer in Equinox."""

    def make(key):
        return eqx.nn.MLP(input_dim, input_dim, hidden_dim, depth=1, key=key)

    def apply(params, x, mask=None):
        del mask
        rest = eqx.filter_eval_shape(make, jax.random.key(0))
        module = eqx.combine(params, eqx.filter(rest, callable))
        return jax.vmap(jax.vmap(module))(x)  # Equinox layers take one token.

    return lambda key: eqx.filter(make(key), eqx.is_array), apply


# --8<-- [end:equinox]


def external(functions, axes=(), **fields):
    """Returns the config of a layer of these functions."""
    cfg = ExternalLayer.default_config().set(functions=config_for_function(functions), axes=axes)
    cfg.functions.set(**fields)
    return cfg.set(input_dim=D)


def test_the_layer_of_the_docs_is_one_field_of_a_model():
    cfg = tiny.model_config(decoder(layer()))
    # --8<-- [start:use]
    layers = cfg.decoder.block[0]
    layers.feed_forward = ExternalLayer.default_config().set(
        functions=config_for_function(gated).set(
            hidden_dim=32
        ),  # input_dim is set by the layer above.
        axes=[("Dense_[01]/kernel", ("embed", "ffn")), ("Dense_2/kernel", ("ffn", "embed"))],
        token_by_token=True,  # Generation may use a KV cache.
    )
    # --8<-- [end:use]
    specs = cfg.instantiate(parent=None).create_parameter_specs_recursively()
    made = specs["decoder"]["repeated0"]["feed_forward"]
    assert made["Dense_2"]["kernel"].axes == ("layers", "ffn", "embed")
    assert made["Dense_0"]["kernel"].shape == (2, tiny.DIM, 32)


def names_of(made):
    return {path: spec.shape for path, spec in tree.flatten_items(made, is_spec)}


@pytest.mark.parametrize("functions", [plain, gated, nnx_mlp, equinox_mlp])
def test_outputs_and_gradients_are_those_of_the_functions(functions):
    made = build(external(functions, hidden_dim=6))
    init, apply = functions(D, 6)
    theirs = init(jax.random.key(3))
    ours = initial(made, seed=3)
    specs = made.create_parameter_specs_recursively()
    assert names_of(specs) == {path: x.shape for path, x in tree.flatten_items(ours)}
    assert names_of(specs) == {path: x.shape for path, x in tree.flatten_items(theirs)}

    def loss(apply, params):
        return jnp.sum(apply(params) ** 2)

    got = jax.value_and_grad(lambda p: loss(lambda p: call(made, p, x=X), p))(ours)
    want = jax.value_and_grad(lambda p: loss(jax.jit(lambda p: apply(p, X)), p))(theirs)
    assert got[0] == want[0] > 0
    jax.tree.map(np.testing.assert_array_equal, got[1], tree.to_nested(want[1]))


def test_parameters_are_counted_sharded_and_decayed_by_the_config():
    made = build(external(plain, axes=[("up", ("embed", "ffn")), ("down/0", ("ffn", "embed"))]))
    specs = made.create_parameter_specs_recursively()
    assert specs["up"].axes == ("embed", "ffn")
    assert specs["down"]["0"].axes == ("ffn", "embed")
    assert specs["down"]["1"].axes == (None,)
    assert specs["down"]["1"].weight_decay_scale == 0
    assert specs["up"].weight_decay_scale == 1
    assert made.active_parameters() == 2 * D * 6 + D
    assert made.forward_flops_per_token(7) == 2 * 2 * D * 6
    told = build(external(plain).set(flops_per_token=5.0, dtype="bfloat16"))
    assert told.forward_flops_per_token(7) == 5
    assert made.matrix_flops_per_token(lambda path: True) == 2 * 2 * D * 6
    assert told.matrix_flops_per_token(lambda path: True) == 5
    assert told.matrix_flops_per_token(lambda path: False) == 0
    assert {x.dtype for x in jax.tree.leaves(initial(told))} == {jnp.dtype("bfloat16")}


def running_mean(input_dim, momentum=0.5):
    """Returns a layer that centers its inputs, and drops some while it is trained."""

    def init(key):
        del key
        return {"mean": jnp.zeros(input_dim), "steps": jnp.zeros((), jnp.int32)}

    def apply(params, x, *, prng_key, is_training):
        y = x - params["mean"][None, None]
        if not is_training:
            return y
        mean = (1 - momentum) * params["mean"] + momentum * jnp.mean(x, axis=(0, 1))
        kept = jax.random.bernoulli(prng_key, 0.5, x.shape)
        changed = {"mean": mean, "steps": params["steps"] + 1}
        return Updated(jnp.where(kept, y, 0.0), changed)

    return InitApply(init, apply)


def test_functions_may_draw_and_change_what_is_not_trained():
    made = build(external(running_mean).set(fixed=["mean"]))
    specs = made.create_parameter_specs_recursively()
    assert not specs["mean"].trainable
    assert not specs["steps"].trainable
    assert made.active_parameters() == 0
    params = initial(made)
    y, collected = call_and_collect(made, params, x=X)
    assert 0 < np.mean(np.asarray(y) == 0) < 1
    assert int(collected.state_updates["steps"]) == 1
    np.testing.assert_allclose(collected.state_updates["mean"], X.mean((0, 1)) / 2, rtol=1e-6)
    y, collected = call_and_collect(made, params, x=X, is_training=False)
    np.testing.assert_array_equal(y, X)
    assert not collected.state_updates


def test_prebuilt_parameters_are_taken():
    made = build(external(plain))
    bias = np.full(D, 7.0, np.float32)
    params = made.initialize_parameters_recursively(
        jax.random.key(0), prebuilt={"down": {"1": bias}}
    )
    np.testing.assert_array_equal(params["down"]["1"], bias)
    with pytest.raises(ValueError, match="'down/2'"):
        made.initialize_parameters_recursively(jax.random.key(0), prebuilt={"down": {"2": bias}})


def mean_of_earlier(input_dim):
    """Returns a layer that sees all tokens so far."""
    del input_dim

    def init(key):
        del key
        return {"scale": 1.0}  # Any number is an array.

    def apply(params, x, mask=None):
        del mask
        number = jnp.arange(1, x.shape[1] + 1, dtype=x.dtype)[None, :, None]
        return params["scale"] * jnp.cumsum(x, axis=1) / number

    return init, apply


@pytest.mark.parametrize("by_token", [False, True])
def test_texts_are_computed_whole_unless_tokens_are_declared_independent(by_token, caplog):
    functions = plain if by_token else mean_of_earlier
    part = external(functions).set(token_by_token=by_token)
    stack = decoder(layer(part), layer(), kind=LoopStack)
    model, params = with_parameters(tiny.model_config(stack))
    prompts = [[3, 4, 5], [7]]
    texts = list(
        generate_tokens(model, params, prompts, Settings(max_new_tokens=5, temperature=0.0))
    )
    assert ("has no cache" in caplog.text) != by_token
    for prompt, text in zip(prompts, texts, strict=True):
        logits = compiled_whole_logits(model, params, np.array([[*prompt, *text]]))[0]
        np.testing.assert_array_equal(np.argmax(logits[len(prompt) - 1 : -1], -1), text)


def test_parameters_must_be_arrays():
    with pytest.raises(TypeError) as error:
        build(external(made_by(lambda key: {"f": jnp.tanh})))
    assert "layer: init must return a tree of arrays" in "".join(error.value.__notes__)


def no_pair(input_dim):
    """Returns one function instead of two."""
    return lambda key: {"w": jnp.ones(input_dim)}


def made_by(init):
    """Returns a function that returns this init and an apply."""

    def functions(input_dim):
        del input_dim
        return init, lambda params, x: x

    return functions


@pytest.mark.parametrize(
    ("cfg", "message"),
    [
        (external(no_pair), "layer"),
        (external(made_by(lambda key: key)), r"init "),
        (external(made_by(lambda key: {"k": key})), r"'k'.*key<fry>"),
        (external(made_by(lambda key: {"z": jnp.ones(1, "complex64")})), "'z'"),
        (external(made_by(lambda key: {"cache": jnp.ones(1)})), '"cache"'),
        (external(made_by(lambda key: {"a/b": jnp.ones(1), "a": {"b": jnp.ones(1)}})), "a/b"),
        (external(made_by(lambda key: {"a": jnp.ones((0, 2))})), r"'a'.*\(0, 2\).*1"),
        (external(plain, axes=[("up", ("embed",))]), r"layer:.*'up'"),
        (external(plain, axes=[("uq", ("embed",))]), r"layer:.*'uq'"),
        (external(plain).set(fixed=["dawn.*"]), r"layer:.*'dawn.\*'"),
    ],
)
def test_functions_that_cannot_be_a_layer_are_refused(cfg, message):
    with pytest.raises(ValueError, match=message):
        build(cfg)
