"""Runs on clusters: drills of what breaks on them."""
