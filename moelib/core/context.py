"""What a module sees while it runs: its parameters, its random key, and where its outputs go.

A stack of contexts, one a module, follows the calls. Nothing of it lives in the modules, so the
same module runs under jit, grad, scan and remat.
"""

import contextlib
import dataclasses
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

if TYPE_CHECKING:
    from moelib.core.module import Module

Nested = dict[str, Any]


class OutputConflictError(ValueError):
    """Two outputs of one module with the same name."""


class AuxLoss(NamedTuple):
    """A loss beside the main one; the objective is the main loss + the sum of value * weight."""

    value: jax.Array
    weight: jax.Array


class OutputCollection(NamedTuple):
    """What modules give beside their return values, nested by the names of the modules."""

    summaries: Nested
    state_updates: Nested
    module_outputs: Nested
    aux_losses: Nested

    def total_aux_loss(self) -> jax.Array:
        """Returns the sum of value * weight over all auxiliary losses, float32; 0 if none."""
        losses = jax.tree.leaves(self.aux_losses, is_leaf=lambda x: isinstance(x, AuxLoss))
        total = jnp.zeros((), jnp.float32)
        for loss in losses:  # Stacked over layers where a scan made them.
            total = total + jnp.sum(loss.value.astype(jnp.float32) * loss.weight)
        return total


def new_output_collection() -> OutputCollection:
    """Returns an empty collection."""
    return OutputCollection({}, {}, {}, {})


def _prune(tree: Nested) -> Nested:
    pruned = {k: _prune(v) if isinstance(v, dict) else v for k, v in tree.items()}
    return {k: v for k, v in pruned.items() if not (isinstance(v, dict) and not v)}


def prune_empty(collection: OutputCollection) -> OutputCollection:
    """Returns the collection without modules that gave nothing."""
    return OutputCollection(*map(_prune, collection))


def fold_name(key: jax.Array, name: str) -> jax.Array:
    """Returns the key of a child from its parent's key and its name, whatever its siblings are."""
    return jax.random.fold_in(key, zlib.crc32(name.encode()))


@dataclasses.dataclass
class InvocationContext:
    """The surroundings of one call of a module.

    Attributes:
        module: The module that runs.
        state: Its parameters and those of its children, by name.
        prng_key: Its random key, or a function that makes it, or None if there is none.
        is_training: Whether this is a training step.
        outputs: Where its outputs go.
        child_keys: Keys of children that are not derived from their names (inside a scan).
    """

    module: "Module"
    state: Nested | None
    prng_key: jax.Array | Callable[[], jax.Array | None] | None
    is_training: bool
    outputs: OutputCollection
    child_keys: Mapping[str, jax.Array] = dataclasses.field(default_factory=dict)

    def key(self) -> jax.Array | None:
        """Returns the random key of this call, or None."""
        if callable(self.prng_key):
            self.prng_key = self.prng_key()
        return self.prng_key

    def child(self, name: str, module: "Module") -> "InvocationContext":
        """Returns the context of a direct child."""

        def key() -> jax.Array | None:
            if name in self.child_keys:
                return self.child_keys[name]
            parent_key = self.key()
            return None if parent_key is None else fold_name(parent_key, name)

        return InvocationContext(
            module=module,
            state=None if self.state is None else self.state.get(name, {}),
            prng_key=key,
            is_training=self.is_training,
            outputs=OutputCollection(*(part.setdefault(name, {}) for part in self.outputs)),
        )

    def add(self, kind: str, name: str, value: Any) -> None:
        """Adds an output. Raises OutputConflictError if the module gave one of that name before."""
        outputs = getattr(self.outputs, kind)
        if outputs.get(name, {}) != {}:
            raise OutputConflictError(
                f"{self.module.path() or self.module.name}: {kind} has {name!r} already; a module "
                "that is called twice must give its outputs different names."
            )
        outputs[name] = value


_local = threading.local()


def context_stack() -> list[InvocationContext]:
    """Returns this thread's stack of contexts, innermost last."""
    if not hasattr(_local, "stack"):
        _local.stack = []
    return _local.stack


def current_context() -> InvocationContext | None:
    """Returns the innermost context, or None outside of `functional`."""
    stack = context_stack()
    return stack[-1] if stack else None


def clone_context_stack() -> list[InvocationContext]:
    """Returns a copy of the stack, to be installed in another thread."""
    return list(context_stack())


def install_context_stack(stack: Sequence[InvocationContext]) -> None:
    """Makes `stack` this thread's stack."""
    _local.stack = list(stack)


