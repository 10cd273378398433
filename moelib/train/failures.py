"""Errors that end a run at a bad step, with the checkpoint to go back to."""

import math

from moelib.checkpoint.checkpointer import Checkpointer
from moelib.core.errors import UserError
from moelib.core.metrics import Scalars


class BadStepError(UserError):
    """A bad step at which the run stops."""


class NonFiniteError(BadStepError, FloatingPointError):
    """A step whose loss or parameters are not finite."""


_CURE = (
    "Lower the learning rate, set learner.skip to skip such steps, or add BadSteps to watchers to "
    "take them again"
)


def non_finite_error(
    step: int, scalars: Scalars, checkpointer: Checkpointer | None, cure: str = _CURE
) -> NonFiniteError:
    """Returns the error that names the step, the checkpoint to go back to, and a cure."""
    reason = f"the loss is {scalars['objective']}"
    if math.isfinite(scalars["objective"]):
        reason = f"the loss is {scalars['objective']:.4f}, but parameters after it are not finite"
    return NonFiniteError(
        f"step {step}: {reason} (gradient norm {scalars.get('gradient_norm', math.nan):.4g}). "
        f"{last_good(checkpointer)} {cure}, and start the run again."
    )


def last_good(checkpointer: Checkpointer | None) -> str:
    """Returns a sentence with the newest durable checkpoint."""
    if checkpointer is not None:
        checkpointer.wait()
        if (step := checkpointer.latest_step()) is not None:
            return f"The last good checkpoint is of step {step}, in {checkpointer.dir}."
    return "There is no checkpoint before it."


MAX_RETURNS = 10  # From one point of a run; one that goes back more often gets no further.


def no_progress_error(step: int, reason: str) -> UserError:
    """Returns the error of a run that went back from one point too often, for a reason."""
    return UserError(
        f"step {step}: the run went back {MAX_RETURNS} times from here ({reason}), and does not "
        "get further; remove the watcher that raises GoBack, or let it go back for a cause that "
        "passes."
    )
