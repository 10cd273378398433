"""The type checker that jaxtyping puts around annotated functions, in tests only."""

from beartype import BeartypeConf, beartype

# An int where a float is asked for is right in Python's typing, and so it is here.
checked = beartype(conf=BeartypeConf(is_pep484_tower=True))
