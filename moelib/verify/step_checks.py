"""The state that a step returns: the learner's update, and nothing of a step that is skipped."""

import jax
import numpy as np

from moelib.core import tree
from moelib.core.config import FunctionConfig
from moelib.learner.transforms import skip_bad_steps
from moelib.verify.compare import Difference, first_difference
from moelib.verify.reference import Reference


def stepped(known: Reference) -> Difference | None:
    """Compares the state after each step with the learner's update by the step's own gradients.

    Where bad steps are skipped, a step with a NaN may change the counts of steps alone.
    """
    for observed in known.steps:
        if found := first_difference(observed.state_by_given, observed.state, relative=1e-6):
            return found
    skip = known.config.learner.skip
    if not isinstance(skip, FunctionConfig) or skip.fn is not skip_bad_steps:
        return None
    first, gradients = next(iter(tree.by_path(known.first.gradients))), known.first.gradients
    broken = lambda path, x: np.full_like(x, np.nan) if path == first else x
    before = known.start._replace(model=tree.map_by_path(broken, known.start.model))
    after = jax.device_get(known.probe(before, known.batches[0], gradients).state)
    counts = before.learner._replace(skipped_steps=after.learner.skipped_steps)
    return first_difference(before._replace(learner=counts, step=after.step), after, relative=0.0)
