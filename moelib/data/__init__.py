"""From text to batches, each a pure function of seed and step."""
