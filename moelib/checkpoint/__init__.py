"""Saving and restoring training states."""
