"""Plans of training steps for hardware that is not present.

`plan` estimates the memory, time, traffic and cost of a step on each mesh of a topology
(`estimate`, `hardware`) and compiles the best ones ahead of time (`compiled`). `hlo` reads compiled
programs, `report` counts their contents, and `lint` finds unnecessary cost.
"""
