"""Modules: a tree of configured objects whose methods run in a context (moelib.core.context).

A module holds no arrays. `functional` runs one of its methods with a given state and returns
what the method returns, beside everything that the modules inside have put out.
"""

import functools
import inspect
import math
import types
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import jax.numpy as jnp

from moelib.core import config, tree
from moelib.core import context as context_lib
from moelib.core.config import (
    Configurable,
    InstantiableConfig,
    InvalidConfigNameError,
    RequiredFieldMissingError,
    config_class,
    did_you_mean,
)
from moelib.core.context import (
    AuxLoss,
    InvocationContext,
    Nested,
    OutputCollection,
    OutputConflictError,
    call_context,
    child_context,
    current_context,
    new_output_collection,
    remat_in_context,
    scan_in_context,
    set_current_context,
)
from moelib.core.param import cast_slices

__all__ = [
    "AuxLoss",
    "ChildNameConflictError",
    "InvalidDescendantError",
    "InvocationContext",
    "Module",
    "OutputCollection",
    "OutputConflictError",
    "UnconsumedAuxLossError",
    "child_context",
    "current_context",
    "functional",
    "new_output_collection",
    "nowrap",
    "remat_in_context",
    "scan_in_context",
    "set_current_context",
]

_MAX_SUMMARY_SIZE = 8

F = TypeVar("F", bound=Callable[..., Any])


class ChildNameConflictError(ValueError):
    """Two children of one module with the same name."""


class InvalidDescendantError(ValueError):
    """A shared module that does not stand under the module that shares it."""


class UnconsumedAuxLossError(RuntimeError):
    """An auxiliary loss that would not reach the objective."""


def nowrap(fn: F) -> F:
    """Marks a public method that needs no context of its own."""
    fn.__dict__["_moelib_nowrap"] = True
    return fn


