"""The input of a task: batches that `collate` makes of examples.

A batch is {"batch": what collate returned}; in an evaluation, the last one, if it is incomplete,
repeats the last example and has also "valid", 1 for an example and 0 for a repetition.

Letters: B examples of a global batch, N examples of an epoch.
"""

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import jax
import numpy as np

from moelib.core import tree
from moelib.core.config import REQUIRED, Required, config_class, maybe_instantiate
from moelib.core.errors import UserError
from moelib.core.tree import Batch
from moelib.data.batches.input import Input, State, StepBatches, check_rows
from moelib.data.batches.lm_input import InputMode
from moelib.data.hashing import random_permutation

logger = logging.getLogger(__name__)


class TaskInput(Input):
    """Batches of examples, each a pure function of seed and step.

    Training reads epochs in random orders, one after the other, and drops no example: a batch may
    end one epoch and begin the next. An evaluation reads every example once, in order.
    """

    @config_class
    class Config(Input.Config):
        # Function that returns the examples, a sequence; or its config. With an argument `epoch`,
        # it is called for each epoch, and must return N examples each time, a multiple of B; with
        # `params`, it also gets the current parameters as NumPy arrays.
        examples: Required[Any] = REQUIRED
        # Function from a list of examples to a batch: a dict of arrays [len(list), ...], which may
        # be nested. None for that of the task, or else `stack`.
        collate: Any = None
        mode: InputMode = InputMode.TRAIN  # Endless epochs, or one.
        shuffle: bool = True  # Whether each epoch of training has a random order of its own.
        seed: int = 0  # Seed of the orders.
        seq_len: int = 1  # Examples have no dimension that is split like a sequence.

        def complete(self, model: Any) -> None:
            """Sets `collate` to that of the task."""
            if self.collate is None:
                self.collate = dict(model.items()).get("collate")

        def abstract_batch(self, opened: Callable[[], Input]) -> Batch:
            """Returns a global batch as `jax.ShapeDtypeStruct`s; collates one example."""
            return cast(TaskInput, opened()).abstract_batch()

    def __init__(self, cfg: Config) -> None:
        """Gets the examples, unless they depend on the epoch; raises UserError without any."""
        super().__init__(cfg)
        cfg = self.config
        self.is_endless = cfg.mode is InputMode.TRAIN
        self._collate = maybe_instantiate(cfg.collate) or stack
        self.max_batches: int | None = None  # Number of batches of an evaluation; None for all.
        self.examples: Sequence[Any] = ()  # Those of the current epoch, if they depend on it.
        self._epoch, self._order = -1, np.zeros(0, np.int64)
        self._example: Batch = {}  # Shapes and dtypes of the arrays of one example.
        self.num_examples = 0  # N; 0 before the first call, if they depend on the epoch.
        self._source = maybe_instantiate(cfg.examples)
        named = inspect.signature(self._source).parameters if callable(self._source) else {}
        self.of_epochs, self.reads_parameters = "epoch" in named, "params" in named
        if not self.of_epochs:
            self.examples = _checked(self._source() if callable(self._source) else self._source)
            self.num_examples = len(self.examples)

    def _begin(self, epoch: int) -> None:
        """Sets the examples of an epoch, and their order."""
        cfg = self.config
        if epoch == self._epoch:
            return
        if self.of_epochs:
            values = {}
            if self.reads_parameters:
                values["params"] = self.parameters()
                if values["params"] is None:
                    raise UserError(
                        "examples(epoch, params): there are no parameters yet; train on a mesh "
                        'without the axis "model", and evaluate on examples without `params`.'
                    )
            examples = _checked(self._source(epoch=epoch, **values))
            before = self.num_examples or len(examples)
            if len(examples) != before or before % cfg.global_batch_size:
                raise UserError(
                    f"examples(epoch={epoch}) returned {len(examples)} examples; return as many "
                    f"for each epoch ({before} before), a multiple of {cfg.global_batch_size}."
                )
            self.examples, self.num_examples = examples, before
        if cfg.shuffle and cfg.mode is InputMode.TRAIN:
            self._order = random_permutation(self.num_examples, cfg.seed, epoch)
        self._epoch = epoch

    def iterator(self, rows: range | None = None) -> "TaskBatches":
        """Returns the batches of a host, which collates its own examples only."""
        return TaskBatches(self, check_rows(rows, self.config.global_batch_size))

    @property
    def identity(self) -> State:
        """The number of examples and the settings that determine the batches, as JSON values."""
        size = 0 if self.of_epochs else len(self.examples)
        names = ("global_batch_size", "shuffle", "seed")
        return {"num_examples": size, **{name: getattr(self.config, name) for name in names}}

    @property
    def num_batches(self) -> int | None:
        """The number of batches; None if they are endless."""
        if self.config.mode is InputMode.TRAIN:
            return None
        self._begin(0)
        number = -(-len(self.examples) // self.config.global_batch_size)
        return number if self.max_batches is None else min(number, self.max_batches)

    def batch(self, step: int, rows: range) -> Batch:
        """Returns some rows of a batch."""
        first = self.first_example(step)
        indices = [first + row for row in rows]
        if self.config.mode is InputMode.TRAIN:
            return {"batch": self._collated([self._training_example(i) for i in indices])}
        self._begin(0)
        last = len(self.examples) - 1
        batch: Batch = {"batch": self._collated([self.examples[min(i, last)] for i in indices])}
        if first + self.config.global_batch_size > len(self.examples):
            batch["valid"] = np.array([i <= last for i in indices], np.float32)
        return batch

    def _training_example(self, index: int) -> Any:
        if not self.num_examples:
            self._begin(0)
        epoch, at = divmod(index, self.num_examples)
        self._begin(epoch)
        return self.examples[int(self._order[at]) if self.config.shuffle else at]

    def abstract_batch(self) -> Batch:
        """Returns a global batch as `jax.ShapeDtypeStruct`s; collates one example."""
        size = self.config.global_batch_size
        struct = lambda x: jax.ShapeDtypeStruct((size, *x.shape[1:]), x.dtype)
        return {"batch": jax.tree.map(struct, self.batch(0, range(1))["batch"])}

    def _collated(self, examples: list[Any]) -> Batch:
        """Returns the batch of some examples, as arrays whose first dimension is theirs.

        Raises:
            UserError: If `collate` returns anything else.
        """
        batch = self._collate(examples)
        if not isinstance(batch, dict) or not batch:
            raise UserError(f"collate returned {batch!r:.80}; return a dict of arrays.")
        arrays = jax.tree_util.tree_map_with_path(  # Keeps the keys, whatever they are.
            lambda path, x: _array(tree.path_string(path), x, len(examples)),
            batch,
            is_leaf=lambda x: not isinstance(x, dict),
        )
        example = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), arrays)
        self._example = self._example or example
        if (difference := tree.mismatch(example, self._example)) is not None:
            raise UserError(
                f"collate: {difference} per example, as before; return arrays of one shape (pad "
                "them) and one dtype in all batches."
            )
        return arrays


