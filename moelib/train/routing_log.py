"""The routing log: the experts of all tokens of fixed batches, written while a model trains.

A program of its own runs the forward pass of an evaluation up to the last router. The training step
is the same with and without it.
"""

import itertools
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from moelib.checkpoint.policy import evenly_spaced_policy
from moelib.core import precision
from moelib.core.config import InstantiableConfig, config_class, config_for_function, did_you_mean
from moelib.core.config_types import PositiveInt
from moelib.core.errors import MissingFileError, UserError, first_line
from moelib.core.module import functional
from moelib.core.tree import Nested
from moelib.data.batches.prefetch import row_sharding
from moelib.layers.base import BaseLayer
from moelib.layers.moe.layer import MoELayer
from moelib.layers.moe.recording import RECORDING, RecordedRouting
from moelib.models.multi_token_prediction import MULTI_TOKEN
from moelib.parallel.channels import own_channels
from moelib.parallel.sharding import current_rules
from moelib.runs.identity import config_hash
from moelib.runs.routing_file import (
    LayerSizes,
    RoutingHeader,
    RoutingLog,
    clear_log,
    log_folder,
    write_header,
    write_part,
)
from moelib.runtime.processes import agreed, gather_json, on_process_0
from moelib.train.evaler import EvaluationData
from moelib.train.settings import completed, fill
from moelib.train.watcher import Watcher

logger = logging.getLogger(__name__)


class RoutingLogError(UserError):
    """A routing log that could not be written."""


