"""Batches: tokens packed into sequences, as a function of the seed and the step."""
