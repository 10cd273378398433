"""Figures of a step, counted in the compiled program, as tables and plots."""
