"""Routing logs of finished checkpoints, as the run would have written them."""

import dataclasses
import logging
from collections.abc import Callable, Sequence
from typing import Any

import jax

from moelib.checkpoint.contents import DamagedCheckpointError
from moelib.checkpoint.policy import every_n_steps_policy
from moelib.core.config import config_for_function
from moelib.core.config_text import parse
from moelib.core.errors import MissingFileError, UserError, first_line
from moelib.parallel.mesh import create_device_mesh, mesh_shape_from_axes
from moelib.runs.folder import RunFolder
from moelib.runs.identity import config_hash
from moelib.runs.loading import as_mesh, load_model
from moelib.runs.model_files import check_tokenizers
from moelib.runs.routing_file import RoutingLog, list_data, list_logs, log_folder
from moelib.train.routing_log import RoutingEvaler, is_complete
from moelib.train.settings import completed

logger = logging.getLogger(__name__)


def write_missing_logs(
    run: str,
    steps: Sequence[int],
    *,
    evaler: str | None = None,
    max_batches: int | None = None,
    on_step: Callable[[int], None] | None = None,
    mesh: str | None = None,
    **loading: Any,
) -> tuple[str, dict[int, str]]:
    """Writes the logs of checkpoints that have none.

    Args:
        run: Folder of the run.
        steps: Steps of checkpoints.
        evaler: Name of the evaler whose input is read; None for that of the run's logs or of its
            `RoutingEvaler`, or else "validation" or the only one.
        max_batches: Number of batches; None for that of the run's logs or of its `RoutingEvaler`,
            or else 1.
        on_step: Function called with each step before its log is written.
        mesh: Mesh, such as "fsdp=4"; None for the first device.
        loading: Further arguments of `load_model`.

    Returns:
        The name of the evaler, and {step: reason} of the checkpoints that cannot be read.

    Raises:
        UserError: If the run has no such evaler or no MoE layer, or the evaler is not clear.
    """
    reasons: dict[int, str] = {}
    name = evaler or _only(list_data(run))
    model: Any = None
    writer: RoutingEvaler | None = None
    for step in steps:
        if name is not None and is_complete(log_folder(run, name, step), max_batches):
            continue
        if on_step is not None:
            on_step(step)
        try:
            if model is None:
                devices = create_device_mesh(
                    mesh_shape_from_axes(data=1), devices=jax.devices()[:1]
                )
                devices = devices if mesh is None else as_mesh(mesh)
                model = load_model(run, step=step, mesh=devices, require_tokenizer=False, **loading)
            else:
                model = dataclasses.replace(model, parameters={}).at_step(step)
        except (DamagedCheckpointError, MissingFileError) as error:
            reasons[step] = first_line(error)
            continue
        if writer is None or writer.model is not model.model:
            writer = _writer_for(model, run, name, max_batches)
        name = writer.config.evaler
        with model.on_mesh():
            record = RunFolder(run).record(step)
            run_mesh = record.mesh if record is not None else None
            writer.write(model.parameters, model.mesh, step=step, run_mesh=run_mesh)
    if name is None and (logged := list_data(run)):
        raise UserError(f"{run} has routing logs of {', '.join(logged)}; name one (--evaler).")
    if name is None:
        raise UserError(f"{run}: no checkpoint and no routing log can be read: {reasons}.")
    return name, reasons


def _only(names: Sequence[str]) -> str | None:
    return names[0] if len(names) == 1 else None


def _writer_for(model: Any, run: str, name: str | None, max_batches: int | None) -> RoutingEvaler:
    """Returns the evaler for a `LoadedModel`."""
    if model.config is None:
        raise UserError(f"{run} is no run of moelib; name a folder with config.txt.")
    trainer_config = completed(model.config.clone(dir=run))
    cfg = _routing_evaler(model.config) or RoutingEvaler.default_config()
    names = list(trainer_config.evalers)
    if name is None:
        name = cfg.evaler if cfg.evaler in names else _only(names)
    if name is None:
        raise UserError(f"{run} has the evalers {', '.join(names) or 'none'}; name one (--evaler).")
    evaler = trainer_config.evalers.get(name)
    if evaler is not None:  # Else an error of RoutingEvaler.
        check_tokenizers(trainer_config.clone(input=evaler.input, evalers={}), run)
    logs = [step for step, complete in list_logs(run, name).items() if complete]
    if max_batches is None and logs:
        max_batches = RoutingLog(log_folder(run, name, logs[-1])).header.num_batches
    policy = config_for_function(every_n_steps_policy)
    writer = cfg.clone(
        evaler=name, max_batches=max_batches or cfg.max_batches, eval_policy=policy
    ).instantiate()
    writer.use(model.model, trainer_config, config_hash(model.config))
    return writer


def _routing_evaler(cfg: Any) -> RoutingEvaler.Config | None:
    """Returns the first one of the watchers of a `SpmdTrainer.Config`."""
    found = (x for x in cfg.watchers.values() if isinstance(x, RoutingEvaler.Config))
    return next(found, None)


def expected_steps(run: str, evaler: str, last: int) -> list[int]:
    """Returns the steps, up to `last`, that a run's config says to have a log or a checkpoint of.

    They are those of its `RoutingEvaler`, if it has this evaler, or else those of the checkpoints,
    if all are kept; none if the config cannot be read.
    """
    try:
        folder = RunFolder(run)
        text, source = folder.config_text(folder.record())
        if not text:
            raise UserError(f"{run} has no config")
        cfg = completed(parse(text, source=source))
    except UserError as error:
        logger.warning("Steps without a log are not known: %s", error)
        return []
    policy = None
    log = _routing_evaler(cfg)
    if log is not None and log.evaler == evaler:
        policy = log.eval_policy
    elif cfg.checkpointer is not None and cfg.checkpointer.keep_last_n is None:
        policy = cfg.checkpointer.save_policy
    if policy is None:
        return []
    selects = policy.instantiate()
    return [step for step in range(1, last + 1) if selects(step=step, summaries={})]
