"""Modules: a tree of configured objects whose methods run in contexts (moelib.core.context).

A module holds no arrays. `functional` runs one of its methods with a given state, and returns the
result together with the outputs that the modules inside have added.
"""

import functools
import inspect
import math
import types
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

import jax
import jax.numpy as jnp

from moelib.core import config, context, tree
from moelib.core.config import (
    Configurable,
    InstantiableConfig,
    InvalidConfigNameError,
    RequiredFieldMissingError,
    config_class,
    did_you_mean,
)
from moelib.core.context import AuxLoss, InvocationContext, OutputCollection, current_context
from moelib.core.precision import cast_at_use
from moelib.core.tree import Nested

_MAX_SUMMARY_SIZE = 8

F = TypeVar("F", bound=Callable[..., Any])


class ChildNameConflictError(ValueError):
    """Two children of one module with the same name."""


class UnconsumedAuxLossError(RuntimeError):
    """An auxiliary loss that would not reach the objective."""


# -- Methods in contexts -------------------------------------------------------------------------


def in_context(method: F) -> F:
    """Marks a method that other modules call, and that needs parameters, a key or outputs.

    It then enters the context of its module, and its operations carry the module's name in the
    compiled program. `forward`, and methods that override a marked one, need no mark.
    """

    @functools.wraps(method)
    def wrapper(self: "Module", *args: Any, **kwargs: Any) -> Any:
        running = current_context()
        if running is None or running.module is self:
            return method(self, *args, **kwargs)
        with context.call_context(self), jax.named_scope(self.name):
            return _run(self, method.__name__, lambda: method(self, *args, **kwargs))

    wrapper.__dict__["_moelib_in_context"] = True
    return cast(F, wrapper)


def _run(module: "Module", method: str, call: Callable[[], Any]) -> Any:
    """Calls a method; an error tells which module raised it and the shapes of its parameters."""
    try:
        return call()
    except Exception as error:
        running = current_context()
        leaves = tree.flatten_items((running.state if running else None) or {})[:8]
        shapes = [f"{n} {list(x.shape)} {x.dtype}" for n, x in leaves if hasattr(x, "shape")]
        path, config_path = module.path() or module.name, module.config._path
        note = f"in {path} ({type(module).__qualname__}.{method})"
        if config_path and config_path != path:
            note += f", configured at {config_path}"
        _explain(error, note + (f"; parameters: {', '.join(shapes)}" if shapes else ""))
        raise


