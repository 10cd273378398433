"""Routing logs: the experts of all tokens of fixed batches, at one step of a run.

The log of a step is a folder, `<run>/routing/<data>/step_<N>`. Each process writes a file
`batch_<i>.process_<p>.npz` for each batch, with the arrays of the sequences that it holds:

    sequence            int64 [B]          number of a sequence in the data, from 0
    input_ids           uint [B, S]        token ids
    mask                bool [B, S]        False for padding
    LAYER/expert_ids    uint [B, S, K]     experts of a token, best first; E for no expert
    LAYER/weights       float16 [B, S, K]  combine weights
    LAYER/entropy       float16 [B, S]     entropy of the router's probabilities, nats

Unsigned integers have the smallest size. `header.json` is written last, with the size of each file:
a log without it is incomplete. The files have a checksum of each array.

Letters: B sequences, S sequence length, K experts per token, E experts.
"""

import dataclasses
import io
import os
import re
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from moelib.core.config_types import did_you_mean
from moelib.core.errors import MissingFileError, UserError
from moelib.runtime import storage
from moelib.runtime.storage import read_json, write_json

FOLDER = "routing"  # Below the folder of a run.
FORMAT_VERSION = 1
_HEADER = "header.json"
_CURE = "remove the folder {}, and run `moelib analyze routing`, which logs its checkpoint, if any."
AXES: dict[str, Sequence[str]] = {
    "sequence": ("sequence",),
    "input_ids": ("sequence", "position"),
    "mask": ("sequence", "position"),
    "expert_ids": ("sequence", "position", "choice"),
    "weights": ("sequence", "position", "choice"),
    "entropy": ("sequence", "position"),
}


class DamagedLogError(UserError):
    """A routing log that is incomplete, or whose files are not those that were written."""


class LayerSizes(NamedTuple):
    """The sizes of an MoE layer."""

    num_experts: int  # E.
    num_experts_per_token: int  # K.
    input_dim: int  # Width D of a token.


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoutingHeader:
    """The content of `header.json`."""

    step: int  # Step of the parameters.
    data: str  # Name of the data, that of an evaler.
    layers: dict[str, "LayerSizes"]  # Of each MoE layer, in order.
    vocab_size: int  # Number of token ids.
    seq_len: int  # S.
    batch_size: int  # Sequences of a global batch.
    num_batches: int  # Batches, from the first of the data.
    itemsize: int  # Bytes of a number of an activation.
    config_hash: str  # Digest of the settings that determine the numbers of the run.
    input: dict[str, Any]  # Identity of the data.
    mesh: dict[str, int]  # Sizes of the run's mesh axes that split a batch, outermost first.
    files: dict[str, int]  # Number of bytes of each file.
    axes: dict[str, Sequence[str]] = dataclasses.field(default_factory=lambda: AXES)
    format_version: int = FORMAT_VERSION


def log_folder(run: str, data: str, step: int) -> str:
    """Returns the folder of the log of a step."""
    return os.path.join(run, FOLDER, data, f"step_{step:08d}")


# -- Writing -------------------------------------------------------------------------------------


def clear_log(folder: str) -> None:
    """Creates the folder of a log, or empties it; the header is removed first. Raises OSError."""
    storage.make_folder(folder)
    storage.remove(os.path.join(folder, _HEADER))
    if storage.exists(folder):
        for name in storage.list_names(folder):
            storage.remove(os.path.join(folder, name))


def write_part(
    folder: str, batch: int, process: int, arrays: Mapping[str, np.ndarray]
) -> dict[str, int]:
    """Writes a process's sequences of a batch; returns {name of the file: number of bytes}."""
    name = f"batch_{batch:05d}.process_{process:04d}.npz"
    path, content = os.path.join(folder, name), io.BytesIO()
    np.savez(content, allow_pickle=False, **arrays)
    storage.write_bytes(path, content.getvalue())
    return {name: content.tell()}


def write_header(folder: str, header: RoutingHeader) -> None:
    """Writes the header, which completes a log."""
    write_json(os.path.join(folder, _HEADER), dataclasses.asdict(header))


# -- Reading -------------------------------------------------------------------------------------


def list_data(run: str) -> list[str]:
    """Returns the names of the data that a run has logs of."""
    folder = os.path.join(run, FOLDER)
    names = storage.list_names(folder) if storage.exists(folder) else []
    is_folder = lambda name: storage.is_remote(run) or os.path.isdir(os.path.join(folder, name))
    return sorted(name for name in names if is_folder(name))


def list_logs(run: str, data: str) -> dict[int, bool]:
    """Returns {step: whether its log has a header}, by step."""
    folder = os.path.join(run, FOLDER, data)
    names = storage.list_names(folder) if storage.exists(folder) else []
    steps = sorted(int(found[1]) for name in names if (found := re.fullmatch(r"step_(\d+)", name)))
    header = lambda step: os.path.join(log_folder(run, data, step), _HEADER)
    return {step: storage.exists(header(step)) for step in steps}


