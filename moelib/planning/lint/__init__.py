"""Rules that find waste in a compiled program."""
