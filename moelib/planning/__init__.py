"""What a training step will be on hardware that nobody has rented yet, and whether it is right.

Estimated: `workload` is what the step computes, `candidates` the ways to run it on a topology,
`estimate` what each holds, sends and costs, `sweep` all of them, `calibration` published runs.
Compiled: `topologies` has the devices, `compiling` the real step compiled for them, `apart` that in
a process of its own, `hlo` reads the compiled program, `report` counts what is in it, `lint` finds
what is wasted, and `dump` writes it all down. Right: `verify` compares meshes with one device.
"""
