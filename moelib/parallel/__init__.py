"""Meshes, and where each array lives on them."""
