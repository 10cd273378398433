"""Rules that find unnecessary cost in a compiled program."""
