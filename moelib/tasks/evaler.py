"""Evaluation and predictions of a task, over every example once and in order."""

import functools
from collections.abc import Callable
from typing import Any, cast

import jax
import numpy as np

from moelib.core import tree
from moelib.core.config import config_class
from moelib.core.errors import UserError
from moelib.core.metrics import Scalars
from moelib.core.module import functional
from moelib.core.precision import cast_parameters
from moelib.parallel.sharding import sharding_rules
from moelib.tasks.input import TaskInput
from moelib.tasks.task import check_names
from moelib.train.evaler import SpmdEvaler


class ExampleEvaler(SpmdEvaler):
    """Evaluates the loss and the metrics of a task on a `TaskInput`."""

    @config_class
    class Config(SpmdEvaler.Config):
        prng_seed: int = 0  # Seed of the keys of predictions, one per batch.

    _predict: Callable[..., Any] | None = None  # Compiled for each mesh by JAX.

    def try_out(self, params: Any, mesh: jax.sharding.Mesh) -> None:
        """Evaluates the first batch, so that errors in the task's functions come before a step."""
        self.open_input(mesh)
        self._source.max_batches = 1
        functions = self._model.functions
        try:
            self.evaluate(params, mesh)
            if functions["predict"] is not None and functions["metric"] is None:
                self.predictions(params, mesh)
        finally:
            self._source.max_batches = None

    def _check_weight(self, num_tokens: float) -> None:
        if num_tokens > 0 or (num_tokens == 0 and self._source.max_batches is not None):
            return
        raise UserError(
            f"{self._title()}: the weights of all examples are 0, or one is negative "
            "or NaN; return (sum, weight) from loss, with weights of 0 or more."
        )

    @property
    def _source(self) -> TaskInput:
        return cast("TaskInput", self._data.input)

    def _step(self, params: Any, batch: Any) -> Any:
        return self._without_repetitions(functools.partial(super()._step, params), batch)

    def _without_repetitions(self, function: Callable[[Any], Any], batch: Any) -> Any:
        """Returns `function` of a batch, of an incomplete one at its own size."""
        if "valid" not in batch:
            return function(batch)
        count = len(self._source.examples) % self.config.input.global_batch_size
        examples = jax.tree.map(lambda x: x[:count], batch["batch"])
        with sharding_rules({"batch": ()}):  # The mesh may not divide their number.
            return function({"batch": examples})

    def evaluate(
        self,
        params: Any,
        mesh: jax.sharding.Mesh,
        *,
        on_batch: Callable[[int], None] | None = None,
    ) -> Scalars:
        """Returns the means over all examples of the loss and its metrics, and the task's metric.

        `weight` is that of the loss: the number of examples, or the sum of the weights it returns.
        """
        scalars = super().evaluate(params, mesh, on_batch=on_batch)
        scalars["weight"] = scalars.pop("num_tokens")
        del scalars["aux_loss"]
        metric = self._model.functions["metric"]
        if metric is not None:
            results = self.predictions(params, mesh, on_batch=on_batch)
            examples = [self._source.examples[i] for i in range(len(results))]
            found = metric(examples, results)
            check_names("metric", found, scalars)
            for name, value in found.items():
                shape, *kinds = tree.shape_and_kind(value)
                if shape or not any(kinds):
                    text = tree.array_text(value)
                    raise UserError(f"metric returned {text} as {name!r}; return a number.")
                scalars[name] = float(value)
        return scalars

    def predictions(
        self,
        params: Any,
        mesh: jax.sharding.Mesh,
        *,
        on_batch: Callable[[int], None] | None = None,
    ) -> list[Any]:
        """Returns the result of each example, in order and on every process.

        `on_batch` is called as by `evaluate`.

        Raises:
            UserError: If the task has no function `predict`, or it does not return B predictions.
        """
        if self._model.functions["predict"] is None:
            raise UserError(f"{self._model._title()}: predict is not set; set it to a function.")
        self.open_input(mesh)
        rows = self.config.input.global_batch_size
        key = jax.random.key(self.config.prng_seed)
        results: list[Any] = []
        with self._data.batches(mesh) as feed:
            for count, batch in enumerate(feed):
                outputs = self._run(params, batch, jax.random.fold_in(key, count), mesh)
                left = len(self._source.examples) - len(results)
                results += self._results_of(jax.tree.map(np.asarray, outputs), min(rows, left))
                if on_batch is not None:
                    on_batch(count)
        return results

    def _run(self, params: Any, batch: Any, key: jax.Array, mesh: jax.sharding.Mesh) -> Any:
        if self._predict is None:

            def predict(params: Any, batch: Any, key: jax.Array) -> Any:
                specs = self._model.create_parameter_specs_recursively()
                params = cast_parameters(params, specs, self._train_dtype)
                run = lambda batch: functional(
                    self._model, key, params, (batch,), is_training=False, method="predict"
                )[0]
                return self._without_repetitions(run, batch)

            replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
            self._predict = jax.jit(predict, out_shardings=replicated)
        return self._predict(params, batch, key)

    def _results_of(self, outputs: Any, count: int) -> list[Any]:
        """Returns the results of the examples of a batch, `count` of them."""
        for path, x in tree.flatten_items(outputs):
            if x.shape[:1] != (count,):
                raise UserError(
                    f"predict returned {path or 'an array'} of shape {x.shape} for {count} "
                    "examples; its first dimension must be theirs."
                )
        if not jax.tree.leaves(outputs):
            raise UserError(f"predict returned {outputs!r}; return an array, or a tree of them.")
        postprocess = self._model.functions["postprocess"]
        if postprocess is None:
            leaves, structure = jax.tree.flatten(outputs)
            return [jax.tree.unflatten(structure, row) for row in zip(*leaves, strict=True)]
        results = postprocess(outputs)
        is_array = isinstance(results, np.ndarray | jax.Array) and results.ndim > 0
        number = len(results) if is_array or isinstance(results, list | tuple) else "no"
        if number != count:
            raise UserError(
                f"postprocess returned {type(results).__name__}, {number} results for {count} "
                "examples; return a list with one for each."
            )
        return list(results)
