import threading
import traceback
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moelib.core.config import (
    REQUIRED,
    FrozenConfigError,
    InstantiableConfig,
    InvalidConfigNameError,
    Required,
    RequiredFieldMissingError,
    config_class,
    config_for_function,
)
from moelib.core.context import OutputConflictError, context_stack, current_context
from moelib.core.metrics import weighted
from moelib.core.module import (
    ChildNameConflictError,
    Module,
    UnconsumedAuxLossError,
    functional,
    in_context,
)


class Linear(Module):
    @config_class
    class Config(Module.Config):
        input_dim: Required[int] = REQUIRED
        scale: float = 1.0

    def forward(self, x: jax.Array) -> jax.Array:
        self.add_summary("mean", jnp.mean(x))
        return self.config.scale * (x @ self.state["weight"])

    @in_context
    def transposed(self, x: jax.Array) -> jax.Array:
        return x @ self.state["weight"].T

    @in_context
    def noise(self) -> jax.Array:
        return jax.random.uniform(self.prng_key)

    def num_elements(self) -> int:
        return self.config.input_dim**2


class Ffn(Module):
    @config_class
    class Config(Module.Config):
        input_dim: Required[int] = REQUIRED
        up: Linear.Config = Linear.default_config()
        down: InstantiableConfig = Linear.default_config()

    def __init__(self, cfg: Any, *, parent: Module | None):
        super().__init__(cfg, parent=parent)
        cfg = self.config
        self._add_child("up", cfg.up.set(input_dim=cfg.input_dim))
        self._add_child("down", cfg.down.set(input_dim=cfg.input_dim))

    def forward(self, x: jax.Array) -> jax.Array:
        return self.down(jax.nn.relu(self.up(x)))


class Parent(Module):
    """Holds any children, and runs any function as its forward method."""

    @config_class
    class Config(Module.Config):
        children_: dict[str, InstantiableConfig] = {}

    def __init__(self, cfg: Any, *, parent: Module | None):
        super().__init__(cfg, parent=parent)
        for name, child in self.config.children_.items():
            self._add_child(name, child)

    def forward(self, do: Any, *args: Any) -> Any:
        return do(self, *args)


class WithLoss(Module):
    def forward(self, x: jax.Array) -> jax.Array:
        self.add_aux_loss("balance", jnp.sum(x), weight=0.5)
        return x


def ffn(dim: int = 2) -> Ffn:
    return Ffn.default_config().set(name="ffn", input_dim=dim).instantiate(parent=None)


def parent(**children: InstantiableConfig) -> Parent:
    return Parent.default_config().set(name="root", children_=children).instantiate(parent=None)


def linear() -> Any:
    return Linear.default_config().set(input_dim=2)


def run(module: Module, *inputs: Any, state: Any = None, key: int | None = None, **kwargs: Any):
    """Returns functional() of a module in training."""
    prng_key = None if key is None else jax.random.key(key)
    kwargs = {"is_training": True, **kwargs}
    return functional(module, prng_key, {} if state is None else state, inputs, **kwargs)


X: Any = np.ones((1, 2), np.float32)
WEIGHTS: Any = {
    name: {"weight": jnp.asarray(scale * np.eye(2, dtype=np.float32))}
    for name, scale in (("up", 2), ("down", 3))
}


# -- The tree ------------------------------------------------------------------------------------


def test_children_are_reached_by_name_and_know_their_path():
    module = parent(a=Ffn.default_config().set(input_dim=2))
    assert module.a.up is module.children["a"].children["up"]
    assert module.a.up.path() == "a.up"
    assert module.path() == ""
    assert (module.name, module.a.name, module.a.parent) == ("root", "a", module)
    assert Ffn.default_config().set(input_dim=1).instantiate(parent=None).name == "ffn"


def test_a_name_that_is_no_child_is_refused_with_the_nearest():
    with pytest.raises(AttributeError, match=r"Ffn.*'dwn'.*'down'"):
        _ = ffn().dwn