class TaskBatches(StepBatches):
    """One host's batches of a `TaskInput`."""

    def __next__(self) -> Batch:
        """Returns this host's rows of the next batch."""
        number = self.source.num_batches
        if number is not None and self.step >= number:
            raise StopIteration
        return super().__next__()

    def state(self) -> State:
        """Returns the position after the batches returned so far."""
        return {**super().state(), "examples_per_epoch": self.source.num_examples}

    def restore(self, state: State) -> None:
        """Goes to a saved position. Raises UserError if it belongs to other examples.

        Within an epoch whose examples depend on parameters, which are then made again, it warns.
        """
        super().restore(state)
        source, batch_size = self.source, self.source.config.global_batch_size
        source.num_examples = source.num_examples or state.get("examples_per_epoch", 0)
        if not source.reads_parameters or not source.num_examples:
            return
        epoch, at = divmod(source.first_example(self.step), source.num_examples)
        if at:
            logger.warning(
                "step %d is within epoch %d: examples(epoch, params) is called again, with the "
                "parameters of this step instead of step %d, so that the run differs from an "
                "uninterrupted one; save at the ends of epochs: save_every=%d.",
                *(self.step, epoch, self.step - at // batch_size),
                source.num_examples // batch_size,
            )

    def follow(self, state: State) -> None:
        """Goes to the batch after those of another input, and to the examples after its own."""
        self.source.num_examples = self.source.num_examples or state.get("examples_per_epoch", 0)
        super().follow(state)


def _checked(examples: Any) -> Sequence[Any]:
    """Returns the examples. Raises UserError if they are no sequence, or an empty one."""
    indexed = hasattr(examples, "__len__") and hasattr(examples, "__getitem__")
    if not indexed or isinstance(examples, Mapping):
        raise UserError(
            f"examples is {type(examples).__name__}; make it a sequence of examples, with len() "
            "and [index], such as a list of dicts."
        )
    if not len(examples):
        raise UserError("examples is empty; return one example or more.")
    return examples


def stack(examples: Sequence[Mapping[str, Any]]) -> Batch:
    """Returns the values of each key of the examples, stacked.

    Raises:
        UserError: If an example is no dict, or has other keys than the first.
    """
    first = examples[0]
    for example in examples:
        if not isinstance(example, Mapping):
            raise UserError(
                f"an example is {type(example).__name__}; make it a dict of arrays of equal "
                "shapes, or set collate to a function that makes a batch of a list of examples."
            )
        if example.keys() != first.keys():
            raise UserError(
                f"an example has the keys {sorted(example)}, and another {sorted(first)}; give all "
                "examples the same keys."
            )
    return {name: [example[name] for example in examples] for name in first}


def _array(path: str, value: Any, num_examples: int) -> np.ndarray:
    try:
        array = np.asarray(value)
    except ValueError as error:  # Ragged.
        raise UserError(f"collate returned {path!r}: {error}; pad its rows to one shape.") from None
    if array.dtype.kind not in "biufV":  # V: bfloat16 and other dtypes of ml_dtypes.
        raise UserError(f"collate returned {path!r} of {array.dtype}; make it real numbers.")
    if array.shape[:1] != (num_examples,):
        raise UserError(
            f"collate returned {path!r} of shape {array.shape} for {num_examples} examples; its "
            "first dimension must be theirs."
        )
    dtype = jax.dtypes.canonicalize_dtype(array.dtype)
    narrow = array.astype(dtype, copy=False)
    if dtype.kind in "iu" and (wrong := narrow != array).any():
        raise UserError(
            f"collate returned {path!r} with {array[wrong][0]}, which {dtype} cannot hold; return "
            "smaller integers."
        )
    return narrow
