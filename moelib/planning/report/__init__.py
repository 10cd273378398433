"""Figures of one step: counted in the compiled program, as tables and plots."""
