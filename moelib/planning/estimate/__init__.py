"""Estimates of a step in closed form: memory, time, traffic and cost on a mesh."""
