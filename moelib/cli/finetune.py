"""`moelib finetune`: fine-tunes a Hugging Face model with adapters (LoRA), or all of it.

moelib finetune --model=MODEL --data=chat.jsonl --trainer_dir=RUN
moelib finetune --model=MODEL --data=STORE --trainer_dir=RUN --full --lr=1e-5
moelib finetune --model=MODEL --data=pairs.jsonl --trainer_dir=RUN --objective=dpo
moelib finetune --model=MODEL --data=prompts.jsonl --trainer_dir=RUN --objective=grpo
    --reward=rewards:correct
"""

import dataclasses
import os
from collections.abc import Sequence

from moelib.core.errors import UsageError
from moelib.launch import DeviceFlags
from moelib.runtime.command_line import no_arguments
from moelib.tasks.fine_tuning import FineTuning


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags(DeviceFlags, FineTuning):
    """Flags of the command."""


def run(flags: Flags, arguments: Sequence[str]) -> None:
    """Prints the numbers of trained parameters, and trains."""
    no_arguments(arguments, Flags)
    if not (flags.model and flags.data and flags.trainer_dir):
        raise UsageError("--model, --data and --trainer_dir are required.")
    flags.set_up()
    from moelib.core import trusted_code
    from moelib.tasks.finetune import finetune

    if flags.reward is not None:
        trusted_code.allow_folder(os.getcwd())
    result = finetune(flags)
    loss = f"; loss {result.metrics['loss']:.4f}" if "loss" in result.metrics else ""
    print(f"Step {result.step}{loss}.")
