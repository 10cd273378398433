"""Tasks: any model, given by a few functions, that `SpmdTrainer` trains like any other.

    task = Task.default_config().set(init=init, loss=loss, predict=predict)
    moelib.fit(task, examples, batch_size=64, num_epochs=10, optimizer=..., trainer_dir="runs/a")

Letters: B examples of a batch.
"""

import numbers
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from moelib.core import tree
from moelib.core.config import (
    REQUIRED,
    Required,
    config_class,
    config_for_function,
    maybe_instantiate,
)
from moelib.core.config_types import check_parameters, is_config
from moelib.core.errors import UserError
from moelib.core.metrics import Metric, WeightedScalar, is_metric, weighted
from moelib.core.module import Module, in_context
from moelib.core.tree import Batch, Nested
from moelib.layers.external import ExternalLayer, Updated
from moelib.models.model import Model

# Names of the metrics that every run has.
_RESERVED = (
    "loss mean_loss objective aux_loss weight num_tokens non_finite step time learning_rate "
    "gradient_norm skipped skipped_steps examples_per_second step_seconds device_memory_gb"
)


class Task(ExternalLayer, Model):
    """A model and its loss, as functions of parameters in a tree of any type.

    Each function is given itself, or as a config that builds it. Parameters are called by their
    paths in the tree ("Dense_0/kernel"). Those that `axes` does not name are sharded automatically
    over the mesh axes "model" (`auto_partition_specs`) and "fsdp".
    """

    is_language_model = False  # The loss is not one of nats per token.
    is_in_config = False  # Its functions are passed again wherever its weights are read.
    is_auto_sharded = True

    @config_class
    class Config(ExternalLayer.Config):
        # (key) -> parameters: Flax variables, NNX state, arrays of an Equinox module, lists, ...
        init: Required[Any] = REQUIRED
        # (params, batch, key, is_training) -> loss, or (loss, {name: metric}). The loss is the mean
        # over the examples, a scalar, or (sum, weight), such as (sum over tokens, their number). So
        # is each metric: a scalar is a mean over the examples also if the loss is a pair. The
        # result may be wrapped in `Updated` with new values of untrained parameters (`fixed`).
        loss: Required[Any] = REQUIRED
        # (list of examples) -> batch; None stacks examples that are dicts of arrays.
        collate: Any = None
        predict: Any = None  # (params, batch, key) -> tree of arrays [B, ...].
        # (predictions of some examples, as NumPy arrays) -> list of their results; None for a tree
        # of arrays per example.
        postprocess: Any = None
        metric: Any = None  # (all examples, all results) -> {name: number}, in evaluations.
        # (params, batch, key, apply_gradients) -> (new params, what `loss` returns), which replaces
        # the training step. apply_gradients(params, gradients) -> new params; at most one call.
        train_step: Any = None
        functions: Any = None  # Set from `init` and `loss`.

    def __init__(self, cfg: Config, *, parent: Module | None) -> None:
        """Builds the functions, and traces `init` for the shapes of the parameters.

        Raises:
            UserError: If a rule matches no name, or does not fit the parameter; or if a field is
                no function, or needs `predict`.
        """
        _check_functions(cfg)
        pair = config_for_function(_pair).set(init=cfg.init, loss=cfg.loss)
        super().__init__(cfg.clone(functions=pair), parent=parent)
        cfg = self.config
        names = ("predict", "postprocess", "metric", "train_step")
        self.functions = {name: maybe_instantiate(getattr(cfg, name)) for name in names}

    # -- Calls -----------------------------------------------------------------------------------

    @property
    def _params(self) -> Any:
        """The parameters of the current context in the task's own tree."""
        return self.own_tree(self.own_parameters)

    def own_tree(self, params: Nested) -> Any:
        """Returns parameters by path in the tree that `init` returns."""
        return tree.from_nested(params, self._shapes)

    @property
    def _key(self) -> jax.Array:
        """The random key of this call; a fixed one in an evaluation."""
        key = self.get_invocation_context().key()
        return jax.random.key(0) if key is None else key

    def forward(self, batch: Batch) -> tuple[WeightedScalar, dict[str, Metric]]:
        """Returns the loss and the metrics of a batch of `TaskInput`."""
        result = self._run(self._params, batch["batch"], self._key, self.is_training)
        if isinstance(result, Updated):
            for name, value in tree.to_nested(result.changed).items():
                self.add_state_update(name, value)
        return _metrics_of(result, batch["batch"])

    @in_context
    def predict(self, batch: Batch) -> Any:
        """Returns the predictions for a batch of `TaskInput`."""
        run = self._at_use(lambda *args: _numbers(self.functions["predict"](*args)))
        return run(self._params, batch["batch"], self._key)

    def result_of(self, params: Nested) -> Any:
        """Returns the parameters in the task's own tree."""
        return self.own_tree(params)

    @property
    def has_own_step(self) -> bool:
        """Whether the task replaces the training step."""
        return self.functions["train_step"] is not None

    def own_step(
        self, batch: Batch, apply_gradients: Callable[[Nested, Nested], Nested]
    ) -> tuple[Nested, WeightedScalar, dict[str, Metric]]:
        """Returns the parameters after the task's own training step, its loss and metrics."""
        nested = tree.to_nested
        apply = lambda params, gradients: self.own_tree(
            apply_gradients(nested(params), nested(gradients))
        )
        params = self._params
        if self._use_specs is not None:  # All at once: its gradients are not ours to trace.
            params = jax.lax.with_sharding_constraint(params, self._use_specs)
        returned = self.functions["train_step"](params, batch["batch"], self._key, apply)
        if not isinstance(returned, tuple) or len(returned) != 2:
            text = tree.array_text(returned)
            raise UserError(f"train_step returned {text}; return (new parameters, loss).")
        params, result = returned
        if isinstance(result, Updated):
            raise UserError("train_step returned Updated; put the values into its parameters.")
        if (difference := tree.mismatch(params, self._params, dtypes=True)) is not None:
            raise UserError(f"train_step: in the parameters that it returns, {difference}.")
        return nested(params), *_metrics_of(result, batch["batch"])


