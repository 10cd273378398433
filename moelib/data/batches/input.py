"""Inputs: the batches that a trainer reads, whatever their origin.

A batch is a dict of NumPy arrays:

    input_ids         int32 [B, S]
    target_labels     int32 [B, S]  the next token; negative where nothing is predicted
    segment_ids       int32 [B, S]  1, 2, ... for the documents of a sequence; 0 is padding
    positions         int32 [B, S]
    target_num_bytes  int32 [B]     bytes of text that a sequence's targets cover

Letters: B sequences of a batch, S sequence length.
"""

import collections
import json
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from moelib.core.config import REQUIRED, Configurable, config_class
from moelib.core.config_types import PositiveInt
from moelib.core.errors import UserError
from moelib.data.tokens.tokenizer import NoTokenizerError, Tokenizer

if TYPE_CHECKING:  # Importing JAX takes two seconds, and data does not need it.
    from moelib.core.tree import Batch

State = dict[str, Any]  # JSON values only.

PADDING_LABEL = -1
TOKEN_ARRAYS = ("input_ids", "target_labels", "segment_ids", "positions")  # Each [B, S].


class BatchIterator(Iterator["Batch"]):
    """One host's batches in order, from a position that can be saved and restored."""

    # Whether each batch is a function of its position, to which `seek` can go.
    can_seek: bool = False

    def __iter__(self) -> Self:
        """Returns itself."""
        return self

    @abstractmethod
    def __next__(self) -> "Batch":
        """Returns this host's sequences of the next batch. Raises StopIteration at the end."""

    @abstractmethod
    def state(self) -> State:
        """Returns the position after the batches returned so far, as JSON values."""

    @abstractmethod
    def restore(self, state: State) -> None:
        """Goes to a saved position. Raises UserError if it belongs to another input."""

    def follow(self, state: State) -> None:
        """Goes to the first batch after those of another input, whose position is given.

        Data that both have go on where they were, as far as the iterator can; those of another
        kind begin at their first batch.
        """
        if state.get("input") == self.state()["input"]:
            self.restore(state)

    def seek(self, position: int) -> None:
        """Goes to batch `position`, counted from 0; only if `can_seek`."""
        raise NotImplementedError


class Begin(NamedTuple):
    """Where an input begins that follows others in a run."""

    step: int = 0  # Batches of the inputs before.
    taken: Mapping[str, int] = {}  # Examples that they read; see `Input.examples_taken`.


class StepBatches(BatchIterator):
    """One host's batches of an input with `batch(step, rows)`."""

    def __init__(self, source: Any, rows: range) -> None:
        """Starts at the first batch; `rows` are those of this host."""
        self.source, self._rows, self.step = source, rows, 0
        self.can_seek = not source.reads_parameters

    def seek(self, position: int) -> None:
        """Goes to a batch."""
        self.step = position

    def __next__(self) -> "Batch":
        """Returns this host's rows of the next batch."""
        batch = self.source.batch(self.step, self._rows)
        self.step += 1
        return batch

    def state(self) -> State:
        """Returns the next step and the input's identity; the same on every host."""
        begin = self.source.begin
        extra = {} if begin == Begin() else {"begin": begin._asdict()}
        return {"step": self.step, "input": self.source.identity, **extra}

    def restore(self, state: State) -> None:
        """Goes to a saved position. Raises UserError if it belongs to another input."""
        check_state(state, self.source.identity)
        self.step, self.source.begin = state["step"], Begin(**state.get("begin", {}))

    def follow(self, state: State) -> None:
        """Goes to the batch after those of another input, and to the examples after its own.

        Examples that are others, or in another order, begin at their first.
        """
        before, step = state.get("input") or {}, state.get("step", 0)
        if before == self.source.identity:
            return self.restore(state)
        begin = Begin(**state.get("begin", {}))
        taken = collections.Counter(begin.taken)
        taken.update(self.source.examples_taken(before, step - begin.step))
        self.step, self.source.begin = step, Begin(step, dict(taken))
        return None


