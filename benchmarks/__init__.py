"""Benchmarks on this machine, and the calibration of `moelib plan`'s estimates.

    python -m benchmarks step

They belong to the repository and are not installed with moelib.
"""
