"""Analyses of what runs wrote: they read files only."""
