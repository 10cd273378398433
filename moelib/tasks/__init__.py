"""Tasks: any model in a few functions, trained, evaluated and used by plain calls."""