class RoutingLog:
    """A log that is read array by array."""

    def __init__(self, folder: str) -> None:
        """Reads the header, and checks the sizes of the files.

        Raises:
            DamagedLogError: If the log is incomplete, or its folder is named for another step.
            MissingFileError: If there is no such folder.
            UserError: If a later version of moelib wrote it.
        """
        self.folder = folder
        if not storage.exists(folder):
            raise MissingFileError(f"{folder}: there is no routing log.")
        try:
            values = read_json(os.path.join(folder, _HEADER))
        except UserError as error:
            raise self._damaged(str(error).partition(";")[0]) from error
        if not values:
            raise self._damaged(f"{folder} has no {_HEADER}: the routing log was cut short")
        if (version := values.get("format_version")) != FORMAT_VERSION:
            raise UserError(
                f"{folder}: format_version is {version!r}, and this version of moelib reads "
                f"{FORMAT_VERSION}; {_CURE.format(folder)}"
            )
        try:
            layers = {name: LayerSizes(*sizes) for name, sizes in values["layers"].items()}
            fields: dict[str, Any] = {**values, "layers": layers}
            self.header = RoutingHeader(**fields)
            self._parts: dict[int, list[str]] = {i: [] for i in range(self.header.num_batches)}
            for name in self.header.files:
                found = re.fullmatch(r"batch_(\d+)\.process_\d+\.npz", name)
                self._parts[int(found[1] if found else name)].append(name)
            if empty := [i for i, parts in self._parts.items() if not parts]:
                raise ValueError(f"num_batches={len(self._parts)}, without a file of {empty[0]}")
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise self._damaged(f"{folder}/{_HEADER}: {error}") from error
        step = re.fullmatch(r"step_(\d+)", os.path.basename(os.path.normpath(folder)))
        if step and int(step[1]) != self.header.step:
            raise self._damaged(f"{folder} holds the routing log of step={self.header.step}")
        for name, size in self.header.files.items():
            self._check_size(name, size)

    def _damaged(self, problem: str) -> DamagedLogError:
        return DamagedLogError(f"{problem}; {_CURE.format(self.folder)}")

    def _check_size(self, name: str, size: int) -> None:
        path = os.path.join(self.folder, name)
        found = storage.size(path) if storage.exists(path) else "no"
        if found != size:
            raise self._damaged(
                f"{path} has {found} bytes instead of {size}: the routing log is damaged"
            )

    @property
    def layers(self) -> list[str]:
        """The names of the MoE layers, in their order."""
        return list(self.header.layers)

    def sizes(self, layer: str) -> LayerSizes:
        """Returns the sizes of a layer. Raises UserError if the log has no such layer."""
        if layer not in self.header.layers:
            raise UserError(
                f"{self.folder} has no layer {layer!r}; {did_you_mean(layer, self.layers)}"
            )
        return self.header.layers[layer]

    def tokens(self) -> Iterator[tuple[np.ndarray, ...]]:
        """Returns an iterator over (input_ids [B, S], mask [B, S]) of all batches, in order."""
        return self._batches(["input_ids", "mask"])

    def layer(self, layer: str, *fields: str) -> Iterator[tuple[np.ndarray, ...]]:
        """Yields arrays of a layer for each batch, in the order of the data.

        Args:
            layer: Name of the layer.
            fields: Names in `AXES`; those of tokens may be among them.

        Raises:
            DamagedLogError: If a checksum or a shape is wrong.
            UserError: If the log has no such layer.
        """
        self.sizes(layer)
        of_layer = ("expert_ids", "weights", "entropy")
        yield from self._batches([f"{layer}/{x}" if x in of_layer else x for x in fields])

    def _batches(self, names: Sequence[str]) -> Iterator[tuple[np.ndarray, ...]]:
        header = self.header
        for batch, parts in self._parts.items():
            read = [self._read(part, ["sequence", *names]) for part in parts]
            sequence, *arrays = (np.concatenate(each) for each in zip(*read, strict=True))
            first = batch * header.batch_size
            order = np.argsort(sequence, kind="stable")
            expected = np.arange(first, first + header.batch_size)
            if not np.array_equal(sequence[order], expected):
                raise self._damaged(
                    f"{self.folder}: batch {batch} has {len(sequence)} sequences, not each of "
                    f"{first} to {expected[-1]} once"
                )
            in_order = np.array_equal(sequence, expected)
            yield tuple(arrays) if in_order else tuple(x[order] for x in arrays)

    def _read(self, part: str, names: Sequence[str]) -> list[np.ndarray]:
        """Returns arrays of a file, whose axes are checked."""
        path = os.path.join(self.folder, part)
        try:
            with storage.open_to_read(path, "rb") as file, np.load(file) as arrays:
                found = [arrays[name] for name in names]
        except (zipfile.BadZipFile, KeyError, ValueError, EOFError) as error:
            raise self._damaged(f"{path} is damaged ({error})") from error
        for name, array in zip(names, found, strict=True):
            layer, _, field = name.rpartition("/")
            shape = [len(found[0]), self.header.seq_len]
            if layer:
                shape.append(self.sizes(layer).num_experts_per_token)
            expected = tuple(shape[: len(AXES[field])])
            if array.shape != expected:
                raise self._damaged(
                    f"{path}: {name} has the shape {list(array.shape)} instead of {list(expected)} "
                    f"({', '.join(AXES[field])})"
                )
        return found


def discard_after(run: str, step: int) -> None:
    """Empties a run's logs of later steps, which it reaches again once it resumes from `step`.

    Those that `moelib analyze` wrote of other data, or of a run that writes none, are emptied too:
    after a rewind, a checkpoint of the same step may have other parameters.
    """
    for data in list_data(run):
        for later in list_logs(run, data):
            if later > step:
                clear_log(log_folder(run, data, later))