def test_an_attribute_error_inside_a_property_is_its_own():
    class Broken(Linear):
        @property
        def half(self) -> Any:
            return self.config.nothing_of_the_sort

    with pytest.raises(AttributeError, match="'nothing_of_the_sort'"):
        _ = Broken.default_config().set(input_dim=1).instantiate(parent=None).half


@pytest.mark.parametrize(
    ("name", "error"),
    [
        *((name, ChildNameConflictError) for name in ("up", "forward", "name", "_config")),
        *((name, InvalidConfigNameError) for name in ("a.b", "a/b", "")),
    ],
)
def test_a_child_with_a_taken_name_or_one_that_breaks_paths_is_refused(name, error):
    with pytest.raises(error, match=f"'{name}'"):
        ffn()._add_child(name, linear())


def test_fields_that_a_parent_sets_have_its_line_as_origin():
    module = ffn(dim=4)
    assert module.up.config.input_dim == 4
    assert module.up.config.origin("input_dim").startswith(__file__)
    assert module.config.up.input_dim == 4
    assert module.up.config is module.up.config


def test_the_configs_of_a_built_tree_are_frozen():
    module = ffn()
    for built in (module, module.up, Ffn(Ffn.default_config().set(input_dim=1), parent=None)):
        with pytest.raises(FrozenConfigError, match=r"(Ffn|Linear)\.Config\.input_dim"):
            built.config.input_dim = 3


def test_building_does_not_change_the_config_and_can_be_repeated():
    cfg = linear()
    before = cfg.debug_string()
    module = parent(a=cfg, b=cfg)
    assert cfg.debug_string() == before
    assert module.a is not module.b
    assert (module.a.config.name, module.b.config.name) == ("a", "b")
    assert module.a.config.clone(name="b") == module.b.config


def test_a_child_field_takes_a_subclass_and_a_function_config():
    class Wide(Linear):
        @config_class
        class Config(Linear.Config):
            more: int = 1

    cfg = Ffn.default_config().set(input_dim=2, up=Wide.default_config())
    assert type(cfg.instantiate(parent=None).up) is Wide

    def built(input_dim: int, name: str, parent: Module) -> Module:
        return linear().set(name=name, input_dim=input_dim).instantiate(parent=parent)

    cfg.down = config_for_function(built).set(name="down", parent=None)
    assert cfg.instantiate(parent=None).down.path() == "down"


def test_an_unset_field_is_named_by_its_path_from_the_root():
    outer = Parent.default_config().set(children_={"a": Ffn.default_config()})
    path = r"^children_\.outer\.children_\.a\.input_dim .* Ffn\.Config"
    with pytest.raises(RequiredFieldMissingError, match=path):
        parent(outer=outer)


def test_an_unset_field_of_a_child_that_is_no_field_is_named_by_its_path():
    class Holder(Module):
        @config_class
        class Config(Module.Config):
            schedules: list[InstantiableConfig] = []

        def __init__(self, cfg: Any, *, parent: Module | None):
            super().__init__(cfg, parent=parent)
            self.schedules = [schedule.instantiate() for schedule in self.config.schedules]

    def schedule(peak: float) -> float:
        return peak

    schedules = [config_for_function(schedule).set(peak=1.0), config_for_function(schedule)]
    cfg = Holder.default_config().set(schedules=schedules)
    with pytest.raises(RequiredFieldMissingError, match=r"^children_\.a\.schedules\[1\]\.peak "):
        parent(a=cfg)


def test_an_error_while_building_keeps_its_traceback_and_names_the_config():
    class Failing(Linear):
        def __init__(self, cfg: Any, *, parent: Module | None):
            super().__init__(cfg, parent=parent)
            self.fail()

        def fail(self) -> None:
            raise ValueError("mine") from KeyError("its cause")

    cfg = Parent.default_config().set(children_={"b": Failing.default_config().set(input_dim=1)})
    with pytest.raises(ValueError, match="mine") as error:
        parent(a=cfg)
    assert error.value.__notes__ == [
        f"while children_.a.children_.b was built ({Failing.__qualname__}.Config)"
    ]
    assert isinstance(error.value.__cause__, KeyError)
    names = [frame.name for frame in traceback.extract_tb(error.value.__traceback__)]
    assert names[-2:] == ["__init__", "fail"]
    assert len(names) <= 9


