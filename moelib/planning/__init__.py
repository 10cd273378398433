"""What a training step will be on hardware that nobody has rented yet.

`topologies` has the devices, `compiling` the real step compiled for them, `hlo` reads the compiled
program, `report` counts what is in it, `lint` finds what is wasted, and `dump` writes it all down.
"""