def _in_context(method: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the method so that calls from other modules enter the context of its own module.

    What it computes bears the module's name in the compiled program.
    """

    @functools.wraps(method)
    def wrapper(self: "Module", *args: Any, **kwargs: Any) -> Any:
        context = current_context()
        if context is None or context.module is self:
            return method(self, *args, **kwargs)
        with call_context(self), jax.named_scope(self.name):
            try:
                return method(self, *args, **kwargs)
            except Exception as error:
                _explain(error, self, method.__name__)
                error.__traceback__ = _without_wrappers(error.__traceback__)
                raise

    wrapper.__dict__["_moelib_wrapped"] = True
    return wrapper


_WRAPPER_FILES = {__file__, context_lib.__file__, config.__file__}


def _without_wrappers(traceback: types.TracebackType | None) -> types.TracebackType | None:
    """Returns the traceback without the frames of the files that only pass calls on."""
    frames = []
    while traceback is not None:
        if traceback.tb_frame.f_code.co_filename not in _WRAPPER_FILES:
            frames.append(traceback)
        traceback = traceback.tb_next
    short: types.TracebackType | None = None
    for tb in reversed(frames):
        short = types.TracebackType(short, tb.tb_frame, tb.tb_lasti, tb.tb_lineno)
    return short


def _explain(error: Exception, module: "Module", method: str) -> None:
    """Adds to an error, once, which module raised it and the shapes of its own parameters."""
    context = current_context()
    state = (context.state if context else None) or {}
    shapes = ", ".join(
        f"{name} {list(leaf.shape)} {leaf.dtype}"
        for name, leaf in tree.flatten_items(state)[:8]
        if hasattr(leaf, "shape")
    )
    path, config_path = module.path() or module.name, module.config._path()
    note = f"in {path} ({type(module).__qualname__}.{method})"
    if config_path and config_path != path:
        note += f", configured at {config_path}"
    _note(error, note + (f"; parameters: {shapes}" if shapes else ""))


def _note(error: Exception, note: str) -> None:
    """Adds a note to an error that the modules further inside have not noted."""
    if not error.__dict__.get("_moelib_noted"):
        error.__dict__["_moelib_noted"] = True
        error.add_note(note)


class Module(Configurable):
    """A node in a tree of configured objects."""

    @config_class
    class Config(Configurable.Config):
        name: str = ""  # Set by the parent; the root's is its class's name unless given.

        if TYPE_CHECKING:  # A field of this type holds any subclass; its fields may be set.

            def __init__(self, **values: Any) -> None: ...

    def __init__(self, cfg: Any, *, parent: "Module | None") -> None:
        super().__init__(cfg)
        if not self._config.name:
            self._config.name = type(self).__name__.lower()
        self._parent = parent
        self._children: dict[str, Module] = {}
        self._shared: dict[str, Module] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name in dir(cls):  # Methods of mixins that are no modules, too.
            value = inspect.getattr_static(cls, name)
            if name.startswith("_") or not inspect.isfunction(value):
                continue
            if not value.__dict__.keys() & {"_moelib_nowrap", "_moelib_wrapped"}:
                setattr(cls, name, _in_context(value))

    # The tree.

    @property
    def name(self) -> str:
        """The name by which the parent knows this module."""
        return self._config.name

    @property
    def parent(self) -> "Module | None":
        """The module that holds this one, or None for the root."""
        return self._parent

    @property
    def children(self) -> Mapping[str, "Module"]:
        """The modules directly inside, by name."""
        return self._children

    @nowrap
    def path(self) -> str:
        """Returns "decoder.layer0.attention": the names from below the root; "" for the root."""
        if self._parent is None:
            return ""
        above = self._parent.path()
        return f"{above}.{self.name}" if above else self.name

    def _title(self) -> str:
        """Returns the name of this module in errors: its config's path, or the name of the root."""
        return self.config._path() or self.path() or self.name

    def _add_child(self, name: str, cfg: InstantiableConfig, **kwargs: Any) -> "Module":
        """Builds a child module, which is then reached as `self.<name>`.

        Raises:
            ChildNameConflictError: If the name is taken.
            InvalidConfigNameError: If the name holds what separates names in paths.
            RequiredFieldMissingError: If a REQUIRED field is unset; it holds the whole path.
        """
        if name in self._children or name in self.__dict__ or hasattr(type(self), name):
            raise ChildNameConflictError(f"{self._title()} has a {name!r} already.")
        if not name or {".", "/"} & set(name):
            raise InvalidConfigNameError(f"a child of {self._title()} is called {name!r}.")
        cfg = cfg.clone(name=name)
        if cfg._path() is None:  # Not from the config of this module.
            cfg._set_path(f"{self.config._path() or ''}.{name}".lstrip("."))
        try:
            child = cfg._owned().instantiate(parent=self, **kwargs)
        except RequiredFieldMissingError:
            raise
        except Exception as error:
            _note(error, f"while {cfg._path()} was built ({cfg._title()})")
            error.__traceback__ = _without_wrappers(error.__traceback__)
            raise
        self._children[name] = child
        return child

    def __getattr__(self, name: str) -> Any:
        children = self.__dict__.get("_children", {})
        if name in children:
            return children[name]
        if hasattr(type(self), name):
            return object.__getattribute__(self, name)  # A property: its own error.
        where = f"{type(self).__qualname__} has no {name!r}"
        raise AttributeError(f"{where}; {did_you_mean(name, children)}" if children else where)

    def _share_with_descendants(self, module: "Module", *, shared_module_name: str) -> None:
        """Lets every module below this one reach `module` by `get_shared_module`."""
        node: Module | None = module
        while node is not None and node is not self:
            node = node.parent
        if node is None:
            raise InvalidDescendantError(
                f"{module._title()} is not below {self._title()}, which shares it."
            )
        if self._shared.setdefault(shared_module_name, module) is not module:
            raise ChildNameConflictError(
                f"{self._title()} shares {self._shared[shared_module_name]._title()} as "
                f"{shared_module_name!r} already; share {module._title()} under another name."
            )

    @nowrap
    def get_shared_module(self, shared_module_name: str) -> "Module":
        """Returns the module that the nearest ancestor shares under that name."""
        node: Module | None = self
        known: set[str] = set()
        while node is not None:
            if shared_module_name in node._shared:
                return node._shared[shared_module_name]
            known |= node._shared.keys()
            node = node.parent
        raise KeyError(
            f"{self._title()}: no module is shared as {shared_module_name!r}; "
            + did_you_mean(shared_module_name, known)
        )

    # The context.

    @nowrap
    def get_invocation_context(self) -> InvocationContext:
        """Returns the context that this module runs in. Raises RuntimeError outside of one."""
        context = current_context()
        if context is None or context.module is not self:
            raise RuntimeError(
                f"{self._title()} does not run in a context; call its methods through "
                "functional(module, prng_key=, state=, inputs=, is_training=)."
            )
        return context

    @property
    def state(self) -> Nested:
        """The parameters of this module and of its children, by name."""
        state = self.get_invocation_context().state
        if state is None:
            raise RuntimeError(f"{self._title()}: functional() was given state=None.")
        return {n: x if n in self._children else cast_slices(x) for n, x in state.items()}

    @property
    def prng_key(self) -> jax.Array:
        """The random key of this call."""
        key = self.get_invocation_context().key()
        if key is None:
            raise RuntimeError(
                f"{self._title()} asks for a random key, but functional() was given prng_key=None."
            )
        return key

    @property
    def is_training(self) -> bool:
        """Whether this is a training step."""
        return self.get_invocation_context().is_training

    @nowrap
    def add_summary(self, name: str, value: Any, *, per_element: bool = False) -> None:
        """Adds a metric that is logged as "<path>/<name>".

        Args:
            name: Name of the metric.
            value: A scalar, WeightedScalar or MaxScalar. A scan adds an axis over its layers.
            per_element: Whether an array of any size may be logged, as "<name>/0", "<name>/1", ...

        Raises:
            ValueError: If the value has more than a few elements.
        """
        shapes = [jnp.shape(x) for x in jax.tree.leaves(value)]
        if not per_element and any(math.prod(shape) > _MAX_SUMMARY_SIZE for shape in shapes):
            raise ValueError(
                f"{self._title()}: the summary {name!r} has shape {shapes[0]}, and each element "
                "would be a metric of its own; reduce it to a scalar, use add_module_output, or "
                "set per_element=True."
            )
        self.get_invocation_context().add("summaries", name, value)

    @nowrap
    def add_state_update(self, name: str, value: jax.Array) -> None:
        """Puts out the new value of a parameter that the learner does not train."""
        self.get_invocation_context().add("state_updates", name, value)

    @nowrap
    def add_module_output(self, name: str, value: Any) -> None:
        """Puts out any arrays for whoever called `functional`."""
        self.get_invocation_context().add("module_outputs", name, value)

    @nowrap
    def get_module_outputs(self) -> Nested:
        """Returns what this module and its children have put out by `add_module_output` so far."""
        return self.get_invocation_context().outputs.module_outputs

    @nowrap
    def add_aux_loss(self, name: str, value: jax.Array, *, weight: float | jax.Array) -> None:
        """Adds `value * weight` to the training objective; `value` is a scalar."""
        if jnp.shape(value) != ():
            raise ValueError(
                f"{self._title()}: the auxiliary loss {name!r} has shape {jnp.shape(value)}; it "
                "must be a scalar."
            )
        loss = AuxLoss(jnp.asarray(value), jnp.asarray(weight, jnp.float32))
        self.get_invocation_context().add("aux_losses", name, loss)

    @nowrap
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Returns `self.forward(*args, **kwargs)`."""
        return self.forward(*args, **kwargs)


def functional(
    module: Module,
    prng_key: jax.Array | None,
    state: Nested | None,
    inputs: Sequence[Any] | Mapping[str, Any],
    *,
    is_training: bool,
    method: str = "forward",
    drop_output_collections: Sequence[str] = (),
) -> tuple[Any, OutputCollection]:
    """Runs a method of a module as a pure function.

    Args:
        module: The module.
        prng_key: Random key, or None if nothing inside asks for one.
        state: The module's parameters.
        inputs: Positional arguments, or keyword arguments if a dict.
        is_training: Whether this is a training step.
        method: Name of the method.
        drop_output_collections: Names of collections that the caller does not want.

    Returns:
        (what the method returned, what the modules put out).

    Raises:
        UnconsumedAuxLossError: If it is called by a module that runs and auxiliary losses come
            out that the caller has not said to drop: they would not reach the objective.
    """
    for name in drop_output_collections:
        if name not in OutputCollection._fields:
            raise ValueError(
                f"drop_output_collections: {name!r}; {did_you_mean(name, OutputCollection._fields)}"
            )
    if not isinstance(inputs, Sequence | Mapping):
        raise TypeError(
            f"functional({module.name}): inputs is {type(inputs).__name__}; pass a tuple of "
            "positional arguments or a dict of named ones."
        )
    inside = current_context()
    context = InvocationContext(module, state, prng_key, is_training)
    with set_current_context(context):
        bound = getattr(module, method)
        try:
            by_name = isinstance(inputs, Mapping)
            outputs = bound(**inputs) if by_name else bound(*inputs)
        except Exception as error:
            _explain(error, module, method)
            error.__traceback__ = _without_wrappers(error.__traceback__)
            raise
    collection = context_lib.prune_empty(context.outputs)
    collection = collection._replace(**{name: {} for name in drop_output_collections})
    if collection.aux_losses and inside is not None and is_training:
        is_loss = lambda value: isinstance(value, AuxLoss)
        names = ", ".join(path for path, _ in tree.flatten_items(collection.aux_losses, is_loss))
        raise UnconsumedAuxLossError(
            f"{inside.module._title()} calls functional({module.name}), and the auxiliary losses "
            f"{names} would be lost; call the child directly, or pass "
            "drop_output_collections=('aux_losses',) if they are to be left out."
        )
    return outputs, collection
