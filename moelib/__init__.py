"""A compact JAX library for training Mixture-of-Experts language models."""

__version__ = "0.1.0"
