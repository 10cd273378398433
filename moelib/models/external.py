"""A whole model of another library, whose `apply` returns the loss of a batch."""

from moelib.layers.external import ExternalLayer
from moelib.models.model import Model


class ExternalModel(ExternalLayer, Model):
    """A model that consists of an `InitApply`, whose `apply` returns (loss, metrics) of a batch."""
