"""Watchers that come with the library: account, profiler, and guards against faults."""
