"""Whether a config computes the same on every mesh, and what else a run takes for granted.

    for outcome in verify(cfg): print(outcome)

The config is made small (`shrink`), runs on one device (`reference`, `on_one`), and then on every
mesh of simulated devices that it could use (`meshes`, `on_mesh`); all is float32.
"""

from moelib.verify.outcome import Outcome, Status
from moelib.verify.verify import verify

__all__ = ["Outcome", "Status", "verify"]
