"""Attention layers and their masks."""
