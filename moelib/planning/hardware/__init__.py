"""Devices of TPU topologies and GPU hosts that are not present."""
