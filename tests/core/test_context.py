import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moelib.core.config import config_class
from moelib.core.context import (
    CACHE,
    AuxLoss,
    OutputCollection,
    OutputConflictError,
    fold_name,
    inherited,
    inheriting,
    new_output_collection,
    prune_empty,
    remat_in_context,
    scan_in_context,
)
from moelib.core.module import Module, functional, in_context

LENGTH = 3


class Layer(Module):
    """Scales its input; gives an output of each kind."""

    def forward(self, x: jax.Array) -> jax.Array:
        x = x * self.state["scale"]
        self.add_aux_loss("balance", jnp.sum(x), weight=0.1)
        self.add_summary("sum", jnp.sum(x))
        self.add_state_update("count", np.float32(1))
        return x

    @in_context
    def noise(self) -> jax.Array:
        return jax.random.uniform(self.prng_key)


class Stack(Module):
    """Three layers as a loop and as one that is repeated, to be run by any function."""

    @config_class
    class Config(Module.Config):
        layer: Layer.Config = Layer.default_config()

    def __init__(self, cfg: Any, *, parent: Module | None):
        super().__init__(cfg, parent=parent)
        for i in range(LENGTH):
            self._add_child(f"layer{i}", self.config.layer)
        self._add_child("repeated", self.config.layer)

    def forward(self, do: Any, *args: Any) -> Any:
        return do(self, *args)


ONES = np.ones(2, np.float32)
SCALES = np.array([2.0, 3.0, 4.0], np.float32)
STATE = {
    **{f"layer{i}": {"scale": SCALES[i]} for i in range(LENGTH)},
    "repeated": {"scale": SCALES},
}


class Root(Module):
    """Holds the stack one level down, so that keys are derived from above."""

    @config_class
    class Config(Module.Config):
        stack: Stack.Config = Stack.default_config()

    def __init__(self, cfg: Any, *, parent: Module | None):
        super().__init__(cfg, parent=parent)
        self._add_child("stack", self.config.stack)
        self._add_child("after", Layer.default_config())

    def forward(self, do: Any, *args: Any) -> Any:
        return do(self, *args)


remat = functools.partial(jax.checkpoint, prevent_cse=False)


def loop(m: Any, x: jax.Array) -> jax.Array:
    for i in range(LENGTH):
        x = m.children[f"layer{i}"](x)
    return x


def scan(m: Any, x: jax.Array, **kwargs: Any) -> jax.Array:
    def iteration(x: jax.Array, _: None) -> tuple[jax.Array, None]:
        return m.repeated(x), None

    state = {"repeated": m.state["repeated"]}
    return scan_in_context(iteration, carry=x, length=LENGTH, state=state, **kwargs)[0]


def remat_loop(m: Any, x: jax.Array) -> jax.Array:
    for i in range(LENGTH):
        name = f"layer{i}"
        x = remat_in_context(m.children[name], x, remat=remat, children=[name])
    return x


def remat_inside_scan(m: Any, x: jax.Array) -> jax.Array:
    def iteration(x: jax.Array, _: None) -> tuple[jax.Array, None]:
        return remat_in_context(m.repeated, x, remat=remat, children=["repeated"]), None

    state = {"repeated": m.state["repeated"]}
    return scan_in_context(iteration, carry=x, length=LENGTH, state=state)[0]


scan_of_remat = functools.partial(scan, remat=remat)
WAYS = [loop, scan, remat_loop, scan_of_remat, remat_inside_scan]


def run(do: Any, *args: Any, state: Any = STATE, key: int | None = None) -> Any:
    module = Stack.default_config().set(name="stack").instantiate(parent=None)
    prng_key = None if key is None else jax.random.key(key)
    return functional(module, prng_key, state, (do, *args), is_training=True)


