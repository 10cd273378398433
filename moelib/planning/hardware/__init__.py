"""Devices of TPU topologies and GPU hosts that need not be present."""
