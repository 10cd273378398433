"""Tokenized documents: tokenizers, and the token store that `moelib prepare` makes."""
