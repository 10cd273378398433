"""Named configs, one file per model family: values, no logic."""
