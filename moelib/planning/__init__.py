"""Training steps estimated or compiled for hardware that is not present.

`estimate` computes what a step holds, sends and costs on each mesh of a topology (`hardware`).
`compiled` compiles the real step ahead of time; `hlo` reads the compiled program, `report` counts
what is in it, and `lint` finds what is wasted.
"""
