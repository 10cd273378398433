"""Training steps compiled ahead of time for hardware that is not present."""
