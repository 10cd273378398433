"""Sequence mixers with a state of fixed size, as `TransformerLayer.self_attention`."""
