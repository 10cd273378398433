"""Language-model input from prepared tokens: a batch is a pure function of (seed, step).

Sequences are numbered without end: sequence i of the run is sequence `i % R` of epoch `i // R`, and
step n has sequences [n * B, (n + 1) * B). So one integer is the whole position in the data, the
number of hosts may change between two steps, and the batch of any step can be inspected.

Letters: B sequences of a batch, S sequence length, R sequences of an epoch.
"""

import collections
import enum
import functools
import logging
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from moelib.core.config import REQUIRED, config_class
from moelib.core.errors import UserError
from moelib.data.batches.fill import fill_pieces
from moelib.data.batches.input import Input, State, StepBatches, check_rows, empty_batch
from moelib.data.batches.mixture import Mixture, counts_before
from moelib.data.batches.packing import (
    DocumentBoundary,
    EpochPlan,
    LongDocuments,
    Packing,
    check_long_documents,
    make_plan,
)
from moelib.data.tokens.token_source import TokenSource
from moelib.data.tokens.tokenizer import Tokenizer

if TYPE_CHECKING:
    from moelib.core.tree import Batch

logger = logging.getLogger(__name__)

_Ints = npt.NDArray[np.int64]


class InputMode(enum.Enum):
    """The number of epochs."""

    TRAIN = "train"  # Endless, unless `max_batches` is set.
    EVALUATE = "evaluate"  # One; the last batch is completed with empty sequences.