# -- Calls ---------------------------------------------------------------------------------------


def test_functional_returns_the_result_and_the_outputs_by_path():
    y, collection = run(ffn(), X, state=WEIGHTS)
    assert y.tolist() == [[6.0, 6.0]]
    assert jax.tree.map(float, collection.summaries) == {"up": {"mean": 1.0}, "down": {"mean": 2.0}}
    assert collection.state_updates == {}
    by_name, _ = functional(ffn(), None, WEIGHTS, {"x": X}, is_training=False)
    assert by_name.tolist() == y.tolist()


def test_operations_of_a_child_carry_its_name_in_the_program():
    lowered = jax.jit(lambda x: functional(ffn(), None, WEIGHTS, (x,), is_training=False)[0]).lower(
        X
    )
    names = lowered.as_text(debug_info=True)
    assert all(f"/{child}/dot_general" in names for child in ffn().children)


def test_functional_is_a_pure_function_under_jit_and_grad():
    module = ffn()

    @jax.jit
    def loss(state: Any, x: jax.Array) -> jax.Array:
        return jnp.sum(run(module, x, state=state)[0])

    grads = jax.grad(loss)(WEIGHTS, X)
    assert grads["down"]["weight"].tolist() == [[2.0, 2.0], [2.0, 2.0]]
    assert current_context() is None


def test_methods_of_children_run_with_their_own_state():
    module = parent(f=Ffn.default_config().set(input_dim=2))
    y, collection = run(module, lambda m: m.f.up.transposed(X), state={"f": WEIGHTS})
    assert y.tolist() == [[2.0, 2.0]]
    assert collection.summaries == {}


def test_super_forward_runs_in_the_same_context():
    class Twice(Linear):
        def forward(self, x: jax.Array) -> jax.Array:
            return 2 * super().forward(x)

    module = parent(a=Twice.default_config().set(input_dim=2))
    y, collection = run(module, lambda m: m.a(X), state={"a": WEIGHTS["up"]})
    assert y.tolist() == [[4.0, 4.0]]
    assert list(collection.summaries["a"]) == ["mean"]


def test_methods_of_a_mixin_run_in_the_context_of_the_module():
    class Doubling:
        @in_context
        def doubled(self) -> Any:
            return 2 * self.state["weight"]  # pyrefly: ignore[missing-attribute]

    class Mixed(Doubling, Linear):
        pass

    module = parent(a=Mixed.default_config().set(input_dim=2))
    y, _ = run(module, lambda m: m.a.doubled(), state={"a": {"weight": 4}})
    assert y == 8


def test_methods_without_context_run_anywhere():
    module = parent(a=linear())
    assert module.a.num_elements() == 4
    assert run(module, lambda m: m.a.num_elements())[0] == 4


def test_a_child_called_twice_draws_other_numbers():
    module = parent(a=linear(), b=linear())
    draws, _ = run(module, lambda m: (m.a.noise(), m.b.noise(), m.a.noise()), key=0)
    assert len(set(map(float, draws))) == 3


def test_keys_of_children_depend_on_their_names_and_on_nothing_else():
    def draw(m: Any) -> dict[str, float]:
        draws = {name: float(m.children[name].noise()) for name in m.children if name != "f"}
        return {**draws, "down": float(m.f.down.noise())}

    nested = Ffn.default_config().set(input_dim=2)
    first, _ = run(parent(a=linear(), b=linear(), f=nested), draw, key=0)
    second, _ = run(
        parent(f=nested, c=linear(), b=linear(), a=linear()),
        lambda m: (m.f.up.noise(), draw(m))[1],
        key=0,
    )
    assert first["a"] != first["b"]
    assert {name: second[name] for name in first} == first


