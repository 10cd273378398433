"""From gradients to new parameters, on Optax."""
