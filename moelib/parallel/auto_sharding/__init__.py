"""Tensor parallelism for any JAX function: the computation decides what is sharded, not names."""
