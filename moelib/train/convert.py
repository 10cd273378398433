"""Conversion between run folders and Hugging Face folders, and to plain tensors."""

import functools
import os
from collections.abc import Iterable

import jax
import numpy as np
from jax.sharding import Mesh

from moelib.checkpoint.checkpointer import Checkpointer, CheckpointSaveError
from moelib.checkpoint.contents import RunRecord
from moelib.checkpoint.restore import restore_arrays
from moelib.checkpoint.safetensors import (
    INDEX_FILE,
    SINGLE_FILE,
    add_sums,
    file_sums,
    write_tensors,
)
from moelib.core.errors import UserError, first_line
from moelib.core.tree import Nested
from moelib.huggingface.peft import save_adapter
from moelib.huggingface.pretrained import (
    FILES,
    copy_files,
    load_pretrained,
    read_config,
    save_pretrained,
)
from moelib.layers.adapter import has_adapters, without_adapters
from moelib.layers.base import BaseLayer
from moelib.runs.folder import RunFolder
from moelib.runs.loading import load_model, stop_ids_of_model, tokenizer_of_model
from moelib.runtime import storage
from moelib.runtime.storage import atomic_file, read_json, write_json
from moelib.train.trainer import SpmdTrainer


def from_hugging_face(
    folder: str,
    to: str,
    *,
    dtype: str = "float32",
    mesh: Mesh | None = None,
    ignore_settings: Iterable[str] = (),
    multi_token_prediction: bool = False,
) -> str:
    """Writes a Hugging Face model as step 0 of a run without data; returns its model_type.

    Args:
        folder: Folder with config.json and safetensors, and a tokenizer if there is one.
        to: Folder of the run, which is created.
        dtype: Dtype of the parameters.
        mesh: Mesh that holds the parameters during conversion; None for the first device.
        ignore_settings: Settings of config.json that are known to change nothing.
        multi_token_prediction: Whether to read the modules that predict further tokens.

    Raises:
        UserError: If `to` holds a run, or the tokenizer or an eos_token_id does not belong to the
            model.
        Exception: The errors of `load_pretrained`.
    """
    run = RunFolder(to)
    path = run.config_file
    if storage.exists(path):
        raise UserError(f"{path} exists; choose another folder.")
    ignored = tuple(ignore_settings)
    (cfg, _), tokenizer = read_config(folder, ignore_settings=ignored), None
    if read_json(os.path.join(folder, "tokenizer_config.json")).get("eos_token"):
        tokenizer = tokenizer_of_model(folder, cfg.vocab_size)
    stop_ids_of_model(folder, tokenizer, cfg.vocab_size)
    loaded = load_pretrained(
        folder,
        dtype=dtype,
        mesh=mesh,
        ignore_settings=ignored,
        multi_token_prediction=multi_token_prediction,
    )
    writer = Checkpointer.default_config().set(dir=run.own_checkpoints).instantiate(parent=None)
    copy_files(folder, to)
    text = SpmdTrainer.default_config().set(model=loaded.cfg).debug_string()
    files = file_sums(to, FILES)
    record = RunRecord(step=0, config=text, files=files)
    writer.save({"model": loaded.params}, record)
    writer.close()
    if writer.last_error is not None:
        error = writer.last_error
        raise CheckpointSaveError(
            f"{run.own_checkpoints} cannot be written: {first_line(error)}"
        ) from error
    with atomic_file(path) as file:
        file.write(text)
    return loaded.settings["model_type"]