class RoutingEvaler(Watcher):
    """Writes the routing of the first batches of an evaler's data, at steps that a policy selects.

    A log is a folder of `moelib.runs.routing_file`. MoE layers of multi-token prediction are not in
    it, since they route later tokens than those at their positions.
    """

    watches_experts = True

    @config_class
    class Config(Watcher.Config):
        # Name in `evalers` of the evaler whose input is read; logs are in routing/<name>/.
        evaler: str = "validation"
        max_batches: PositiveInt | None = 1  # Number of batches, from the first; None for all.
        # Builds a moelib.checkpoint.policy.Policy, whose max_step is by default the trainer's.
        eval_policy: InstantiableConfig = config_for_function(evenly_spaced_policy).set(num=10)

        def complete(self, trainer: Any) -> None:
            """Sets the last step of the policy."""
            fill(self.eval_policy, None, max_step=trainer.max_step)

    def prepare(self, trainer: Any) -> None:
        """See `use`."""
        self.use(trainer.model, completed(trainer.config), config_hash(trainer.config))

    def use(self, model: Any, trainer_config: Any, digest: str) -> None:
        """Sets the model and its run; the input is opened by `started` or the first log.

        Args:
            model: The model.
            trainer_config: Config of the trainer, completed.
            digest: `config_hash` of the run's config.

        Raises:
            UserError: If the model has no MoE layer, or the trainer no such evaler.
        """
        cfg = self.config
        is_layer = isinstance(model, BaseLayer)
        if not is_layer or not any(isinstance(x, MoELayer) for x, _ in model.walk()):
            raise UserError(
                f"{self.path}: the model, {type(model).__qualname__}, has no MoELayer, and so no "
                "routing; remove this watcher."
            )
        if cfg.evaler not in trainer_config.evalers:
            raise UserError(
                f"{self.path}.evaler={cfg.evaler!r}: evalers has none of this name; "
                + did_you_mean(cfg.evaler, trainer_config.evalers)
            )
        self._policy = cfg.eval_policy.instantiate()
        self.model, self._trainer, self._digest = model, trainer_config, digest
        self._input_config = trainer_config.evalers[cfg.evaler].input
        self._data = EvaluationData(f"evalers.{cfg.evaler}.input", self._input_config)
        self._sizes: dict[str, LayerSizes] = {}  # By layer; known once the program is traced.
        self._compiled: Callable[..., Any] | None = None

    @property
    def folder(self) -> str:
        """The folder of the logs of all steps."""
        return os.path.dirname(self._folder(0))

    def _folder(self, step: int) -> str:
        return log_folder(self._trainer.dir, self.config.evaler, step)

    def started(self) -> None:
        """Opens the input, and makes up for a log that the stopped run had no time for."""
        _ = self._data.input
        if self.run.start.restored is not None:
            self._log(self.run.step, unless_complete=True)

    def between_steps(self, step: int) -> None:
        """Writes the log if it is due."""
        self._log(step)

    def rows(self) -> Sequence[tuple[str, str]]:
        """Returns the row with the folder of the logs."""
        return [("routing logs", self.folder)]

    def _log(self, step: int, *, unless_complete: bool = False) -> None:
        """Writes the log if it is due; a failure is logged, and training continues."""
        run = self.run
        if not self.should_log(step=step, unless_complete=unless_complete):
            return
        run.wait()
        with run.spent_on("evaluation"):
            try:
                self.write(run.eval_params(), run.mesh, step=step, on_batch=run.on_batch)
            except RoutingLogError as error:
                logger.error("NO ROUTING LOG of step %d: %s", step, error)
                run.note("no_routing_log", step=step, error=first_line(error))

    def should_log(self, *, step: int, unless_complete: bool = False) -> bool:
        """Returns whether the policy selects this step, and its log is missing if that matters."""
        due = self._policy(step=step, summaries={})
        is_missing = lambda: not is_complete(self._folder(step))
        return due and (not unless_complete or on_process_0(is_missing))

    def write(
        self,
        params: Nested,
        mesh: jax.sharding.Mesh,
        *,
        step: int,
        run_mesh: Mapping[str, int] | None = None,
        on_batch: Callable[[int], None] | None = None,
    ) -> str:
        """Writes the log of a step, and returns its folder; all processes must call it.

        Must be called inside `jax.set_mesh(mesh)`. An earlier log of the step is replaced.

        Args:
            params: Parameters of the model.
            mesh: The mesh that they are sharded over.
            step: Step of the parameters.
            run_mesh: Sizes of the mesh axes in training; None for those of `mesh`.
            on_batch: Function called after each batch with the number of the batch, from 0.

        Raises:
            RoutingLogError: On all processes, if one cannot write.
            UserError: If a batch has no `input_ids`, or no layer outputs its routing.
        """
        folder, process, num_batches = self._folder(step), jax.process_index(), 0
        written: dict[str, int] = {}
        failed: OSError | None = None  # Raised when all processes are there.
        # No process writes before the earlier log is gone.
        _agreed(folder, lambda: clear_log(folder) if process == 0 else None)
        for number, arrays in enumerate(self._batches(params, mesh)):
            try:
                written |= write_part(folder, number, process, arrays)
            except OSError as error:
                failed = failed or error
            num_batches = number + 1
            if on_batch is not None:
                on_batch(number)

        def files() -> dict[str, int]:
            if failed is not None:
                raise failed
            return written

        of_processes = gather_json(_agreed(folder, files))
        cfg, sizes = self._input_config, run_mesh or dict(mesh.shape)
        dtype = precision.activation_dtype(self._trainer)
        header = RoutingHeader(
            step=step,
            data=self.config.evaler,
            layers=self._sizes,
            vocab_size=self._vocab_size,
            seq_len=cfg.seq_len,
            batch_size=cfg.global_batch_size,
            num_batches=num_batches,
            itemsize=jnp.dtype(dtype).itemsize,
            config_hash=self._digest,
            input=self._data.input.identity,
            mesh={axis: sizes[axis] for axis in current_rules()["batch"] if axis in sizes},
            files={name: size for sizes in of_processes for name, size in sizes.items()},
        )
        _agreed(folder, lambda: write_header(folder, header) if process == 0 else None)
        return folder

    @property
    def _vocab_size(self) -> int:
        return dict(self.model.config.items()).get("vocab_size") or 1 << 31

    def _batches(self, params: Nested, mesh: jax.sharding.Mesh) -> Iterator[dict[str, np.ndarray]]:
        """Yields this process's sequences of each batch, read while the next batch runs."""
        before, number, max_batches = None, 0, self.config.max_batches
        with self._data.batches(mesh, num_prefetched=0 if max_batches == 1 else 2) as feed:
            for number, batch in enumerate(itertools.islice(feed, max_batches)):
                if self._compiled is None:
                    rows = row_sharding(self._data.share(mesh)[0], 1)
                    jitted = jax.jit(self._step, out_shardings=rows)
                    self._compiled = own_channels(jitted.lower(params, batch), mesh).compile()
                after = self._compiled(params, batch)
                if before is not None:
                    yield self._own_rows(before, number - 1)
                before = after
        if before is None:
            raise UserError(f"evalers.{self.config.evaler}.input has no batch; set another one.")
        yield self._own_rows(before, number)

    def _step(self, params: Nested, batch: Any) -> dict[str, Any]:
        """Returns the tokens of a batch and the routing of all layers, by the names of arrays."""
        if "input_ids" not in batch:
            raise UserError(
                f"{self.path}: batches of evalers.{self.config.evaler} have no input_ids, only "
                f"{', '.join(batch)}; remove this watcher."
            )
        specs = self.model.create_parameter_specs_recursively()
        params = precision.cast_parameters(params, specs, self._trainer.train_dtype)
        _, outputs = functional(
            self.model, None, params, (batch,), is_training=False, inherited={RECORDING: True}
        )
        layers = dict(_by_layer(self.model, outputs.module_outputs))
        if not layers:
            raise UserError(
                f"{self.path}: no MoE layer outputs its routing; call MoELayer.forward in your own "
                "layer, or remove this watcher."
            )
        masks, arrays = [], {"input_ids": batch["input_ids"]}
        for name in sorted(layers, key=_natural):
            self._sizes[name], found = layers[name]
            masks.append(found.mask)
            arrays |= {f"{name}/{x}": getattr(found, x) for x in ("expert_ids", "weights")}
            arrays[f"{name}/entropy"] = found.entropy
        return arrays | {"mask": masks[0]}

    def _own_rows(self, arrays: Mapping[str, jax.Array], batch: int) -> dict[str, np.ndarray]:
        """Returns the sequences that this process writes: the first replicas, on its devices."""
        rows = self._input_config.global_batch_size

        def own(array: jax.Array) -> list[jax.Shard]:
            shards = [shard for shard in array.addressable_shards if shard.replica_id == 0]
            return sorted(shards, key=lambda shard: shard.index[0].indices(rows)[0])

        spans = [shard.index[0].indices(rows)[:2] for shard in own(arrays["mask"])]
        numbers = [np.arange(*span, dtype=np.int64) for span in spans]
        empty = np.zeros(0, np.int64)
        found = {"sequence": np.concatenate([empty, *numbers]) + batch * rows}
        for name in sorted(arrays, key=_natural):  # Compiled programs sort them as text.
            parts = [np.asarray(shard.data) for shard in own(arrays[name])]
            shape, dtype = (0, *arrays[name].shape[1:]), arrays[name].dtype
            found[name] = np.concatenate(parts) if parts else np.zeros(shape, dtype)
        token_ids = np.min_scalar_type(self._vocab_size - 1)
        return found | {"input_ids": found["input_ids"].astype(token_ids)}