def test_old_and_new_random_keys_both_work():
    module = linear().instantiate(parent=None)
    for key in (jax.random.key(0), jax.random.PRNGKey(0)):
        assert functional(module, key, {}, (), is_training=True, method="noise")[0] < 1


OTHER = parent(x=linear())


@pytest.mark.parametrize(
    ("do", "error", "named"),
    [
        (lambda m: m.a.noise(), RuntimeError, r"^children_\.a .*prng_key=None"),
        (lambda m: OTHER.x(X), RuntimeError, r"^children_\.x .*root"),
        (lambda m: m.add_aux_loss("x", X, weight=1.0), ValueError, r"'x'.*shape \(1, 2\)"),
        (lambda m: [m.add_summary("a", 1), m.a(X)], OutputConflictError, r"^root .*'a'"),
        (lambda m: [m.a(X), m.add_summary("a", 1)], OutputConflictError, r"^root .*'a'"),
        (
            lambda m: [m.add_module_output("o", X), m.add_module_output("o", X)],
            OutputConflictError,
            r"^root .*'o'",
        ),
    ],
)
def test_a_wrong_call_inside_a_module_is_refused(do, error, named):
    with pytest.raises(error, match=named):
        run(parent(a=linear()), do, state={"a": WEIGHTS["up"]})


def test_a_wrong_call_of_functional_is_refused():
    module = parent(a=linear())
    with pytest.raises(RuntimeError, match=r"^children_\.a .*functional\(module"):
        module.a(X)
    with pytest.raises(RuntimeError, match=r"a: functional\(\).*state=None"):
        functional(module, None, None, (lambda m: m.a(1),), is_training=True)
    with pytest.raises(TypeError, match=r"functional\(ffn\):.*ndarray.*tuple"):
        functional(ffn(), None, WEIGHTS, X, is_training=False)
    with pytest.raises(AttributeError, match=r"Parent.*'transpose'"):
        run(module, method="transpose")
    with pytest.raises(ValueError, match=r"collections: 'summary'.*'summaries"):
        run(module, drop_output_collections=["summary"])


def test_the_mode_reaches_every_module():
    class Mode(Module):
        def forward(self) -> bool:
            return self.is_training

    module = parent(a=Mode.default_config())
    assert run(module, lambda m: m.a())[0] is True
    assert run(module, lambda m: m.a(), is_training=False)[0] is False


def test_threads_have_contexts_of_their_own():
    module = parent(a=linear())
    seen: list[Any] = []

    def in_thread(stack: Any) -> None:
        seen.append(current_context())
        context_stack()[:] = stack
        seen.append(module.a.transposed(X).tolist())

    def forward(m: Any) -> None:
        thread = threading.Thread(target=in_thread, args=(list(context_stack()),))
        thread.start()
        thread.join()

    run(module, forward, state={"a": WEIGHTS["up"]})
    assert seen == [None, [[2.0, 2.0]]]
    assert current_context() is None


# -- Outputs -------------------------------------------------------------------------------------


def test_outputs_go_to_their_collections():
    def add_outputs(m: Any) -> Any:
        m.add_summary("s", 1)
        m.add_state_update("bias", 2)
        m.add_module_output("o", 3)
        return m.get_module_outputs()

    outputs, collection = run(parent(), add_outputs)
    assert outputs == {"o": 3}
    assert collection == ({"s": 1}, {"bias": 2}, {"o": 3}, {})


def test_a_summary_is_a_scalar_unless_each_element_is_wanted():
    def add_outputs(m: Any, size: int, **kwargs: Any) -> None:
        m.add_summary("load", weighted(jnp.ones(size), jnp.ones(size)), **kwargs)

    module = parent(a=Parent.default_config())
    with pytest.raises(ValueError, match=r"children_.a:.*'load'.*shape \(64,\)"):
        run(module, lambda m: m.a(add_outputs, 64))
    _, collection = run(module, lambda m: m.a(lambda m: add_outputs(m, 64, per_element=True)))
    assert collection.summaries["a"]["load"].mean.shape == (64,)
    run(module, lambda m: m.a(add_outputs, 2))


