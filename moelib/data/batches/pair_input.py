"""Batches of pairs of answers, each pair a sequence: the preferred answer, then the other one.

Pairs are a folder with a tokenizer and `pairs.npz`, whose arrays are

    ids                    int32 [T]      tokens of all conversations, one after the other
    is_label               bool [T]       tokens of answers
    lengths                int64 [N, 2]   tokens of the preferred conversation and of the other one
    reference_log_probs    float32 [N, 2] sums over the labels of each, under the reference model

Letters: N pairs, B sequences of a batch, S sequence length.
"""

import hashlib
import os
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from moelib.core.config import REQUIRED, config_class
from moelib.core.errors import MissingFileError, UserError
from moelib.data.batches.input import (
    PADDING_LABEL,
    Input,
    State,
    StepBatches,
    batch_spec,
    check_rows,
    empty_batch,
)
from moelib.data.hashing import random_permutation
from moelib.data.tokens.chat.pairs import Pair
from moelib.data.tokens.tokenizer import Tokenizer, saved_tokenizer
from moelib.runtime import storage

if TYPE_CHECKING:
    from moelib.core.tree import Batch

PAIRS = "pairs.npz"
_REFERENCE = "reference_log_probs"

Arrays = Mapping[str, npt.NDArray[Any]]


def arrays_of(pairs: Iterable[Pair]) -> dict[str, npt.NDArray[Any]]:
    """Returns the arrays of pairs, with a reference of zeros."""
    sides = [side for pair in pairs for side in pair]
    empty: list[Any] = [np.zeros(0, np.int32)]
    lengths = np.array([len(side.ids) for side in sides], np.int64).reshape(-1, 2)
    return {
        "ids": np.concatenate(empty + [np.asarray(side.ids, np.int32) for side in sides]),
        "is_label": np.concatenate([np.zeros(0, bool), *(side.is_label for side in sides)]),
        "lengths": lengths,
        _REFERENCE: np.zeros(lengths.shape, np.float32),
    }


def write_pairs(folder: str, arrays: dict[str, Any]) -> None:
    """Writes pairs.npz into a folder."""
    with storage.atomic_file(os.path.join(folder, PAIRS), binary=True) as file:
        np.savez(file, **arrays)


def read_pairs(folder: str) -> dict[str, npt.NDArray[Any]]:
    """Returns the arrays of pairs.npz. Raises UserError if it is missing or damaged."""
    path = os.path.join(folder, PAIRS)
    try:
        with storage.open_to_read(path, "rb") as file, np.load(file, allow_pickle=False) as found:
            arrays = {name: found[name] for name in ("ids", "is_label", "lengths", _REFERENCE)}
    except FileNotFoundError:
        raise MissingFileError(f"There is no {path}; prepare pairs with --objective=dpo.") from None
    except Exception as error:  # NumPy's reader raises errors of many classes.
        raise UserError(f"{path} is damaged ({error!s:.200}); delete the folder.") from None
    num_tokens = int(arrays["lengths"].sum())
    shapes = {"ids": (num_tokens,), "is_label": (num_tokens,), _REFERENCE: arrays["lengths"].shape}
    for name, shape in shapes.items():
        if arrays[name].shape != shape:
            raise UserError(
                f"{path} is damaged: {name} has shape {arrays[name].shape}, not {shape}; delete "
                "the folder."
            )
    return arrays


def rows_of(arrays: Arrays, indices: Iterable[int], seq_len: int, eos_id: int) -> "Batch":
    """Returns the batch of some pairs."""
    indices = list(indices)
    batch = empty_batch(len(indices), seq_len, eos_id)
    del batch["target_num_bytes"]
    ends = np.cumsum(arrays["lengths"].ravel())
    for row, index in enumerate(indices):
        begin = 0
        for side, length in enumerate(arrays["lengths"][index].tolist()):
            last = int(ends[2 * index + side])
            ids, inside = arrays["ids"][last - length : last], slice(begin, begin + length)
            labels = np.where(arrays["is_label"][last - length : last], ids, PADDING_LABEL)
            batch["input_ids"][row, inside] = ids
            batch["target_labels"][row, begin : begin + length - 1] = labels[1:]
            batch["segment_ids"][row, inside] = side + 1
            batch["positions"][row, inside] = np.arange(length)
            begin += length
    return batch | {_REFERENCE: arrays[_REFERENCE][indices]}


class PairInput(Input):
    """Pairs in epochs of random orders, one after the other; a batch may be in two epochs."""

    is_endless = True

    @config_class
    class Config(Input.Config):
        path: str = REQUIRED  # Folder of the pairs.
        seed: int = 0  # Seed of the orders.

        def abstract_batch(self, opened: Callable[[], Input]) -> "Batch":
            """Returns a global batch as `jax.ShapeDtypeStruct`s."""
            import jax

            shapes = batch_spec(self.global_batch_size, self.seq_len)
            del shapes["target_num_bytes"]
            batch = {name: jax.ShapeDtypeStruct(shape, "int32") for name, shape in shapes.items()}
            pair = jax.ShapeDtypeStruct((self.global_batch_size, 2), "float32")
            return batch | {_REFERENCE: pair}

    def __init__(self, cfg: Config) -> None:
        """Reads the pairs. Raises UserError if there are none, or one is longer than `seq_len`."""
        super().__init__(cfg)
        self.arrays = read_pairs(cfg.path)
        longest = self.arrays["lengths"].sum(axis=1).max(initial=0)
        if not longest:
            raise UserError(f"{cfg.path} has no pair; prepare it again.")
        if longest > cfg.seq_len:
            raise UserError(
                f"seq_len={cfg.seq_len}, but a pair of {cfg.path} has {longest} tokens; set "
                f"seq_len to {longest} or more."
            )
        self.eos_id = self.load_tokenizer(cfg).eos_id
        digest = hashlib.sha256()
        for name in sorted(self.arrays):
            digest.update(np.ascontiguousarray(self.arrays[name]).tobytes())
        self._hash = digest.hexdigest()

    @classmethod
    def load_tokenizer(cls, cfg: Any) -> Tokenizer:
        """Returns the tokenizer in the folder."""
        return saved_tokenizer(cfg.path)

    @property
    def identity(self) -> State:
        """The pairs, and the settings that determine the batches."""
        cfg = self.config
        names = ("global_batch_size", "seq_len", "seed")
        return {"pairs": self._hash, **{name: getattr(cfg, name) for name in names}}

    def iterator(self, rows: range | None = None) -> StepBatches:
        """Returns some rows of each batch."""
        return StepBatches(self, check_rows(rows, self.config.global_batch_size))

    def batch(self, step: int, rows: range) -> "Batch":
        """Returns some rows of a batch."""
        cfg, num_pairs = self.config, len(self.arrays["lengths"])
        indices, orders, first = [], {}, self.first_example(step)
        for row in rows:
            epoch, at = divmod(first + row, num_pairs)
            if epoch not in orders:
                orders[epoch] = random_permutation(num_pairs, cfg.seed, epoch)
            indices.append(int(orders[epoch][at]))
        return rows_of(self.arrays, indices, cfg.seq_len, self.eos_id)
