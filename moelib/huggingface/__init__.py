"""Conversion of models from and to Hugging Face: configs and tensors as tables.

One file per family describes how its config.json maps to a `CausalLM.Config`, and which tensors
make up each parameter.
"""
