"""Generation of text by trained models."""
