"""A run: its folder, identity, records and metrics on disk, and its model as it was saved."""