def _agreed[T](folder: str, write: Callable[[], T]) -> T:
    """Returns the result of `write`. Raises RoutingLogError on all processes if one cannot."""
    try:
        return agreed(write, [OSError])
    except OSError as error:
        raise RoutingLogError(
            f"{folder}: the routing log cannot be written: {error}; free space, and write it from "
            "the checkpoint by `moelib analyze routing`."
        ) from error


def _natural(name: str) -> list[Any]:
    """Returns the key that sorts "layer2" before "layer10"."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def _by_layer(
    module: Any, outputs: Nested, path: Sequence[str] = ()
) -> Iterator[tuple[str, tuple[LayerSizes, RecordedRouting]]]:
    """Yields (name, (sizes, routing)) of each layer, copies in a scan as those of a `LoopStack`."""
    for name, value in outputs.items():
        if isinstance(value, RecordedRouting):
            cfg, top_k = module.config, value.expert_ids.shape[-1]
            yield "/".join(path), (LayerSizes(cfg.num_experts, top_k, cfg.input_dim), value)
        child = module.children.get(name.partition("#")[0])
        if child is None or name == MULTI_TOKEN or not isinstance(value, dict):
            continue
        copies = module.copies(name) if isinstance(module, BaseLayer) else None
        if copies is None:
            yield from _by_layer(child, value, (*path, name))
        for i, copy in enumerate(copies or ()):
            yield from _by_layer(child, jax.tree.map(lambda x, i=i: x[i], value), (*path, copy))


def is_complete(folder: str, num_batches: int | None = None) -> bool:
    """Returns whether there is a complete log in a folder, of so many batches if that matters."""
    try:
        header = RoutingLog(folder).header
    except UserError as error:
        if not isinstance(error, MissingFileError):
            logger.warning("%s", error)
        return False
    return num_batches in (None, header.num_batches)
