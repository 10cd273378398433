"""Named configs: values only, no logic of the library."""