def test_auxiliary_losses_reach_the_total_with_their_weights():
    module = parent(a=WithLoss.default_config(), b=WithLoss.default_config())
    _, collection = run(module, lambda m: m.a(jnp.ones(4)) + m.b(jnp.ones(4)))
    assert collection.total_aux_loss() == 0.5 * 4 + 0.5 * 4
    assert run(parent(), lambda m: None)[1].total_aux_loss() == 0.0


def test_an_auxiliary_loss_lost_in_a_nested_functional_is_an_error():
    module = parent(a=WithLoss.default_config())

    def nested(m: Any, **kwargs: Any) -> Any:
        kwargs = {"is_training": True, **kwargs}
        return functional(m.a, None, {}, (jnp.ones(2),), **kwargs)[0]

    with pytest.raises(UnconsumedAuxLossError, match=r"functional\(a\)"):
        run(module, nested)
    dropped, _ = run(module, lambda m: nested(m, drop_output_collections=["aux_losses"]))
    assert dropped.tolist() == [1.0, 1.0]
    evaluated, _ = run(module, lambda m: nested(m, is_training=False), is_training=False)
    assert evaluated.tolist() == [1.0, 1.0]


# -- Modules outside of their children -----------------------------------------------------------


class Head(Module):
    def forward(self, x: jax.Array) -> jax.Array:
        return self.parent.parent.emb.transposed(x)


def test_gradients_of_a_module_that_is_called_from_outside_its_parent_add_up():
    deep = Parent.default_config().set(children_={"head": Head.default_config()})
    module = parent(emb=linear(), deep=deep)

    def loss(weight: jax.Array) -> jax.Array:
        x = jnp.ones((1, 2))
        both = run(module, lambda m: m.emb(x) + m.deep.head(x), state={"emb": {"weight": weight}})
        return jnp.sum(both[0])

    assert jax.grad(loss)(jnp.eye(2)).tolist() == [[2.0, 2.0], [2.0, 2.0]]


# -- Errors --------------------------------------------------------------------------------------


def test_the_traceback_of_a_layer_is_short_and_names_the_layer_and_shapes():
    cfg: Any = Ffn.default_config().set(input_dim=2)
    for _ in range(5):
        cfg = Parent.default_config().set(children_={"inner": cfg})
    module = cfg.instantiate(parent=None)
    state = {"up": {"weight": jnp.eye(2)}, "down": {"weight": jnp.ones((3, 3))}}
    for _ in range(5):
        state = {"inner": state}

    def forward(m: Any, x: jax.Array) -> jax.Array:
        inner = m.children["inner"]
        return inner(forward, x) if isinstance(inner, Parent) else inner(x)

    with pytest.raises(TypeError, match="dot_general") as error:
        jax.jit(lambda s: run(module, forward, jnp.ones((1, 2)), state=s))(state)
    assert error.value.__notes__[0] == (
        f"in {'inner.' * 5}down (Linear.forward), configured at {'children_.inner.' * 5}down; "
        "parameters: weight [3, 3] float32"
    )
    frames = traceback.extract_tb(error.value.__traceback__)
    ours = [frame for frame in frames if "moelib/core" in frame.filename]
    theirs = [frame for frame in frames if frame.filename == __file__]
    assert len(ours) <= 1
    assert len(theirs) == 3 + 2 * 5 + 2  # Two a level here: `forward` of the test and of Parent.
    assert theirs[-1].name == "forward"


def test_an_error_keeps_its_cause_and_is_explained_once():
    cause = KeyError("cause")

    def fail(m: Any) -> None:
        raise ValueError("mine") from cause

    module = parent(a=Parent.default_config())
    with pytest.raises(ValueError, match="mine") as error:
        run(module, lambda m: m.a(fail))
    assert error.value.__cause__ is cause
    assert error.value.__notes__ == ["in a (Parent.forward), configured at children_.a"]
