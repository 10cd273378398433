"""Contexts: the parameters, random key and outputs of each module while it runs.

A stack of contexts, one per module, follows the calls. Modules themselves hold none of it, so that
the same module runs under jit, grad, scan and remat.
"""

import contextlib
import dataclasses
import itertools
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, NoReturn, Protocol

import jax
import jax.numpy as jnp

from moelib.core import tree
from moelib.core.precision import cast_at_use
from moelib.core.tree import Nested

CACHE = "cache"  # Name of a layer's cache in its state, next to its parameters.


class OutputConflictError(ValueError):
    """Two outputs of one call of a module with the same name."""


class OutsideError(RuntimeError):
    """A module is not inside any module that runs."""


class AuxLoss(NamedTuple):
    """An auxiliary loss: a term of the objective, next to the main loss."""

    value: jax.Array
    weight: jax.Array
    num_tokens: jax.Array | None = None  # Tokens that the value is a mean over; None for all.


def is_aux_loss(value: Any) -> bool:
    """Returns whether a value is an AuxLoss (for `is_leaf`)."""
    return isinstance(value, AuxLoss)


class OutputCollection(NamedTuple):
    """Outputs of modules in addition to their return values, nested by the names of the modules."""

    summaries: Nested
    state_updates: Nested
    module_outputs: Nested
    aux_losses: Nested

    def total_aux_loss(self, num_tokens: jax.Array | None = None) -> jax.Array:
        """Returns the sum of value * weight over all auxiliary losses, float32; 0 if none.

        Given the tokens of the batch, a mean over a part of them counts by their share, and the
        total is a mean over the tokens of the batch, which micro-batches add up to.
        """
        total = jnp.zeros((), jnp.float32)
        for loss in jax.tree.leaves(self.aux_losses, is_leaf=is_aux_loss):
            term = loss.value.astype(jnp.float32) * loss.weight
            if num_tokens is not None and loss.num_tokens is not None:
                term = term * loss.num_tokens / jnp.maximum(num_tokens, 1.0)
            total = total + jnp.sum(term)  # Stacked over layers if it comes from a scan.
        return total


def new_output_collection() -> OutputCollection:
    """Returns an empty collection."""
    return OutputCollection({}, {}, {}, {})


def prune_empty(collection: OutputCollection) -> OutputCollection:
    """Returns the collection without modules that have no outputs."""
    return OutputCollection(*(tree.select(part, lambda _: True) for part in collection))


def fold_name(key: jax.Array, name: str) -> jax.Array:
    """Returns the key of a child, which depends on its parent's key and its name only."""
    return jax.random.fold_in(key, zlib.crc32(name.encode()))


class ModuleLike(Protocol):
    """The part of a module that contexts need."""

    name: str
    parent: Any
    children: dict[str, Any]

    def _title(self) -> str:
        """Returns the name of the module in errors."""
        ...