@pytest.mark.parametrize("way", WAYS)
def test_auxiliary_losses_and_their_gradients_are_those_of_the_loop(way):
    @jax.jit
    @functools.partial(jax.value_and_grad, has_aux=True)
    def objective(scales: jax.Array) -> tuple[jax.Array, jax.Array]:
        state = {f"layer{i}": {"scale": scales[i]} for i in range(LENGTH)}
        state["repeated"] = {"scale": scales}
        y, collection = run(way, ONES, state=state)
        return jnp.sum(y) + collection.total_aux_loss(), y

    (total, y), gradients = objective(SCALES)
    assert y.tolist() == [24.0, 24.0]
    np.testing.assert_allclose(total, 2 * 24 + 0.1 * 2 * (2 + 6 + 24), rtol=1e-6)
    a, b, c = SCALES
    expected = [
        2 * b * c + 0.2 * (1 + b + b * c),
        2 * a * c + 0.2 * (a + a * c),
        2 * a * b + 0.2 * a * b,
    ]
    np.testing.assert_allclose(gradients, expected, rtol=1e-6)


def test_outputs_of_a_scan_are_stacked_under_the_repeated_child():
    _, collection = run(scan, ONES)
    assert collection.summaries["repeated"]["sum"].tolist() == [4.0, 12.0, 48.0]
    assert collection.state_updates["repeated"]["count"].shape == (LENGTH,)
    assert collection.aux_losses["repeated"]["balance"].weight.shape == (LENGTH,)
    assert list(collection.aux_losses) == ["repeated"]


