"""Verification that a config computes the same numbers on every mesh.

`verify_config` (`run`) makes the config small (`shrink`), runs it on one device (`reference`,
`single_device`), then on every mesh of simulated devices that it could use (`meshes`,
`mesh_checks`). Everything runs in float32.
"""
