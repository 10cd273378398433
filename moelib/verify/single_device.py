"""The checks on one device, and those of files: checkpoints and Hugging Face folders."""

import tempfile
from collections.abc import Callable

import jax
import numpy as np

from moelib.core import tree
from moelib.models.causal_lm import CausalLM
from moelib.models.huggingface.families import NoFamilyError, settings_of
from moelib.train.pretrained import save_pretrained, state_from_hugging_face
from moelib.verify.batch_checks import doubled, masked, packing, padding
from moelib.verify.compare import Difference, first_bit_difference
from moelib.verify.data_checks import data, hosts
from moelib.verify.layer_checks import kernels, layers
from moelib.verify.learner_checks import learner
from moelib.verify.objective_checks import auxiliary, balanced, derivatives, plain, reached
from moelib.verify.outcome import CheckSkippedError
from moelib.verify.reference import Reference


def saved(known: Reference) -> Difference | None:
    """Compares, bit for bit, a checkpoint with the state that was saved."""
    if known.config.checkpointer is None:
        raise CheckSkippedError("no checkpointer")
    got = jax.device_get(known.probe.restore(known.probe, int(known.start.step)))
    return first_bit_difference(known.start, got)


def exported(known: Reference) -> Difference | None:
    """Compares, bit for bit, trained parameters before and after a Hugging Face folder."""
    cfg, probe, want = known.config.model, known.probe, known.start
    if not isinstance(cfg, CausalLM.Config):
        raise CheckSkippedError("not a CausalLM")
    try:
        family, _ = settings_of(cfg)
    except NoFamilyError as error:
        raise CheckSkippedError(str(error).partition(";")[0]) from None
    if family.zeros(cfg):
        raise CheckSkippedError(f"{family.architecture} has parameters that the model lacks")
    with tempfile.TemporaryDirectory() as folder:
        save_pretrained(folder, cfg, jax.device_put(want.model, probe.shardings.model))
        empty = want._replace(model=jax.tree.map(np.zeros_like, want.model))
        empty = jax.device_put(empty, probe.shardings)
        got = state_from_hugging_face(folder, probe.trainer.model)(empty)
    keep = probe.trainer.learner.is_updated
    return first_bit_difference(
        tree.select(want.model, keep), tree.select(jax.device_get(got.model), keep)
    )


# Those nearest to the cause of a failure first. Each returns the first difference or None, or
# raises CheckFailedError or CheckSkippedError.
SINGLE_DEVICE_CHECKS: dict[str, Callable[[Reference], Difference | None]] = {
    check.__name__: check
    for check in (
        data,
        hosts,
        kernels,
        layers,
        plain,
        derivatives,
        learner,
        balanced,
        saved,
        reached,
        auxiliary,
        masked,
        padding,
        doubled,
        packing,
        exported,
    )
}