def _explain(error: Exception, note: str) -> None:
    """Adds a note to an error that has none from a module further inside; trims its traceback."""
    if not error.__dict__.get("_moelib_noted"):
        error.__dict__["_moelib_noted"] = True
        error.add_note(note)
    frames, traceback = [], error.__traceback__
    while traceback is not None:
        if traceback.tb_frame.f_code.co_filename not in _WRAPPER_FILES:
            frames.append(traceback)
        traceback = traceback.tb_next
    short: types.TracebackType | None = None
    for frame in reversed(frames):
        short = types.TracebackType(short, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    error.__traceback__ = short


_WRAPPER_FILES = {__file__, context.__file__, config.__file__}  # Their frames only pass calls on.


class Module(Configurable):
    """A node in a tree of configured objects.

    Attributes:
        name: The name by which the parent knows this module.
        parent: The module that holds this one, or None for the root.
        children: The modules directly inside, by name.
    """

    @config_class
    class Config(Configurable.Config):
        name: str = ""  # Set by the parent; the root's is its class's name unless given.

        if TYPE_CHECKING:  # A field of this type holds any subclass; its fields may be set.

            def __init__(self, **values: Any) -> None: ...

    def __init__(self, cfg: Any, *, parent: "Module | None") -> None:
        super().__init__(cfg)
        if not self._config.name:
            self._config.name = type(self).__name__.lower()
        self.name: str = self._config.name
        self.parent = parent
        self.children: dict[str, Module] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        marked = lambda value: inspect.isfunction(value) and "_moelib_in_context" in vars(value)
        of_bases = (name for base in cls.__mro__ for name, x in vars(base).items() if marked(x))
        for name in {"forward", *of_bases}:
            value = inspect.getattr_static(cls, name, None)
            if inspect.isfunction(value) and not marked(value):
                setattr(cls, name, in_context(value))

    # The tree.

    def path(self) -> str:
        """Returns the names from below the root, as "decoder.layer0.attention"; "" for the root."""
        return ".".join((context.names_below(None, self) or ())[1:])

    def _title(self) -> str:
        """Returns the name of this module in errors: its config's path, or the name of the root."""
        return self.config._path or self.path() or self.name

    def _add_child(self, name: str, cfg: InstantiableConfig, **kwargs: Any) -> "Module":
        """Builds a child module, which is then reached as `self.<name>`.

        Raises:
            ChildNameConflictError: If the name is taken.
            InvalidConfigNameError: If the name has a separator of paths.
            RequiredFieldMissingError: If a REQUIRED field is unset; it has the whole path.
        """
        if name in self.children or name in self.__dict__ or hasattr(type(self), name):
            raise ChildNameConflictError(f"{self._title()} has a {name!r} already.")
        if not name or {".", "/"} & set(name):
            raise InvalidConfigNameError(f"a child of {self._title()} is called {name!r}.")
        cfg = cfg.clone(name=name)
        if not cfg._path:  # Not from the config of this module.
            cfg._locate(f"{self.config._path}.{name}".lstrip("."))
        try:
            child = cfg._build(parent=self, **kwargs)
        except RequiredFieldMissingError:
            raise
        except Exception as error:
            _explain(error, f"while {cfg._path} was built ({cfg._title()})")
            raise
        self.children[name] = child
        return child

    def __getattr__(self, name: str) -> Any:
        children = self.__dict__.get("children", {})
        if name in children:
            return children[name]
        if hasattr(type(self), name):
            return object.__getattribute__(self, name)  # A property: raises its own error.
        where = f"{type(self).__qualname__} has no {name!r}"
        raise AttributeError(f"{where}; {did_you_mean(name, children)}" if children else where)

    # The context.

    def get_invocation_context(self) -> InvocationContext:
        """Returns the context in which this module runs. Raises RuntimeError outside of one."""
        running = current_context()
        if running is None or running.module is not self:
            raise RuntimeError(
                f"{self._title()} does not run in a context; call its methods through "
                "functional(module, prng_key=, state=, inputs=, is_training=), and mark those that "
                "other modules call with moelib.core.module.in_context."
            )
        return running

    @property
    def state(self) -> Nested:
        """The parameters of this module and of its children, by name."""
        state = self.get_invocation_context().state
        if state is None:
            raise RuntimeError(f"{self._title()}: functional() was given state=None.")
        return cast_at_use(state)

    @property
    def prng_key(self) -> jax.Array:
        """The random key of this call."""
        key = self.get_invocation_context().key()
        if key is None:
            raise RuntimeError(
                f"{self._title()} needs a random key, but functional() was given prng_key=None."
            )
        return key

    @property
    def is_training(self) -> bool:
        """True in a training step."""
        return self.get_invocation_context().is_training

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

    def add_state_update(self, name: str, value: jax.Array) -> None:
        """Adds the new value of a parameter that the learner does not train."""
        self.get_invocation_context().add("state_updates", name, value)

    def add_module_output(self, name: str, value: Any) -> None:
        """Adds arrays for the caller of `functional`."""
        self.get_invocation_context().add("module_outputs", name, value)

    def get_module_outputs(self) -> Nested:
        """Returns the module outputs of this module and its children so far."""
        return self.get_invocation_context().outputs.module_outputs

    def add_aux_loss(
        self,
        name: str,
        value: jax.Array,
        *,
        weight: float | jax.Array,
        num_tokens: jax.Array | None = None,
    ) -> None:
        """Adds `value * weight` to the training objective.

        Args:
            name: Name of the loss.
            value: The loss, a scalar.
            weight: Weight of the loss.
            num_tokens: Number of tokens that the value is a mean over, a float32 scalar: the loss
                counts by their share of the batch's tokens. None for all of them.
        """
        if jnp.shape(value) != ():
            raise ValueError(
                f"{self._title()}: the auxiliary loss {name!r} has shape {jnp.shape(value)}; it "
                "must be a scalar."
            )
        loss = AuxLoss(jnp.asarray(value), jnp.asarray(weight, jnp.float32), num_tokens)
        self.get_invocation_context().add("aux_losses", name, loss)

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
    inherited: Mapping[str, Any] | None = None,
) -> tuple[Any, OutputCollection]:
    """Runs a method of a module as a pure function.

    Args:
        module: The module.
        prng_key: Random key; None if no module inside needs one.
        state: The module's parameters.
        inputs: Positional arguments, or keyword arguments if a dict.
        is_training: Whether this is a training step.
        method: Name of the method.
        drop_output_collections: Names of collections to return empty.
        inherited: Values that all modules inside see, besides those that the caller sees.

    Returns:
        (result of the method, outputs that the modules added).

    Raises:
        UnconsumedAuxLossError: If a running module calls this, and auxiliary losses that are not
            dropped would not reach the objective.
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
    caller = current_context()
    args, kwargs = ((), inputs) if isinstance(inputs, Mapping) else (inputs, {})
    values = {**(caller.inherited if caller else {}), **(inherited or {})}
    called = InvocationContext(module, state, prng_key, is_training, values)
    with context.set_current_context(called):
        outputs = _run(module, method, lambda: getattr(module, method)(*args, **kwargs))
    collection = context.prune_empty(called.outputs)
    collection = collection._replace(**{name: {} for name in drop_output_collections})
    if collection.aux_losses and caller is not None and is_training:
        lost = tree.by_path(collection.aux_losses, context.is_aux_loss)
        raise UnconsumedAuxLossError(
            f"{caller.module._title()} calls functional({module.name}), and the auxiliary losses "
            f"{', '.join(lost)} would be lost; call the child directly, or pass "
            "drop_output_collections=('aux_losses',)."
        )
    return outputs, collection
