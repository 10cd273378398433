"""Evaluation during training: means over all tokens of an evaluation set."""

import collections
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from moelib.checkpoint.policy import every_n_steps_and_last_policy
from moelib.core.config import (
    REQUIRED,
    InstantiableConfig,
    Required,
    config_class,
    config_for_function,
)
from moelib.core.errors import UserError
from moelib.core.metrics import Scalars
from moelib.core.module import Module
from moelib.core.tree import Batch
from moelib.data.batches.input import Input, State
from moelib.data.batches.prefetch import Prefetcher, host_rows, put_batch, row_sharding
from moelib.models.model import Model
from moelib.parallel.channels import own_channels
from moelib.runs.identity import check_inputs
from moelib.runtime.processes import agreed
from moelib.train.metrics import language_metrics, unpack
from moelib.train.state import batch_sharding
from moelib.train.step import make_eval_step

_BY_SOURCE = "cross_entropy_by_source"  # Metric of a CausalLM: one value per source.


class EvaluationData:
    """The batches of an evaler's input, which is opened once, on a mesh."""

    def __init__(self, name: str, cfg: Any) -> None:
        """Opens nothing yet; `name` is the path of the input's config, for errors."""
        self._name, self._config = name, cfg

    @functools.cached_property
    def input(self) -> Input:
        """The input, opened on first use, which all processes must do together."""
        try:
            opened = agreed(self._config.instantiate)
        except UserError as error:
            error.add_note(f"The input is {self._name}.")
            raise
        check_inputs(self._name, opened)
        if opened.is_endless:
            raise UserError(
                f"{self._name} never ends, nor would an evaluation; set its mode to EVALUATE, or "
                "max_batches."
            )
        return opened

    @property
    def identity(self) -> State | None:
        """Identity of the input; None if it is not open."""
        return self.input.identity if "input" in self.__dict__ else None

    def share(self, mesh: jax.sharding.Mesh) -> tuple[jax.sharding.NamedSharding, range]:
        """Returns the sharding of a batch, and this process's share of its sequences."""
        batch_size = self._config.global_batch_size
        sharding = batch_sharding(batch_size, self._config.seq_len, mesh)
        return sharding, host_rows(sharding, batch_size)

    def batches(self, mesh: jax.sharding.Mesh, *, num_prefetched: int = 2) -> Prefetcher[Any]:
        """Returns all batches, as global arrays."""
        sharding, share = self.share(mesh)
        put = lambda batch: put_batch(batch, sharding, self._config.global_batch_size)
        return Prefetcher(self.input.iterator(share), put, num_batches=num_prefetched)


