"""Kernels: one folder each, with an entry, a reference, and one file a backend."""