def to_hugging_face(
    trainer_dir: str,
    to: str,
    *,
    step: int | None = None,
    dtype: str | None = None,
    mesh: Mesh | None = None,
    module_dir: str | None = None,
    skip_checksums: bool = False,
    merge: bool = False,
) -> str:
    """Writes the model of a run for transformers; returns the name of its architecture.

    A model that was converted from Hugging Face and still has its published config gets its
    published config.json again.

    Args:
        trainer_dir: Folder of the run.
        to: Folder of the Hugging Face model, which is created.
        step: Step of the checkpoint; None for the newest.
        dtype: Dtype to round the parameters to; None for that of the checkpoint.
        mesh: Mesh that holds the parameters during conversion; None for the first device.
        module_dir: Folder of the modules of the run's own layers, as for `load_model`.
        skip_checksums: Whether the arrays are not compared with their checksums.
        merge: Whether adapters are added to their weights, in float32.

    Raises:
        UserError: If `merge` is set, and the model has no adapters.
        Exception: The errors of `load_model` and `save_pretrained`.
    """
    loaded = load_model(
        trainer_dir,
        step=step,
        dtype="stored",
        mesh=mesh,
        module_dir=module_dir,
        require_tokenizer=False,
        skip_checksums=skip_checksums,
    )
    cfg, params = loaded.model.config, loaded.parameters
    if merge:
        if not has_adapters(cfg):
            raise UserError(f"merge: the model of {trainer_dir} has no adapters; leave it out.")
        cfg, params = without_adapters(cfg), merged_adapters(loaded.model, params)
    tokenizer, stop_ids = loaded.tokenizer, list(loaded.stop_ids)
    settings = {"eos_token_id": tokenizer.eos_id} if tokenizer else {}
    if loaded.max_length is not None:
        settings["max_position_embeddings"] = loaded.max_length
    return save_pretrained(
        to,
        cfg,
        params,
        dtype=dtype,
        tokenizer=tokenizer,
        files_of=trainer_dir,
        more_settings=settings,
        generation={"eos_token_id": stop_ids if len(stop_ids) > 1 else stop_ids[0]}
        if stop_ids
        else None,
    )


@functools.partial(jax.jit, static_argnums=0)
def merged_adapters(model: BaseLayer, params: Nested) -> Nested:
    """Returns the parameters of the model without adapters, with W + scale A B as weights."""
    return model.merge_adapters_recursively(params)


def to_peft(
    trainer_dir: str,
    to: str,
    *,
    step: int | None = None,
    module_dir: str | None = None,
    skip_checksums: bool = False,
) -> int:
    """Writes the adapters of a run for PEFT; returns the number of adapted tensors.

    Args:
        trainer_dir: Folder of the run.
        to: Folder of the adapter, which is created.
        step: Step of the checkpoint; None for the newest.
        module_dir: Folder of the modules of the run's own layers; None for the run's.
        skip_checksums: Whether the arrays are not compared with their checksums.

    Raises:
        Exception: The errors of `load_model` and `moelib.huggingface.peft.save_adapter`.
    """
    loaded = load_model(
        trainer_dir,
        step=step,
        dtype="stored",
        require_tokenizer=False,
        module_dir=module_dir,
        skip_checksums=skip_checksums,
    )
    start = getattr(loaded.config, "init_from", None)
    base = "" if start is None else start.instantiate().folder
    return save_adapter(to, loaded.model.config, loaded.parameters, base=base)


TENSORS_FILE = "tensors.json"


def to_safetensors(
    trainer_dir: str, to: str, *, step: int | None = None, skip_checksums: bool = False
) -> int:
    """Writes all arrays of a run's checkpoint for any tool; returns the checkpoint's step.

    Parameters ("model/...") and the state of the optimizer ("learner/...") are tensors named by
    their paths. tensors.json has the step, and file, dtype and shape of each.

    Args:
        trainer_dir: Folder of the run, of any model or task.
        to: Folder of the tensors, which is created.
        step: Step of the checkpoint; None for the newest.
        skip_checksums: Whether the arrays are not compared with their checksums.

    Raises:
        ExistingFileError: If `to` has tensors.
        Exception: The errors of `restore_arrays`.
    """
    checkpoints = RunFolder(trainer_dir).checkpoints
    arrays, record, _ = restore_arrays(checkpoints, step=step, skip_checksums=skip_checksums)
    write_tensors(to, ((name, np.asarray(x)) for name, x in arrays.items()))
    files = read_json(os.path.join(to, INDEX_FILE)).get("weight_map", {})
    tensors = {
        name: {"file": files.get(name, SINGLE_FILE), "dtype": dtype, "shape": shape}
        for name, (dtype, shape) in record.arrays.items()
    }
    write_json(os.path.join(to, TENSORS_FILE), {"step": record.step, "tensors": tensors})
    add_sums(to, [TENSORS_FILE])
    return record.step
