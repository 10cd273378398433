"""The runtime type checker of annotated functions, in tests only."""

from beartype import BeartypeConf, beartype

# As in static typing, an int is accepted for a float.
checked = beartype(conf=BeartypeConf(is_pep484_tower=True))