class SpmdEvaler(Module):
    """Evaluates a model on a finite input, at the steps that its policy selects."""

    @config_class
    class Config(Module.Config):
        input: Required[Input.Config] = REQUIRED  # A finite one: mode EVALUATE, or max_batches.
        # Builds a moelib.checkpoint.policy.Policy, whose max_step is by default the trainer's.
        eval_policy: InstantiableConfig = config_for_function(every_n_steps_and_last_policy).set(
            n=1000
        )

    def __init__(
        self, cfg: Any, *, parent: Module | None, model: Model, train_dtype: str | None = None
    ) -> None:
        """Builds the policy; the input is opened by `open_input` or the first evaluation."""
        super().__init__(cfg, parent=parent)
        self._policy = self.config.eval_policy.instantiate()
        path = f"{self.name.replace('evaler_', 'evalers.', 1)}.input"
        self._data = EvaluationData(path, self.config.input)
        self._model, self._train_dtype = model, train_dtype
        self._step_fn = make_eval_step(model, train_dtype=train_dtype)
        self._compiled: dict[tuple[str, ...], Callable[..., Any]] = {}  # By arrays of a batch.

    def should_evaluate(self, *, step: int, summaries: Mapping[str, float] | None = None) -> bool:
        """Returns whether the policy selects this step."""
        return self._policy(step=step, summaries=summaries or {})

    def open_input(self, mesh: jax.sharding.Mesh) -> None:
        """Opens the input, unless it is open; reads no batch. All processes must call it.

        Raises:
            ValueError: If the mesh does not divide the batch, or the input cannot be opened.
        """
        self._data.share(mesh)
        _ = self._data.input

    def try_out(self, params: Any, mesh: jax.sharding.Mesh) -> None:
        """Runs what may fail, before the first step; to be called inside `jax.set_mesh(mesh)`."""

    @property
    def input_identity(self) -> State | None:
        """Identity of the input; None if it is not open."""
        return self._data.identity

    def evaluate(
        self,
        params: Any,
        mesh: jax.sharding.Mesh,
        *,
        on_batch: Callable[[int], None] | None = None,
    ) -> Scalars:
        """Returns the metrics over the whole input: `loss` and other means, weighted by tokens.

        `num_tokens`, `perplexity`, and `bits_per_byte` if batches have `target_num_bytes`, are over
        all tokens together, without auxiliary losses. Of a `CausalLM` on a mixture,
        `cross_entropy/<source>` is over the tokens of one source, if there are some, and
        `num_tokens/<source>` is their number. To be called inside `jax.set_mesh(mesh)`.
        `on_batch` is called after each batch with the number of the batch, from 0.

        Raises:
            UserError: If the input has no token to predict.
        """
        self.open_input(mesh)
        totals: dict[str, float] = collections.defaultdict(float)
        rows = self.config.input.global_batch_size
        opened, (sharding, share) = self._data.input, self._data.share(mesh)
        batches = opened.iterator(share)
        names = opened.source_names if self._model.has_source_metrics else ()

        def put(batch: Batch) -> Any:
            placed = put_batch(batch, sharding, rows)
            if names:
                ids = opened.source_ids(batches.state()["step"] - 1, share)
                sources = {"sources": np.eye(len(names), dtype=np.int32)[ids]}
                placed |= put_batch(sources, row_sharding(sharding, 1), rows)
            return placed

        before = None  # The results of a batch are read while the next one runs.
        with Prefetcher(batches, put) as feed:
            for count, batch in enumerate(feed):
                after = self._compile(params, batch, mesh)(params, batch)
                _add(totals, before)
                before = after
                if on_batch is not None:
                    on_batch(count)
        _add(totals, before)
        self._check_weight(totals["num_tokens"])
        means = _named_by_source(_means(totals), totals, names)
        return means | language_metrics(means) if self._model.is_language_model else means

    def _check_weight(self, num_tokens: float) -> None:
        if not num_tokens:
            raise UserError(
                f"{self._title()}: the input has no token to predict; set input to one "
                "that contains text."
            )

    def _step(self, params: Any, batch: Any) -> Any:
        return self._step_fn(params, batch)

    def _compile(self, params: Any, batch: Any, mesh: jax.sharding.Mesh) -> Callable[..., Any]:
        names = tuple(batch)  # A task's incomplete batch has one more.
        if names not in self._compiled:
            replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
            jitted = jax.jit(self._step, out_shardings=replicated)
            self._compiled[names] = own_channels(jitted.lower(params, batch), mesh).compile()
        return self._compiled[names]


def _add(totals: dict[str, float], packed: Any) -> None:
    for name, value in unpack(packed).items() if packed is not None else ():
        largest = name.startswith("max/") and name in totals
        totals[name] = max(totals[name], value) if largest else totals[name] + value


def _named_by_source(means: Scalars, totals: Mapping[str, float], names: Sequence[str]) -> Scalars:
    """Returns means with the names of sources instead of their indices."""
    for i, name in enumerate(names):
        mean = means.pop(f"{_BY_SOURCE}/{i}")
        means[f"num_tokens/{name}"] = weight = totals[f"weight/{_BY_SOURCE}/{i}"]
        if weight:
            means[f"cross_entropy/{name}"] = mean
    return means


def _means(totals: Mapping[str, float]) -> Scalars:
    """Returns the means and maxima of metrics from their totals."""
    means = {"num_tokens": totals["num_tokens"]}
    for key, total in totals.items():
        kind, _, name = key.partition("/")
        if kind == "max":
            means[name] = total
        elif kind == "total":
            weight = totals[f"weight/{name}"]
            means[name] = total / weight if weight else 0.0
    return means
