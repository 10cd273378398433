"""Hugging Face folders: the parameters read back."""

import tempfile
from typing import cast

import jax
import numpy as np

from moelib.core import tree
from moelib.huggingface.families import NoFamilyError, settings_of
from moelib.huggingface.pretrained import replaced_parameters, save_pretrained
from moelib.models.causal_lm import CausalLM
from moelib.verify.compare import Difference, first_bit_difference
from moelib.verify.outcome import CheckSkippedError
from moelib.verify.reference import Reference


def exported(known: Reference) -> Difference | str | None:
    """Compares the parameters with those read back from an exported folder, bit for bit."""
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
        empty = jax.device_put(jax.tree.map(np.zeros_like, want.model), probe.shardings.model)
        read = replaced_parameters(empty, folder, cast(CausalLM, probe.trainer.model))
    keep = probe.trainer.learner.is_updated
    pair = tree.select(want.model, keep), tree.select(jax.device_get(read), keep)
    return first_bit_difference(*pair)