def test_a_scan_carries_inputs_and_results_of_each_iteration():
    def forward(m: Any) -> Any:
        def iteration(carry: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
            return carry + x, carry * x

        return scan_in_context(iteration, carry=np.float32(0), xs=SCALES, length=LENGTH, state={})

    (carry, ys), _ = run(forward)
    assert carry == 9.0
    assert ys.tolist() == [0.0, 6.0, 20.0]


def test_each_iteration_of_a_scan_draws_other_numbers():
    def forward(m: Any) -> jax.Array:
        def iteration(carry: None, _: None) -> tuple[None, jax.Array]:
            return carry, m.repeated.noise()

        return scan_in_context(iteration, carry=None, length=LENGTH, state={})[1]

    assert len(set(run(forward, key=0)[0].tolist())) == LENGTH


@pytest.mark.parametrize("wrap", [None, remat])
def test_a_scan_given_the_keys_of_a_loop_draws_the_same_numbers(wrap):
    def looped(m: Any) -> list[jax.Array]:
        return [m.children[f"layer{i}"].noise() for i in range(LENGTH)]

    def scanned(m: Any) -> jax.Array:
        def iteration(carry: None, _: None) -> tuple[None, jax.Array]:
            return carry, m.repeated.noise()

        keys = jnp.stack([fold_name(m.prng_key, f"layer{i}") for i in range(LENGTH)])
        return scan_in_context(
            iteration,
            carry=None,
            length=LENGTH,
            state={},
            child_keys={"repeated": keys},
            remat=wrap,
        )[1]

    draws = run(scanned, key=0)[0].tolist()
    assert draws == [float(x) for x in run(looped, key=0)[0]]
    assert len(set(draws)) == LENGTH


def test_remat_draws_the_numbers_of_plain_calls():
    def rematted(m: Any) -> list[jax.Array]:
        return [
            remat_in_context(m.layer0.noise, remat=remat, children=["layer0"]) for _ in range(2)
        ]

    first, second = run(rematted, key=0)[0]
    assert [first, second] == run(lambda m: [m.layer0.noise(), m.layer0.noise()], key=0)[0]
    assert first != second


@pytest.mark.parametrize("transform", ["scan", "remat"])
def test_no_key_that_was_made_inside_a_transformation_is_used_after_it(transform):
    def inner(s: Any) -> jax.Array:
        if transform == "remat":
            return remat_in_context(s.layer0.noise, remat=remat, children=["layer0"])
        iteration = lambda carry, _: (carry, s.repeated.noise())
        return scan_in_context(iteration, carry=None, length=LENGTH, state={})[1]

    def forward(m: Any) -> tuple[jax.Array, jax.Array]:
        return m.stack(inner), m.after.noise()

    module = Root.default_config().instantiate(parent=None)
    inputs = (lambda m: m.after.noise(),)
    alone, _ = functional(module, jax.random.key(0), {}, inputs, is_training=True)
    for wrap in (lambda fn: fn, jax.jit):
        inputs = (forward,)
        (_, after), _ = wrap(
            lambda key, inputs=inputs: functional(module, key, {}, inputs, is_training=True)
        )(jax.random.key(0))
        assert after == alone


def test_two_parts_of_one_child_may_be_repeated_one_after_the_other():
    def forward(m: Any, x: jax.Array) -> jax.Array:
        x = remat_in_context(m.layer0, x, remat=remat, children=["layer0"])
        remat_in_context(
            lambda: m.add_summary("own", np.float32(1)), remat=remat, children=["layer0"]
        )
        return x

    _, collection = run(forward, ONES)
    assert collection.summaries["own"] == 1.0
    assert collection.summaries["layer0"]["sum"] == 4.0


@pytest.mark.parametrize("wrap", [None, remat])
def test_outputs_of_a_second_call_have_names_of_their_own(wrap):
    def forward(m: Any, x: jax.Array) -> jax.Array:
        for _ in range(3):
            if wrap is None:
                x = m.layer0(x)
            else:
                x = remat_in_context(m.layer0, x, remat=wrap, children=["layer0"])
        return x

    _, collection = jax.jit(lambda: run(forward, ONES))()
    sums = {name: float(inside["sum"]) for name, inside in collection.summaries.items()}
    assert sums == {"layer0": 4.0, "layer0#2": 8.0, "layer0#3": 16.0}
    assert collection.aux_losses.keys() == sums.keys()
    np.testing.assert_allclose(collection.total_aux_loss(), 0.1 * (4 + 8 + 16), rtol=1e-6)
    assert list(collection.state_updates) == ["layer0"]


class Counter(Module):
    """Counts its calls in its state."""

    def forward(self, x: jax.Array) -> jax.Array:
        count = self.state["count"] + 1
        self.add_state_update("count", count)
        self.add_aux_loss("calls", count, weight=1.0)
        return x + count


class Noisy(Module):
    """Has a random output."""

    def forward(self, x: jax.Array) -> jax.Array:
        self.add_aux_loss("noise", jax.random.uniform(self.prng_key), weight=1.0)
        return x


class Sharing(Module):
    """A stack whose layers may call a module that this one holds."""

    @config_class
    class Config(Module.Config):
        shared: Module.Config = Counter.default_config()

    def __init__(self, cfg: Any, *, parent: Module | None):
        super().__init__(cfg, parent=parent)
        self._add_child("shared", self.config.shared)
        self._add_child("stack", Stack.default_config())

    def forward(self, do: Any) -> jax.Array:
        return self.stack(do)


def share(do: Any, shared: type[Module] = Counter) -> Any:
    module = Sharing.default_config().set(shared=shared.default_config()).instantiate(parent=None)
    state = {"shared": {"count": jnp.float32(5)}, "stack": STATE}
    return functional(module, jax.random.key(0), state, (do,), is_training=True)


@pytest.mark.parametrize("wrap", [None, remat])
def test_a_module_of_the_parent_sees_the_state_that_its_earlier_call_left(wrap):
    def twice(m: Any) -> jax.Array:
        x, shared = jnp.zeros(()), m.parent.shared
        for _ in range(2):
            x = remat_in_context(shared, x, remat=wrap, children=[]) if wrap else shared(x)
        return x

    total, collection = jax.jit(lambda: share(twice))()
    assert float(total) == 6.0 + 7.0
    assert float(collection.state_updates["shared"]["count"]) == 7.0
    assert float(collection.total_aux_loss()) == 6.0 + 7.0
    assert list(collection.aux_losses) == ["shared", "shared#2"]


def test_a_module_from_outside_of_a_scan_gives_outputs_of_each_iteration():
    def scanned(m: Any) -> jax.Array:
        iteration = lambda x, _: (m.parent.shared(x), None)
        return scan_in_context(iteration, carry=jnp.zeros(()), length=LENGTH, state={})[0]

    with pytest.raises(OutputConflictError, match="shared/count"):
        share(scanned)
    _, collection = jax.jit(lambda: share(scanned, Noisy))()
    assert len(set(collection.aux_losses["shared"]["noise"].value.tolist())) == LENGTH


def test_a_module_with_a_cache_may_not_be_called_twice():
    class Caching(Layer):
        def forward(self, x: jax.Array) -> jax.Array:
            self.get_invocation_context().add("state_updates", CACHE, {"keys": x})
            return x

    stack = Stack.default_config().set(layer=Caching.default_config())
    module = Root.default_config().set(stack=stack).instantiate(parent=None)
    call = lambda m: m.layer0(jnp.ones(1))
    state = {"stack": STATE}
    functional(module, None, state, (lambda m: m.stack(call),), is_training=False)
    inside = lambda stack: [call(stack), call(stack)]
    for twice in (lambda m: [m.stack(call), m.stack(call)], lambda m: m.stack(inside)):
        with pytest.raises(OutputConflictError, match=r"(root: 'stack'|stack: 'layer0')"):
            functional(module, None, state, (twice,), is_training=False)


def test_repetition_needs_a_context():
    with pytest.raises(RuntimeError, match=r"functional\(\)"):
        scan_in_context(lambda c, x: (c, x), carry=0, length=1, state={})


def test_empty_parts_of_collections_are_pruned():
    collection = new_output_collection()
    collection.summaries["a"] = {"b": {}, "c": 1}
    collection.state_updates["a"] = {"b": {}}
    assert prune_empty(collection) == OutputCollection({"a": {"c": 1}}, {}, {}, {})


def test_the_total_of_auxiliary_losses_is_float32():
    loss = AuxLoss(jnp.ones((), jnp.bfloat16), jnp.float32(0.5))
    total = OutputCollection({}, {}, {}, {"a": {"x": loss}}).total_aux_loss()
    assert (total.dtype, float(total)) == (jnp.float32, 0.5)


def test_losses_of_parts_of_micro_batches_add_up_to_sums_over_the_tokens_of_the_batch():
    # Two layers see 1 of 2 and 3 of 6 tokens; each token's loss is its number.
    losses = [np.array([[1.0], [2.0]]), np.array([[3.0, 4.0, 8.0], [5.0, 6.0, 10.0]])]
    total = 0.0
    for part, num_tokens in zip(losses, (2, 6), strict=True):
        counts = jnp.full(2, part.shape[1], jnp.float32)
        loss = AuxLoss(jnp.asarray(part.mean(1)), jnp.full(2, 0.1), counts)
        micro = OutputCollection({}, {}, {}, {"a": {"x": loss}})
        total += num_tokens / 8 * micro.total_aux_loss(jnp.float32(num_tokens))
    np.testing.assert_allclose(total, 0.1 * sum(part.sum() for part in losses) / 8, rtol=1e-6)


def test_a_module_from_outside_sees_the_values_of_its_caller():
    seen = []

    class Watching(Module):
        def forward(self, x: jax.Array) -> jax.Array:
            seen.append((inherited("mine"), inherited("given")))
            return x

    def call(stack: Any) -> jax.Array:
        with inheriting(mine=1):  # Of the stack, and not of the module that holds the other.
            stack.parent.shared(ONES)
        return stack.parent.shared(ONES)

    module = Sharing.default_config().set(shared=Watching.default_config()).instantiate(parent=None)
    state = {"shared": {}, "stack": STATE}
    functional(module, None, state, (call,), is_training=False, inherited={"given": 2})
    assert seen == [(1, 2), (None, 2)]


def test_a_nested_functional_sees_the_values_of_its_caller_and_its_own():
    seen = []

    class Watching(Module):
        def forward(self) -> None:
            seen.append((inherited("a"), inherited("b")))

    inner = Watching.default_config().instantiate(parent=None)

    class Outer(Module):
        def forward(self) -> None:
            functional(inner, None, {}, (), is_training=False, inherited={"b": 2})

    outer = Outer.default_config().instantiate(parent=None)
    functional(outer, None, {}, (), is_training=False, inherited={"a": 1, "b": 1})
    assert seen == [(1, 2)]