# Parameters of functions whose signatures are checked.
_PARAMETERS = {
    "init": "key",
    "loss": "params, batch, key, is_training",
    "predict": "params, batch, key",
    "train_step": "params, batch, key, apply_gradients",
}


def _check_functions(cfg: Task.Config) -> None:
    """Raises UserError if a field is no function, or needs `predict`."""
    for name in ("init", "loss", "collate", "predict", "postprocess", "metric", "train_step"):
        value = getattr(cfg, name)
        if not (value is None or value is REQUIRED or is_config(value) or callable(value)):
            raise UserError(f"{name} is {value!r:.80}; set it to a function.")
        if callable(value) and not is_config(value) and name in _PARAMETERS:
            check_parameters(name, value, *_PARAMETERS[name].split(", "))
        if name in ("postprocess", "metric") and value is not None and cfg.predict is None:
            raise UserError(f"{name} is set, but predict is not; set predict to a function.")


def _pair(init: Callable[[jax.Array], Any], loss: Callable[..., Any]) -> Any:
    """Returns the two functions of an `ExternalLayer`."""
    return init, loss


def _numbers(predictions: Any) -> Any:
    """Returns the predictions. Raises UserError if they are not arrays of numbers."""
    for path, x in tree.flatten_items(predictions):
        is_array = isinstance(x, jax.Array | np.ndarray)
        is_key = is_array and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        if is_key or not (is_array or isinstance(x, numbers.Number)):
            at = f" as {path!r}" if path else ""
            raise UserError(
                f"predict returned {tree.array_text(x)}{at}; return arrays of numbers, and make "
                "other results of them in postprocess."
            )
    return predictions


# -- Losses and metrics --------------------------------------------------------------------------


def _metrics_of(result: Any, batch: Batch) -> tuple[WeightedScalar, dict[str, Metric]]:
    """Returns loss and metrics of what the function `loss` returned for a batch.

    Raises:
        UserError: If one is not a real scalar, nor a pair of them, or has a name in use.
    """
    if isinstance(result, Updated):
        result = result.outputs
    given = isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict)
    loss, metrics = result if given else (result, {})
    num_examples = jax.tree.leaves(batch)[0].shape[0]
    mean = _weighted("loss", loss, num_examples)
    check_names("loss", metrics)
    return mean, {name: _weighted(name, x, num_examples) for name, x in metrics.items()}


def check_names(source: str, metrics: Any, taken: Iterable[str] = ()) -> None:
    """Checks the metrics that a function of a task returned.

    Raises:
        UserError: If they have no names, or one is that of another metric.
    """
    if not isinstance(metrics, dict) or not all(isinstance(name, str) for name in metrics):
        raise UserError(f"{source} returned {metrics!r:.80}; return metrics as {{name: number}}.")
    if both := sorted(metrics.keys() & {*_RESERVED.split(), *taken}):
        raise UserError(f"{source} returned the metric {both[0]!r}, a name in use; rename it.")


def _weighted(name: str, value: Any, weight: Any) -> Any:
    """Returns a metric of a scalar with the weight, or of a pair (sum, weight).

    A negative weight becomes NaN, which ends a run or an evaluation.
    """
    if is_metric(value):
        return value
    parts = value if isinstance(value, tuple) else (value,)
    arrays = map(tree.shape_and_kind, parts)
    if len(parts) > 2 or any(shape or not any(kinds) for shape, *kinds in arrays):
        raise UserError(
            f"{name} is {', '.join(map(tree.array_text, parts))}; return a real scalar, the mean "
            "over the examples, or a pair of them, (sum, weight)."
        )
    if len(parts) == 1:
        return weighted(value, weight)
    total, weight = parts
    weight = jnp.where(weight < 0, jnp.nan, weight)
    return weighted(total / jnp.where(weight == 0, 1, weight), weight)
