"""Language-model input from prepared tokens: a batch is a pure function of (seed, step).

Rows are numbered on and on: row i of the run is row `i % R` of epoch `i // R`, and step n has rows
[n * B, (n + 1) * B). So the place to save is one integer, the number of hosts may change between
two steps, and any batch of any step can be looked at.

Letters: B rows of a batch, S sequence length, R rows of an epoch.
"""

import enum
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from moelib.core.config import REQUIRED, config_class
from moelib.data.fill import fill_pieces
from moelib.data.input import (
    BatchIterator,
    Input,
    State,
    check_state,
    empty_batch,
    rows_of_host,
)
from moelib.data.mixture import Mixture
from moelib.data.packing import (
    DocumentBoundary,
    EpochPlan,
    LongDocuments,
    Packing,
    check_long_documents,
    make_plan,
)
from moelib.data.token_source import TokenSource
from moelib.data.tokenizer import Tokenizer

if TYPE_CHECKING:
    from moelib.core.tree import Batch

_Ints = npt.NDArray[np.int64]


class InputMode(enum.Enum):
    """What the rows are for."""

    TRAIN = "train"  # Epoch after epoch, without end (but for `max_batches`).
    EVALUATE = "evaluate"  # One epoch; the last batch is filled up with empty rows.


class LMInput(Input):
    """Packed rows of a token source, or of a mixture of several."""

    @config_class
    class Config(Input.Config):
        source: TokenSource.Config | Mixture.Config = REQUIRED
        packing: Packing = Packing.CONCAT_AND_SPLIT
        document_boundary: DocumentBoundary = DocumentBoundary.RESET
        long_documents: LongDocuments = LongDocuments.SPLIT
        mode: InputMode = InputMode.TRAIN
        seed: int = 0  # Decides the order of documents and rows.
        vocab_size: int | None = None  # The model's: a source with a larger one is refused.
        max_batches: int | None = None  # Ends after so many; None ends as `mode` says.

    def __init__(self, cfg: Config) -> None:
        """Opens the sources; rows are planned when the first is read.

        Raises:
            ValueError: If a source is broken, its vocabulary too large, or a document too long.
        """
        super().__init__(cfg)
        cfg = self.config
        source: Any = cfg.source.instantiate()
        self._mixture = source if isinstance(source, Mixture) else None
        sources: list[TokenSource] = [source] if self._mixture is None else self._mixture.sources
        self._packed = [_PackedRows(source, cfg) for source in sources]
        self.eos_id: int = sources[0].eos_id
        self.vocab_size: int = max(source.vocab_size for source in sources)
        if cfg.vocab_size is not None and self.vocab_size > cfg.vocab_size:
            raise ValueError(
                f"{sources[0].name} has token ids up to {self.vocab_size - 1}, beyond the "
                f"vocabulary of {cfg.vocab_size}; set vocab_size to {self.vocab_size} or more in "
                "the model, or prepare the text with a smaller tokenizer."
            )
        if cfg.mode is InputMode.EVALUATE and len(sources) > 1:
            raise ValueError(
                "mode is EVALUATE and source is a mixture, whose rows have no last one; set source "
                "to one source, and make an input of each."
            )

    @classmethod
    def load_tokenizer(cls, cfg: Any) -> Tokenizer:
        """Returns the tokenizer that made the source's tokens."""
        return cfg.source.klass.load_tokenizer(cfg.source)

    @property
    def sources(self) -> Sequence[TokenSource]:
        """The token sources, opened."""
        return [packed.source for packed in self._packed]

    @property
    def rows_per_epoch(self) -> int:
        """Rows R of an epoch; of a mixture, rows until every source has been read at least once."""
        if self._mixture is None:
            return self._packed[0].num_rows
        period, counts = len(self._mixture.pattern), self._mixture.counts
        return max(
            -(-packed.num_rows * period // int(count))
            for packed, count in zip(self._packed, counts, strict=True)
        )

    @property
    def num_batches(self) -> int:
        """Batches that the iterator has, or an epoch if it is endless; the last may be padded."""
        cfg = self.config
        if cfg.max_batches is not None and cfg.mode is InputMode.TRAIN:
            return cfg.max_batches
        batches = -(-self.rows_per_epoch // cfg.global_batch_size)
        return batches if cfg.max_batches is None else min(batches, cfg.max_batches)

    @property
    def is_endless(self) -> bool:
        """Whether the iterator never ends."""
        return self.config.mode is InputMode.TRAIN and self.config.max_batches is None

    def batch(self, step: int) -> "Batch":
        """Returns the global batch of a step, counted from 0."""
        return self.host_batch(step, 0, 1)

    def host_batch(self, step: int, host_index: int, num_hosts: int) -> "Batch":
        """Returns a host's rows of a step's batch: all hosts' rows make up `batch(step)`.

        Raises:
            ValueError: If the hosts do not divide the batch, or a token id is beyond the
                vocabulary.
        """
        cfg = self.config
        first = step * cfg.global_batch_size
        of_host = rows_of_host(cfg.global_batch_size, host_index, num_hosts)
        rows = np.arange(first + of_host.start, first + of_host.stop)
        batch = empty_batch(len(rows), cfg.seq_len, self.eos_id)
        if cfg.mode is InputMode.EVALUATE:
            rows = rows[rows < self.rows_per_epoch]
        if self._mixture is None:
            self._packed[0].fill(rows, np.arange(len(rows)), batch)
            return batch
        source, numbers = self._mixture.rows(rows)
        for k, packed in enumerate(self._packed):
            places = np.flatnonzero(source == k)
            packed.fill(numbers[places], places, batch)
        return batch

    def iterator(self, host_index: int = 0, num_hosts: int = 1) -> "LMInputIterator":
        """Returns a host's batches from step 0; they end unless the input is endless."""
        rows_of_host(self.config.global_batch_size, host_index, num_hosts)
        return LMInputIterator(self, host_index, num_hosts)

    @functools.cached_property
    def identity(self) -> State:
        """What decides the batches, as JSON values; one that differs means other batches."""
        cfg = self.config
        names = self._mixture.names if self._mixture else ["source"]
        identity = {
            "seq_len": cfg.seq_len,
            "global_batch_size": cfg.global_batch_size,
            "packing": cfg.packing.value,
            "document_boundary": cfg.document_boundary.value,
            "seed": cfg.seed,
            "mode": cfg.mode.value,
            "source": {n: s.fingerprint for n, s in zip(names, self.sources, strict=True)},
        }
        if self._mixture:
            identity["weights"] = dict(zip(names, self._mixture.counts.tolist(), strict=True))
        return identity


class LMInputIterator(BatchIterator):
    """The batches of one host. The state is the step, and what the input is."""

    def __init__(self, lm_input: LMInput, host_index: int, num_hosts: int) -> None:
        self._input, self._host = lm_input, (host_index, num_hosts)
        self.step = 0  # The next one.

    def __next__(self) -> "Batch":
        """Returns this host's rows of the next step."""
        lm_input = self._input
        if not lm_input.is_endless and self.step >= lm_input.num_batches:
            raise StopIteration
        batch = lm_input.host_batch(self.step, *self._host)
        self.step += 1
        return batch

    def state(self) -> State:
        """Returns the next step, and the input's identity; the same on every host."""
        return {"step": self.step, "input": self._input.identity}

    def restore(self, state: State) -> None:
        """Goes to a saved step, whatever the number of hosts was then.

        Raises:
            ValueError: If the saved input had other batches.
        """
        check_state(state, self._input.identity)
        self.step = state["step"]


class _PackedRows:
    """The rows of one token source, epoch after epoch."""

    def __init__(self, source: TokenSource, cfg: LMInput.Config) -> None:
        self.source = source
        self._cfg = cfg
        if cfg.long_documents is LongDocuments.ERROR:
            check_long_documents(source, cfg.seq_len)
        self._plan = functools.lru_cache(maxsize=2)(self._make_plan)

    def _make_plan(self, epoch: int) -> EpochPlan:
        cfg = self._cfg
        seeds = (cfg.seed, epoch)
        return make_plan(self.source, cfg.seq_len, cfg.packing, cfg.document_boundary, seeds)

    @functools.cached_property
    def num_rows(self) -> int:
        """Rows of an epoch: the same for all."""
        return self._plan(0).num_rows

    def fill(self, rows: _Ints, places: _Ints, batch: "Batch") -> None:
        """Writes rows, numbered over all epochs, to places in a batch."""
        if not len(rows):
            return
        epochs, in_epoch = np.divmod(rows, self.num_rows)
        for epoch in range(int(epochs[0]), int(epochs[-1]) + 1):  # Rows ascend: one, seldom two.
            mine = epochs == epoch
            if mine.any():
                pieces = self._plan(epoch).pieces(in_epoch[mine])
                boundary = self._cfg.document_boundary
                fill_pieces(batch, places[mine], pieces, self.source, boundary)