class Input(Configurable):
    """A source of batches.

    A subclass implements `iterator`, and `load_tokenizer` if its batches are made of text.
    """

    # Whether a batch depends on the parameters before its step, so that none is made ahead.
    reads_parameters: bool = False
    is_endless: bool = False  # Whether an iterator never ends, so that no evaluation reads it all.
    # Returns the current parameters on the host, as `Model.result_of` does; set by the trainer.
    parameters: Callable[[], Any] = staticmethod(lambda: None)
    # Returns the model and its parameters on the devices, cast as in a step; set by the trainer.
    policy: Callable[[], Any] = staticmethod(lambda: None)
    # Names of the sources that `source_ids` tells apart, of a mixture; () for other inputs.
    source_names: Sequence[str] = ()
    begin: Begin = Begin()  # Set by an iterator that follows another input.

    @config_class
    class Config(Configurable.Config):
        seq_len: PositiveInt = REQUIRED  # S.
        global_batch_size: PositiveInt = REQUIRED  # Sequences per step, over all hosts.

        def complete(self, model: Any) -> None:
            """Sets unset fields that follow from the config of the model."""

        def abstract_batch(self, opened: Callable[[], "Input"]) -> "Batch":
            """Returns a global batch as `jax.ShapeDtypeStruct`s.

            `opened` returns the input, for those whose data determine the shapes.
            """
            import jax

            shapes = batch_spec(self.global_batch_size, self.seq_len)
            return {name: jax.ShapeDtypeStruct(shape, "int32") for name, shape in shapes.items()}

        if TYPE_CHECKING:  # A field of this type holds any subclass; its fields may be set.

            def __init__(self, **values: Any) -> None: ...

    @classmethod
    def load_tokenizer(cls, cfg: Any) -> Tokenizer:
        """Returns the tokenizer of the batches' text from an input's config, without opening data.

        Raises NoTokenizerError if no tokenizer made the token ids.
        """
        raise NoTokenizerError(f"{cls.__name__} has no tokenizer: its token ids stand for no text.")

    @property
    def identity(self) -> State:
        """Settings and data, as JSON values, that all hosts of a job must share."""
        return {}

    def examples_taken(self, identity: State, num_steps: int) -> Mapping[str, int]:
        """Returns the number of examples that some steps of an input of an identity read.

        The key is what determines the examples and their order.
        """
        sizes = ("global_batch_size", "seq_len")
        order = json.dumps({name: x for name, x in identity.items() if name not in sizes})
        return {order: num_steps * identity.get("global_batch_size", 0)}

    def first_example(self, step: int) -> int:
        """Returns the number of the first example of a step of the run, counted over epochs."""
        ((order, count),) = self.examples_taken(self.identity, step - self.begin.step).items()
        return self.begin.taken.get(order, 0) + count

    def source_ids(self, position: int, rows: range | None = None) -> npt.NDArray[np.int64]:
        """Returns the index in `source_names` of some rows of a batch, by default of all.

        `position` is the number of the batch, from 0. Only of inputs with source names.
        """
        raise NotImplementedError

    @abstractmethod
    def iterator(self, rows: range | None = None) -> BatchIterator:
        """Returns some rows of each global batch, by default all, from the first batch.

        Raises:
            UserError: If they are not one of equal shares of the batch; see `check_rows`.
        """


def load_tokenizer(cfg: Any) -> Tokenizer:
    """Returns the tokenizer of an input, given its config, without opening its data.

    Raises:
        NoTokenizerError: If `cfg` is not the config of an input, or of one without a tokenizer.
    """
    if not isinstance(cfg, Input.Config):
        raise NoTokenizerError(f"The run has no input ({cfg!r:.40}), and so no tokenizer.")
    return cfg.klass.load_tokenizer(cfg)


def batch_spec(global_batch_size: int, seq_len: int) -> dict[str, tuple[int, ...]]:
    """Returns the shape of each array of a global batch; all are int32. Needs no data."""
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(TOKEN_ARRAYS, (global_batch_size, seq_len))
    return shapes | {"target_num_bytes": (global_batch_size,)}


def empty_batch(num_rows: int, seq_len: int, eos_id: int) -> "Batch":
    """Returns a batch of padding only."""
    batch = {
        name: np.zeros(shape, np.int32) for name, shape in batch_spec(num_rows, seq_len).items()
    }
    batch["input_ids"][:] = eos_id
    batch["target_labels"][:] = PADDING_LABEL
    return batch


def check_rows(rows: range | None, global_batch_size: int) -> range:
    """Returns the rows of a host, or all if they are None.

    Raises UserError if they are not one of several equal, contiguous shares of a global batch.
    """
    whole = range(global_batch_size)
    if rows is None:
        return whole
    size = len(rows)
    is_contiguous = size > 0 and whole[rows.start : rows.stop] == rows
    if not is_contiguous or global_batch_size % size or rows.start % size:
        raise UserError(
            f"{rows=} are not one of equal, contiguous shares of global_batch_size="
            f"{global_batch_size}; set them to range(i * n, (i + 1) * n) with a divisor n."
        )
    return rows


def check_state(state: State, identity: State) -> None:
    """Raises UserError unless a state was saved by an input of this identity."""
    saved = state.get("input")
    if not isinstance(saved, dict) or not isinstance(state.get("step"), int):
        raise UserError(
            f"{state!r:.80} is not the position of an input; restore a checkpoint of this run."
        )
    if changed := changes(saved, identity):
        raise UserError(
            f"The input has changed since it was saved: {changed}; restore the former value, pass "
            '--accept_changes=data (in Python, accept_changes=["data"]) to go on with this one, or '
            "start a new run."
        )


def changes(saved: State, identity: State) -> str:
    """Returns the differences of an input's identity from a saved one; "" if there are none."""
    return ", ".join(
        f"{name} was {saved.get(name)} and is {identity.get(name)}"
        for name in identity | saved
        if identity.get(name) != saved.get(name)
    )
