"""Checks of all phases of a run before its first step: a phase may begin after days."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from moelib.core import tree
from moelib.core.errors import UserError
from moelib.runs import phases
from moelib.runs.identity import check_moments
from moelib.runs.model_files import check_tokenizers
from moelib.runtime.processes import agreed
from moelib.train.program import StepProgram


def check_phases(first: StepProgram, program_of: Callable[[str], StepProgram]) -> None:
    """Raises UserError if a phase is none that a run can have.

    Args:
        first: Program of the first phase.
        program_of: Returns that of another phase; no step of it is compiled.
    """
    before = first
    phases.check_ends(first.config)
    for name, _ in phases.in_order(first.config):
        with _named(name):
            program = program_of(name)
            _ = program.batch_sharding
            program.check_trained()
            check_moments(before.config, program.config)
            specs = (x.trainer_state_specs.model for x in (program, first))
            if (difference := tree.mismatch(*specs, dtypes=True)) is not None:
                raise UserError(
                    f"{difference} before it; a phase cannot change the parameters of the model: "
                    "remove the change."
                )
        before = program


def check_data(first: StepProgram, program_of: Callable[[str], StepProgram], step: int) -> None:
    """Opens the data of the phases that begin after a step, whose first has a program.

    All processes must call it.

    Raises:
        UserError: If those of a phase are missing or unfit.
    """
    for name, phase in phases.in_order(first.config):
        if phase.after_step < step:
            continue
        program = program_of(name)
        with _named(name):
            agreed(program.new_input)
            agreed(
                functools.partial(check_tokenizers, program.config, None, before=first.config.input)
            )


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Puts the name of a phase before the message of a UserError."""
    try:
        yield
    except UserError as error:
        raise UserError(f"phases.{name}: {error}") from error
