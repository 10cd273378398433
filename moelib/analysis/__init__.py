"""Analyses of what runs wrote: they read files, and know no training code."""