class LMInput(Input):
    """Packed sequences of a token source, or of a mixture of several."""

    @config_class
    class Config(Input.Config):
        source: TokenSource.Config | Mixture.Config = REQUIRED  # Tokens, or a mixture of sources.
        packing: Packing = Packing.CONCAT_AND_SPLIT  # Distribution of documents over sequences.
        # Segments, positions and targets where one document follows another.
        document_boundary: DocumentBoundary = DocumentBoundary.RESET
        # Treatment of documents that are longer than a sequence.
        long_documents: LongDocuments = LongDocuments.SPLIT
        mode: InputMode = InputMode.TRAIN  # Endless, or one epoch.
        seed: int = 0  # Of the order of documents and sequences.
        vocab_size: int | None = None  # The model's; a source with a larger one is refused.
        max_batches: int | None = None  # Number of batches; None: as many as `mode` gives.

    def __init__(self, cfg: Config) -> None:
        """Opens the sources; an epoch is planned when its first sequence is read.

        Raises UserError if a source is damaged or too short, or does not fit the settings.
        """
        super().__init__(cfg)
        cfg = self.config
        self.is_endless = cfg.mode is InputMode.TRAIN and cfg.max_batches is None
        source: Any = cfg.source.instantiate()
        self._mixture = source if isinstance(source, Mixture) else None
        sources: list[TokenSource] = [source] if self._mixture is None else self._mixture.sources
        self._packed = [_PackedSource(source, cfg) for source in sources]
        # Iterators over checks of a host's data, shared by all evaluations of this input.
        self.checks_left = functools.cache(lambda rows: iter(self.checks(rows)))
        self.eos_id: int = sources[0].eos_id
        self.vocab_size: int = max(source.vocab_size for source in sources)
        if cfg.vocab_size is not None and self.vocab_size > cfg.vocab_size:
            raise UserError(
                f"{sources[0].name} has token ids up to {self.vocab_size - 1}, beyond the "
                f"vocabulary of {cfg.vocab_size}; set the model's vocab_size to {self.vocab_size} "
                "or more, or prepare the text with a smaller tokenizer."
            )
        if cfg.mode is InputMode.EVALUATE and len(sources) > 1:
            raise UserError(
                "mode=EVALUATE: source is a mixture, which has no last sequence; set mode=TRAIN "
                "and max_batches, or source to one source, and define an input for each."
            )
        num_tokens = sum(source.num_tokens for source in sources)
        if cfg.mode is InputMode.TRAIN and cfg.seq_len > num_tokens:
            raise UserError(
                f"seq_len={cfg.seq_len}: {sources[0].name} has {num_tokens} tokens in all, fewer "
                f"than one sequence; set seq_len to {num_tokens} or less, or add data."
            )

    @classmethod
    def load_tokenizer(cls, cfg: Any) -> Tokenizer:
        """Returns the tokenizer that made the source's tokens."""
        return cfg.source.klass.load_tokenizer(cfg.source)

    @property
    def sources(self) -> Sequence[TokenSource]:
        """The token sources, opened."""
        return [packed.source for packed in self._packed]

    def checks(self, rows: range) -> Sequence[Callable[[], None]]:
        """Returns the share of a host with these rows in the checks of the sources."""
        index, num_hosts = rows.start // len(rows), self.config.global_batch_size // len(rows)
        return [check for source in self.sources for check in source.checks()[index::num_hosts]]

    @property
    def sequences_per_epoch(self) -> int:
        """Sequences R of an epoch; of a mixture, those until every source has been read once."""
        if self._mixture is None:
            return self._packed[0].num_sequences
        period, counts = len(self._mixture.pattern), self._mixture.counts
        return max(
            -(-packed.num_sequences * period // int(count))
            for packed, count in zip(self._packed, counts, strict=True)
        )

    @property
    def num_batches(self) -> int:
        """Batches of the iterator, or of an epoch if it is endless; the last may be padded."""
        cfg = self.config
        if cfg.max_batches is not None and cfg.mode is InputMode.TRAIN:
            return cfg.max_batches
        batches = -(-self.sequences_per_epoch // cfg.global_batch_size)
        return batches if cfg.max_batches is None else min(batches, cfg.max_batches)

    def batch(self, step: int, rows: range | None = None) -> "Batch":
        """Returns some rows of the global batch of a step, counted from 0; by default all.

        Steps are those of the run, after `begin`. Raises UserError if a token id is beyond the
        vocabulary.
        """
        cfg = self.config
        numbers = self._numbers(step, rows)
        batch = empty_batch(len(numbers), cfg.seq_len, self.eos_id)
        if cfg.mode is InputMode.EVALUATE:
            numbers = numbers[numbers < self.sequences_per_epoch]
        if self._mixture is None:
            source = np.zeros(len(numbers), np.int64)
        else:
            source, numbers = self._mixture.locate(numbers)
        taken = [self.begin.taken.get(order, 0) for order in _orders(self.identity).values()]
        for k, packed in enumerate(self._packed):
            of_source = np.flatnonzero(source == k)
            packed.fill(numbers[of_source] + taken[k], of_source, batch)
        return batch

    def _numbers(self, step: int, rows: range | None) -> _Ints:
        """Returns the numbers of some sequences of a step, from that of `begin` on."""
        batch_size = self.config.global_batch_size
        return (step - self.begin.step) * batch_size + np.array(
            range(batch_size) if rows is None else rows
        )

    def examples_taken(self, identity: State, num_steps: int) -> dict[str, int]:
        """Returns the number of sequences of each source that some steps read, by their order."""
        taken: dict[str, int] = collections.Counter()
        if isinstance(identity.get("source"), dict):
            weights = np.array([*identity.get("weights", {None: 1}).values()])
            counts = counts_before(num_steps * identity["global_batch_size"], weights)
            for order, count in zip(_orders(identity).values(), counts, strict=True):
                taken[order] += int(count)
        return taken

    @property
    def source_names(self) -> Sequence[str]:  # pyrefly: ignore[bad-override]
        """The names of a mixture's sources, in the order of `source_ids`; () of one source."""
        return () if self._mixture is None else self._mixture.names

    def source_ids(self, position: int, rows: range | None = None) -> _Ints:
        """Returns the source of each of some sequences of a step [rows]."""
        assert self._mixture is not None
        return self._mixture.locate(self._numbers(position, rows))[0]

    def iterator(self, rows: range | None = None) -> "LMInputIterator":
        """Returns a host's batches from step 0; they end unless the input is endless."""
        return LMInputIterator(self, check_rows(rows, self.config.global_batch_size))

    @functools.cached_property
    def identity(self) -> State:
        """The settings and data that determine the batches, as JSON values."""
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


def _orders(identity: State) -> dict[str, str]:
    """Returns {name of a source: what determines its sequences and their order}."""
    names = ("seq_len", "packing", "document_boundary", "seed")
    order = " ".join(f"{name}={identity[name]}" for name in names)
    return {name: f"{data} {order}" for name, data in identity["source"].items()}


class LMInputIterator(StepBatches):
    """The batches of one host. The state is the step and the input's identity."""

    def __init__(self, lm_input: LMInput, rows: range) -> None:
        super().__init__(lm_input, rows)
        # Called once, in as many steps as an epoch has; each at its step, so that runs that are
        # resumed often reach all of them too.
        self._checks = lm_input.checks(rows)
        self._checks_per_step = -(-len(self._checks) // max(lm_input.num_batches, 1))
        self._num_checked = 0

    def __next__(self) -> "Batch":
        """Returns this host's sequences of the next step.

        Also checks some data of the sources. Raises UserError at damage.
        """
        lm_input = self.source
        if lm_input.config.mode is InputMode.EVALUATE:
            next(lm_input.checks_left(self._rows), lambda: None)()
        elif self._num_checked < len(self._checks):
            begin = self.step * self._checks_per_step
            for number in range(begin, begin + self._checks_per_step):
                self._checks[number % len(self._checks)]()
            self._num_checked += self._checks_per_step
        if not lm_input.is_endless and self.step - lm_input.begin.step >= lm_input.num_batches:
            raise StopIteration
        batch = lm_input.batch(self.step, self._rows)
        self.step += 1
        return batch


def _check_undivided(source: TokenSource, cfg: LMInput.Config) -> None:
    """Raises UserError if conversations may be divided, or see each other."""
    if cfg.document_boundary is DocumentBoundary.CONTINUE:
        raise UserError(
            f"document_boundary=CONTINUE: the conversations of {source.name} would see each other; "
            "set it to RESET."
        )
    if cfg.packing is not Packing.BEST_FIT:
        raise UserError(
            f"packing={cfg.packing.name}: the conversations of {source.name} would be divided; set "
            "it to BEST_FIT."
        )
    if (num_long := int(np.sum(source.lengths > cfg.seq_len + 1))) and (
        cfg.long_documents is LongDocuments.SPLIT
    ):
        logger.warning(
            "%d of %d conversations of %s are longer than seq_len=%d, and divided; prepare them "
            "with --seq_len=%d, or set long_documents to ERROR.",
            *(num_long, source.num_documents, source.name, cfg.seq_len, cfg.seq_len),
        )


class _PackedSource:
    """The sequences of one token source, epoch after epoch."""

    def __init__(self, source: TokenSource, cfg: LMInput.Config) -> None:
        self.source = source
        self._cfg = cfg
        if source.label_bounds is not None:
            _check_undivided(source, cfg)
        if cfg.long_documents is LongDocuments.ERROR:
            check_long_documents(source, cfg.seq_len)
        self._plan = functools.lru_cache(maxsize=2)(self._make_plan)
        self._ahead: tuple[int, threading.Thread] | None = None  # The epoch being planned.

    def _make_plan(self, epoch: int) -> EpochPlan:
        cfg = self._cfg
        seeds = (cfg.seed, epoch)
        return make_plan(self.source, cfg.seq_len, cfg.packing, cfg.document_boundary, seeds)

    def _plan_ahead(self, epoch: int) -> None:
        """Plans an epoch in a thread: planning takes seconds for many documents."""
        if self._cfg.mode is InputMode.TRAIN and (not self._ahead or self._ahead[0] != epoch):
            thread = threading.Thread(target=self._plan, args=(epoch,), name="plan", daemon=True)
            self._ahead = (epoch, thread)
            thread.start()

    @functools.cached_property
    def num_sequences(self) -> int:
        """Sequences of an epoch: the same for all."""
        return self._plan(0).num_rows

    def fill(self, numbers: _Ints, rows: _Ints, batch: "Batch") -> None:
        """Writes sequences, numbered over all epochs in ascending order, to rows of a batch."""
        if not len(numbers):
            return
        epochs, in_epoch = np.divmod(numbers, self.num_sequences)
        for epoch in range(int(epochs[0]), int(epochs[-1]) + 1):  # One, rarely two.
            mine = epochs == epoch
            if not mine.any():
                continue
            if self._ahead and self._ahead[0] == epoch:
                self._ahead[1].join()
            pieces = self._plan(epoch).pieces(in_epoch[mine])
            fill_pieces(batch, rows[mine], pieces, self.source, self._cfg.document_boundary)
            if 2 * in_epoch[mine][-1] >= self.num_sequences:
                self._plan_ahead(epoch + 1)