@dataclasses.dataclass
class InvocationContext:
    """The surroundings of one call of a module."""

    module: ModuleLike
    state: Nested | None  # Parameters of the module and of its children, by name.
    # Random key, or a function that returns it; None without a key.
    prng_key: jax.Array | Callable[[], jax.Array | None] | None
    is_training: bool
    # Values by name that all modules called from here see, such as those that a transformer layer
    # carries to the next one; see `inherited`.
    inherited: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    # Outputs so far of the module and of its children.
    outputs: OutputCollection = dataclasses.field(default_factory=new_output_collection)
    # Keys of children that are not derived from their names (inside a scan).
    child_keys: Mapping[str, jax.Array] = dataclasses.field(default_factory=dict)
    # Number of calls from here of each module below, by its path.
    calls: dict[tuple[str, ...], int] = dataclasses.field(default_factory=dict)

    def key(self) -> jax.Array | None:
        """Returns the random key of this call, or None.

        It is derived again each time: a stored key could belong to a scan that has ended.
        """
        return self.prng_key() if callable(self.prng_key) else self.prng_key

    def child(self, name: str, module: ModuleLike, *, call: int = 0) -> "InvocationContext":
        """Returns the context of the call number `call` of a direct child."""

        def key() -> jax.Array | None:
            key = self.child_keys.get(name)
            if key is None and (parent_key := self.key()) is not None:
                key = fold_name(parent_key, name)
            return key if key is None or call == 0 else jax.random.fold_in(key, call)

        state = self.child_state(name)
        return InvocationContext(module, state, key, self.is_training, self.inherited)

    def child_state(self, name: str) -> Nested | None:
        """Returns the state of a child, as updated by its earlier calls."""
        if self.state is None:
            return None
        state, updates = self.state.get(name, {}), self.outputs.state_updates.get(name)
        return tree.merge(state, updates) if updates else state

    def add(self, kind: str, name: str, value: Any) -> None:
        """Adds an output. Raises OutputConflictError if this call has given one of that name."""
        outputs = getattr(self.outputs, kind)
        if not isinstance(before := outputs.get(name, {}), dict) or before:
            self._conflict(name)
        outputs[name] = value

    def _conflict(self, name: str) -> NoReturn:
        raise OutputConflictError(
            f"{self.module._title()} has an output or child {name!r} already; give outputs of one "
            "call different names."
        )

    def merge(self, collection: OutputCollection) -> None:
        """Adds the outputs of a transformation of this module's code and its children."""
        calls: dict[str, OutputCollection] = {}
        for kind, outputs in zip(collection._fields, collection, strict=True):
            for name, value in outputs.items():
                if isinstance(value, dict) and name != CACHE:
                    call = calls.get(name, new_output_collection())
                    calls[name] = call._replace(**{kind: value})
                else:
                    self.add(kind, name, value)
        for name, call in calls.items():
            self.add_call(name, call)

    def add_call(self, name: str, part: OutputCollection) -> None:
        """Adds the outputs of one call of a child.

        If the child was called before, they are added under another name, "child#2". Its state
        updates replace the earlier ones, which it has seen.
        """
        label, call = name, 1
        while any(map(self._conflicts, part._fields, part, itertools.repeat(label))):
            call += 1
            label = f"{name}#{call}"
        updates = tree.by_path(self.outputs.state_updates.get(name, {}))
        again = updates.keys() & tree.by_path(part.state_updates).keys()
        if any(CACHE in path.split("/") for path in again):
            raise OutputConflictError(
                f"{self.module._title()}: {name!r} is called twice, but has one cache of earlier "
                "tokens; generate without a cache, or use two layers."
            )
        for kind, value in zip(part._fields, part, strict=True):
            target = name if kind == "state_updates" else label
            outputs = getattr(self.outputs, kind)
            if value:
                outputs[target] = tree.merge(outputs.get(target, {}), value)

    def _conflicts(self, kind: str, outputs: Nested, label: str) -> bool:
        """Returns whether a child called `label` has some of these outputs already."""
        known = getattr(self.outputs, kind).get(label, {})
        if not isinstance(known, dict):
            self._conflict(label)
        return kind != "state_updates" and _overlap(known, outputs)


def _overlap(a: Nested, b: Nested) -> bool:
    """Returns whether two trees have a leaf of one path."""
    both = ((a[name], b[name]) for name in a.keys() & b.keys())
    return any(not (isinstance(x, dict) and isinstance(y, dict)) or _overlap(x, y) for x, y in both)


# -- The stack -----------------------------------------------------------------------------------

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


def _required_context() -> InvocationContext:
    context = current_context()
    if context is None:
        raise RuntimeError("no module runs; call the module through functional().")
    return context


@contextlib.contextmanager
def set_current_context(context: InvocationContext) -> Iterator[InvocationContext]:
    """Makes `context` the innermost one inside the block."""
    stack = context_stack()
    stack.append(context)
    try:
        yield context
    finally:
        stack.pop()


def inherited(name: str) -> Any:
    """Returns a value that the innermost context has or inherits; None without one."""
    context = current_context()
    return None if context is None else context.inherited.get(name)


@contextlib.contextmanager
def inheriting(**values: Any) -> Iterator[None]:
    """Gives values to the innermost context, and to the calls from it, inside the block."""
    context = _required_context()
    before = context.inherited
    context.inherited = {**before, **values}
    try:
        yield
    finally:
        context.inherited = before


def names_below(ancestor: ModuleLike | None, module: ModuleLike) -> tuple[str, ...] | None:
    """Returns the names that lead from one module to another, or None if it is not inside.

    Without an ancestor, the first name is that of the root.
    """
    names: list[str] = []
    node: ModuleLike | None = module
    while node is not None and node is not ancestor:
        names.append(node.name)
        node = node.parent
    return tuple(reversed(names)) if node is ancestor else None


def _holder(context: InvocationContext, names: tuple[str, ...]) -> InvocationContext:
    """Returns the context of the module that holds the one at `names`, as if it ran."""
    for name in names[:-1]:
        inside = context.child(name, context.module.children[name])
        outputs = [part.setdefault(name, {}) for part in context.outputs]
        if not all(isinstance(part, dict) for part in outputs):
            context._conflict(name)
        context = dataclasses.replace(inside, outputs=OutputCollection(*outputs))
    return context


