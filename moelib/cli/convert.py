"""`moelib convert`: converts between Hugging Face folders and run folders, and to plain tensors.

moelib convert --from_hf=MODEL --to=RUN
moelib convert --trainer_dir=RUN --to_hf=MODEL
moelib convert --trainer_dir=RUN --to_peft=ADAPTER
moelib convert --trainer_dir=RUN --to_safetensors=FOLDER
"""

import dataclasses
import os
from collections.abc import Sequence
from typing import Literal

from moelib.core.errors import UsageError
from moelib.launch import import_module
from moelib.runtime.command_line import flag, no_arguments

_TARGETS = ("to_hf", "to_peft", "to_safetensors")
_OF_HUB = ("ignore_settings", "multi_token_prediction")  # Flags of --from_hf alone.
_WAYS = (("from_hf", "to"), *(("trainer_dir", name) for name in _TARGETS))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
    """Flags of the command."""

    from_hf: str | None = flag(None, "Folder of the Hugging Face model to read.")
    to: str | None = flag(None, "Folder of the run to create from --from_hf.")
    ignore_settings: tuple[str, ...] = flag(
        (), "Settings of config.json that are known to change nothing: a,b.", split=True
    )
    multi_token_prediction: bool = flag(
        False, "Whether to read the modules of --from_hf that predict further tokens."
    )
    trainer_dir: str | None = flag(None, "Folder of the run to read.")
    step: int | None = flag(None, "Step of the run's checkpoint; the newest by default.")
    to_hf: str | None = flag(None, "Folder of the Hugging Face model to create from a run.")
    merge: bool = flag(False, "Whether --to_hf adds adapters to the weights.")
    to_peft: str | None = flag(None, "Folder of the adapter to create for PEFT from a run.")
    to_safetensors: str | None = flag(
        None, "Folder for all arrays of a run's checkpoint, as safetensors and tensors.json."
    )
    dtype: Literal["float32", "bfloat16", "float16"] | None = flag(
        None, "Dtype to write; by default float32 for --to and that of the run for --to_hf."
    )
    mesh: str | None = flag(
        None, "Mesh during conversion, such as fsdp=4,expert=2; by default one device."
    )
    module: str | None = flag(None, "Module of the run's own layers, which its config may name.")
    module_dir: str | None = flag(None, "Folder of the modules of the run's own layers.")
    skip_checksums: bool = flag(False, "Whether to read a run without comparing checksums.")


def run(flags: Flags, arguments: Sequence[str]) -> None:
    """Converts in the direction that the flags name."""
    no_arguments(arguments, Flags)
    names = dict.fromkeys(name for way in _WAYS for name in way)
    given = [name for name in names if getattr(flags, name)]
    if tuple(given) not in _WAYS:
        found = ", ".join(f"--{name}" for name in given) or "none of them"
        raise UsageError(
            "set --from_hf and --to, or --trainer_dir and one of --to_hf, --to_peft and "
            f"--to_safetensors; found {found}."
        )
    if flags.merge and not flags.to_hf:
        raise UsageError("--merge requires --to_hf.")
    from moelib.runs.loading import as_mesh
    from moelib.train import convert

    if flags.module:
        import_module(flags.module)
    mesh = as_mesh(flags.mesh)
    if flags.from_hf and flags.to:
        _refuse(flags, "--from_hf", "step", "module_dir", "skip_checksums")
        kind = convert.from_hugging_face(
            flags.from_hf,
            flags.to,
            dtype=flags.dtype or "float32",
            mesh=mesh,
            ignore_settings=flags.ignore_settings,
            multi_token_prediction=flags.multi_token_prediction,
        )
        print(f"Wrote the {kind} model to {flags.to}.")
    elif flags.trainer_dir and flags.to_hf:
        _refuse(flags, "--to_hf", *_OF_HUB)
        architecture = convert.to_hugging_face(
            flags.trainer_dir,
            flags.to_hf,
            step=flags.step,
            dtype=flags.dtype,
            mesh=mesh,
            module_dir=flags.module_dir,
            skip_checksums=flags.skip_checksums,
            merge=flags.merge,
        )
        files = ", ".join(sorted(os.listdir(flags.to_hf)))
        print(f"Wrote {architecture} to {flags.to_hf}: {files}.")
    elif flags.trainer_dir and flags.to_peft:
        _refuse(flags, "--to_peft", "dtype", "mesh", *_OF_HUB)
        num = convert.to_peft(
            flags.trainer_dir,
            flags.to_peft,
            step=flags.step,
            module_dir=flags.module_dir,
            skip_checksums=flags.skip_checksums,
        )
        print(f"Wrote the adapters of {num} tensors to {flags.to_peft}.")
    elif flags.trainer_dir and flags.to_safetensors:
        _refuse(flags, "--to_safetensors", "dtype", "mesh", "module_dir", *_OF_HUB)
        step = convert.to_safetensors(
            flags.trainer_dir,
            flags.to_safetensors,
            step=flags.step,
            skip_checksums=flags.skip_checksums,
        )
        print(f"Wrote the arrays of step {step} to {flags.to_safetensors}.")


def _refuse(flags: Flags, target: str, *names: str) -> None:
    """Raises UsageError if a flag is set that a target does not use."""
    for name in names:
        if getattr(flags, name) != getattr(Flags(), name):
            raise UsageError(f"--{name} is not for {target}; leave it out.")
