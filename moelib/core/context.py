"""What a module sees while it runs: its parameters, its random key, and where its outputs go.

A stack of contexts, one a module, follows the calls. Nothing of it lives in the modules, so the
same module runs under jit, grad, scan and remat.
"""

import contextlib
import dataclasses
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from moelib.core.param import cast_slices
from moelib.core.tree import Nested


class ModuleLike(Protocol):
    """The part of a module that contexts need."""

    @property
    def name(self) -> str:
        """The name by which the parent knows this module."""
        ...

    @property
    def parent(self) -> "ModuleLike | None":
        """The module that holds this one, or None for the root."""
        ...

    @property
    def children(self) -> "Mapping[str, ModuleLike]":
        """The modules directly inside, by name."""
        ...

    def _title(self) -> str:
        """Returns the name of this module in errors."""
        ...


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
        calls: How often each module below has been called from here, by its path.
    """

    module: ModuleLike
    state: Nested | None
    prng_key: jax.Array | Callable[[], jax.Array | None] | None
    is_training: bool
    outputs: OutputCollection
    child_keys: Mapping[str, jax.Array] = dataclasses.field(default_factory=dict)
    calls: dict[tuple[str, ...], int] = dataclasses.field(default_factory=dict)

    def key(self) -> jax.Array | None:
        """Returns the random key of this call, or None.

        It is made anew each time: a kept one could belong to a scan that has ended.
        """
        return self.prng_key() if callable(self.prng_key) else self.prng_key

    def child(self, name: str, module: ModuleLike, *, call: int = 0) -> "InvocationContext":
        """Returns the context of the call number `call` of a direct child."""

        def key() -> jax.Array | None:
            key = self.child_keys.get(name)
            if key is None and (parent_key := self.key()) is not None:
                key = fold_name(parent_key, name)
            return key if key is None or call == 0 else jax.random.fold_in(key, call)

        return InvocationContext(
            module=module,
            state=None if self.state is None else self.state.get(name, {}),
            prng_key=key,
            is_training=self.is_training,
            outputs=OutputCollection(*(self._nested(part, name) for part in self.outputs)),
        )

    def _nested(self, outputs: Nested, name: str) -> Nested:
        """Returns the outputs of child `name`."""
        inner = outputs.setdefault(name, {})
        return inner if isinstance(inner, dict) else self._conflict(name)

    def _conflict(self, name: str) -> Any:
        raise OutputConflictError(
            f"{self.module._title()} has an output or child {name!r} already; a "
            "module that is called twice must give its outputs different names."
        )

    def add(self, kind: str, name: str, value: Any) -> None:
        """Adds an output. Raises OutputConflictError if the module gave one of that name before."""
        outputs = getattr(self.outputs, kind)
        before = outputs.get(name, {})
        if not isinstance(before, dict) or before:
            self._conflict(name)
        outputs[name] = value

    def merge(self, collection: OutputCollection) -> None:
        """Adds what a transformation of this module's code has put out, children included."""

        def merge(outputs: Nested, new: Nested) -> None:
            for name, value in new.items():
                if isinstance(value, dict):
                    merge(self._nested(outputs, name), value)
                elif name in outputs:
                    self._conflict(name)
                outputs.setdefault(name, value)

        for outputs, new in zip(self.outputs, collection, strict=True):
            merge(outputs, new)


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
    module: ModuleLike | None = None,
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


def _descend(context: InvocationContext, path: tuple[str, ...]) -> InvocationContext:
    """Returns the context of one more call of the module at `path` below."""
    call = context.calls.get(path, 0)
    context.calls[path] = call + 1
    for depth, name in enumerate(path, 1):
        child = context.module.children[name]
        context = context.child(name, child, call=call if depth == len(path) else 0)
    return context


def context_for(module: ModuleLike) -> InvocationContext:
    """Returns a context for `module`, reached from the innermost context that holds it.

    Raises:
        RuntimeError: If the module is not inside any module that runs.
    """
    for context in reversed(context_stack()):
        names: list[str] = []
        node: ModuleLike | None = module
        while node is not None and node is not context.module:
            names.append(node.name)
            node = node.parent
        if node is None:
            continue
        return _descend(context, tuple(reversed(names)))
    outermost = context_stack()[0].module
    raise RuntimeError(
        f"{module._title()} is not inside {outermost._title()}, which runs now; add "
        "it as a child, or share it with _share_with_descendants."
    )


# -- Repetition ----------------------------------------------------------------------------------


def _context() -> InvocationContext:
    context = current_context()
    if context is None:
        raise RuntimeError("call the module through functional() first.")
    return context


class _Collecting:
    """Runs a function in a copy of a context and returns its outputs, for a transformation."""

    def __init__(self, context: InvocationContext, fn: Callable[..., Any]) -> None:
        self.context, self.fn = context, fn
        self.calls = context.calls

    def __call__(
        self, state: Nested, key: jax.Array | None, keys: Mapping[str, jax.Array], *args: Any
    ) -> tuple[Any, OutputCollection]:
        """Returns (fn(*args), its outputs); JAX may trace it more than once."""
        inner = dataclasses.replace(
            self.context,
            state={**(self.context.state or {}), **cast_slices(state)},
            prng_key=key,
            outputs=new_output_collection(),
            child_keys={**self.context.child_keys, **keys},
            calls=dict(self.context.calls),
        )
        with set_current_context(inner):
            result = self.fn(*args)
        self.calls = inner.calls
        return result, prune_empty(inner.outputs)

    def finish(self, outputs: OutputCollection) -> None:
        """Hands what the transformation returned to the context."""
        self.context.calls.update(self.calls)
        self.context.merge(outputs)


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
        child_keys: Random keys [length] of the repeated children, by name; without them, each
            turn has a key of its own all the same.
        remat: Wraps the turn, for example `functools.partial(jax.checkpoint, policy=...)`.
    """
    context = _context()
    collecting = _Collecting(context, fn)
    run = remat(collecting) if remat else collecting
    key = context.key()
    turn_keys = (
        key if key is None else jax.vmap(partial(jax.random.fold_in, key))(jnp.arange(length))
    )

    def body(carry: Any, inputs: Any) -> Any:
        x, state, turn_key, keys = inputs
        (carry, y), outputs = run(state, turn_key, keys, carry, x)
        return carry, (y, outputs)

    inputs = (xs, state, turn_keys, child_keys or {})
    carry, (ys, outputs) = jax.lax.scan(body, carry, inputs, length=length)
    collecting.finish(outputs)
    return carry, ys


def remat_in_context(
    fn: Callable[..., Any],
    *args: Any,
    remat: Callable[[Callable[..., Any]], Callable[..., Any]],
    children: Sequence[str],
) -> Any:
    """Returns `remat(fn)(*args)`; the state of the named children is an input, outputs are kept."""
    context = _context()
    collecting = _Collecting(context, fn)
    state = {name: (context.state or {}).get(name, {}) for name in children}
    keys = {name: context.child_keys[name] for name in children if name in context.child_keys}
    result, outputs = remat(collecting)(state, context.key(), keys, *args)
    collecting.finish(outputs)
    return result