@contextlib.contextmanager
def set_current_context(context: InvocationContext) -> Iterator[InvocationContext]:
    """Makes `context` the innermost one inside the block."""
    stack = context_stack()
    stack.append(context)
    try:
        yield context
    finally:
        stack.pop()


@contextlib.contextmanager
def child_context(
    name: str,
    *,
    module: "Module | None" = None,
    state: Nested | None = None,
    prng_key: jax.Array | None = None,
) -> Iterator[InvocationContext]:
    """Enters the context of child `name` of the current module, with other state if given."""
    parent = current_context()
    if parent is None:
        raise RuntimeError("child_context needs a context; call the module through functional().")
    context = parent.child(name, module if module is not None else parent.module.children[name])
    if state is not None:
        context.state = state
    if prng_key is not None:
        context.prng_key = prng_key
    with set_current_context(context):
        yield context


def context_for(module: "Module") -> InvocationContext:
    """Returns a context for `module`, reached from the innermost context that holds it.

    Raises:
        RuntimeError: If the module is not inside any module that runs.
    """
    for context in reversed(context_stack()):
        names: list[str] = []
        node: Module | None = module
        while node is not None and node is not context.module:
            names.append(node.name)
            node = node.parent
        if node is None:
            continue
        for name in reversed(names):
            context = context.child(name, context.module.children[name])
        return context
    outermost = context_stack()[0].module
    raise RuntimeError(
        f"{module.path()} is not inside {outermost.path() or outermost.name}, which runs now; add "
        "it as a child, or share it with _share_with_descendants."
    )


# -- Repetition ----------------------------------------------------------------------------------


def _collecting(
    context: InvocationContext, fn: Callable[..., Any]
) -> Callable[..., tuple[Any, OutputCollection]]:
    """Returns (state, keys, *args) -> (fn(*args), its outputs), to be traced by a transformation."""

    def run(state: Nested, keys: Mapping[str, jax.Array], *args: Any) -> Any:
        inner = dataclasses.replace(
            context,
            state={**(context.state or {}), **state},
            outputs=new_output_collection(),
            child_keys={**context.child_keys, **keys},
        )
        with set_current_context(inner):
            result = fn(*args)
        return result, prune_empty(inner.outputs)

    return run


def _merge(context: InvocationContext, collection: OutputCollection) -> None:
    """Adds the outputs that a transformation returned to those of the context."""
    for kind, part in zip(collection._fields, collection, strict=True):
        for name, value in part.items():
            context.add(kind, name, value)


def _context() -> InvocationContext:
    context = current_context()
    if context is None:
        raise RuntimeError("call the module through functional() first.")
    return context


def scan_in_context(
    fn: Callable[[Any, Any], tuple[Any, Any]],
    *,
    carry: Any,
    xs: Any = None,
    length: int,
    state: Nested,
    child_keys: Mapping[str, jax.Array] | None = None,
    remat: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None,
) -> tuple[Any, Any]:
    """Returns `jax.lax.scan(fn, carry, xs)`, where each turn sees its own slice of the state.

    Outputs of all turns (auxiliary losses, summaries, state updates) reach the current context,
    stacked along a new first dimension.

    Args:
        fn: (carry, x) -> (carry, y); calls children of the current module.
        carry: What goes from turn to turn.
        xs: Inputs of the turns, stacked.
        length: Number of turns.
        state: State of the repeated children by name, each array with a first dimension `length`.
        child_keys: Random keys [length] of the repeated children, by name.
        remat: Wraps the turn, for example `functools.partial(jax.checkpoint, policy=...)`.
    """
    context = _context()
    run = _collecting(context, fn)
    run = remat(run) if remat else run

    def body(carry: Any, inputs: Any) -> Any:
        x, state, keys = inputs
        (carry, y), outputs = run(state, keys, carry, x)
        return carry, (y, outputs)

    carry, (ys, outputs) = jax.lax.scan(body, carry, (xs, state, child_keys or {}), length=length)
    _merge(context, outputs)
    return carry, ys


def remat_in_context(
    fn: Callable[..., Any],
    *args: Any,
    remat: Callable[[Callable[..., Any]], Callable[..., Any]],
    children: Sequence[str],
) -> Any:
    """Returns `remat(fn)(*args)`; the state of the named children is an input, outputs are kept."""
    context = _context()
    state = {name: (context.state or {}).get(name, {}) for name in children}
    result, outputs = remat(_collecting(context, fn))(state, {}, *args)
    _merge(context, outputs)
    return result
