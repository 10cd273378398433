"""Configs and the module tree: what everything else is made of."""