@contextlib.contextmanager
def call_context(module: ModuleLike) -> Iterator[InvocationContext]:
    """Enters the context of a call of `module`, which the innermost context around it holds.

    Raises:
        OutsideError: If the module is not inside any module that runs.
    """
    values = context_stack()[-1].inherited  # Values of the caller, whichever context holds it.
    for context in reversed(context_stack()):
        names = names_below(context.module, module)
        if names is not None:
            break
    else:
        raise OutsideError(
            f"{module._title()} is not inside {context_stack()[0].module._title()}, which runs; "
            "add it as a child."
        )
    if not names:  # A module calls one that it is inside of.
        with set_current_context(context), inheriting(**values):
            yield context
        return
    call = context.calls.get(names, 0)
    context.calls[names] = call + 1
    holder, name = _holder(context, names), names[-1]
    inside = holder.child(name, module, call=call)
    inside.inherited = values
    with set_current_context(inside):
        yield inside
    holder.add_call(name, prune_empty(inside.outputs))


# -- Repetition ----------------------------------------------------------------------------------


class _Collecting:
    """A function to be transformed, which runs in copies of all contexts and returns their outputs.

    Modules that it calls may be held by any context of the stack, whose outputs
    must not contain tracers of the transformation.
    """

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn = fn
        self.contexts = list(context_stack())
        self.calls = [context.calls for context in self.contexts]

    def __call__(
        self,
        state: Nested,
        key: jax.Array | None,
        keys: Mapping[str, jax.Array],
        iteration: jax.Array | None,
        *args: Any,
    ) -> tuple[Any, list[OutputCollection]]:
        """Returns (fn(*args), the outputs of each context); JAX may trace it more than once."""
        copies = [self._copy(context, iteration) for context in self.contexts]
        inner = copies[-1]
        inner.state = {**(inner.state or {}), **cast_at_use(state)}
        inner.prng_key = key
        inner.child_keys = {**inner.child_keys, **keys}
        outer, _local.stack = context_stack(), copies
        try:
            result = self.fn(*args)
        finally:
            _local.stack = outer
        self.calls = [context.calls for context in copies]
        return result, [prune_empty(context.outputs) for context in copies]

    def _copy(self, context: InvocationContext, iteration: jax.Array | None) -> InvocationContext:
        def key() -> jax.Array | None:
            key = context.key()
            return key if key is None or iteration is None else jax.random.fold_in(key, iteration)

        state, updates = context.state, context.outputs.state_updates
        return dataclasses.replace(
            context,
            state=tree.merge(state, updates) if state and updates else state,
            prng_key=key,
            outputs=new_output_collection(),
            calls=dict(context.calls),
        )

    def finish(self, outputs: list[OutputCollection]) -> None:
        """Adds the outputs of the transformation to the contexts."""
        for context, calls, part in zip(self.contexts, self.calls, outputs, strict=True):
            context.calls.update(calls)
            context.merge(part)


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
    """Returns `jax.lax.scan(fn, carry, xs)`, where each iteration sees its slice of the state.

    Outputs of all iterations (auxiliary losses, summaries, state updates) reach the contexts,
    stacked along a new first dimension.

    Args:
        fn: (carry, x) -> (carry, y); calls children of the current module.
        carry: Carry of the first iteration.
        xs: Inputs of the iterations, stacked.
        length: Number of iterations.
        state: State of the repeated children by name, each array with a first dimension `length`.
        child_keys: Random keys [length] of the repeated children by name; children without them
            have a different key in each iteration all the same.
        remat: Wraps an iteration, for example `functools.partial(jax.checkpoint, policy=...)`.

    Raises:
        OutputConflictError: If a module from outside of the scan updates its state inside.
    """
    key = _required_context().key()
    collecting = _Collecting(fn)
    run = remat(collecting) if remat else collecting
    iterations = keys = None
    if key is not None:
        iterations = jnp.arange(length)
        keys = jax.vmap(partial(jax.random.fold_in, key))(iterations)

    def body(carry: Any, inputs: Any) -> Any:
        x, state, key, child_keys, iteration = inputs
        (carry, y), outputs = run(state, key, child_keys, iteration, carry, x)
        return carry, (y, outputs)

    inputs = (xs, state, keys, child_keys or {}, iterations)
    carry, (ys, outputs) = jax.lax.scan(body, carry, inputs, length=length)
    for part in outputs[:-1]:
        if part.state_updates:
            names = ", ".join(path for path, _ in tree.flatten_items(part.state_updates))
            raise OutputConflictError(
                f"a module shared from outside of a scan updates its state in each iteration: "
                f"{names}; repeat the layers in a loop instead."
            )
    collecting.finish(outputs)
    return carry, ys


def remat_in_context(
    fn: Callable[..., Any],
    *args: Any,
    remat: Callable[[Callable[..., Any]], Callable[..., Any]],
    children: Sequence[str],
) -> Any:
    """Returns `remat(fn)(*args)`, with the state of the named children as an input."""
    context = _required_context()
    collecting = _Collecting(fn)
    state = {name: context.child_state(name) or {} for name in children}
    keys = {name: context.child_keys[name] for name in children if name in context.child_keys}
    result, outputs = remat(collecting)(state, context.key(), keys, None, *args)
    collecting.finish(outputs)
    return result
