"""`moelib.train.kernel_check` on CPUs, with a fault in the grouped matmul of the backend "tpu".

Arguments: "wrong", "raising", "hanging", "crashing" or "none", and seconds for each call. Other
kernels are not compared. With the argument "here", the process compares itself.
"""

import os
import sys
import time

import jax

from moelib.kernels import check
from moelib.kernels.gmm import tpu
from moelib.train import kernel_check
from tests import tiny

_forward = tpu.forward


def _plant(fault):
    def forward(*args, activation, **options):
        out, products = _forward(*args, activation=activation, **options)
        if activation is None or fault == "none":
            return out, products
        return jax.pure_callback(act, out, out), products

    def act(out):
        if fault == "raising":
            raise RuntimeError("planted")
        if fault == "hanging":
            time.sleep(1000)
        if fault == "crashing":
            os._exit(3)
        return 1.5 * out

    tpu.forward = forward


def _compare(call, *, compare=check.compare):
    return compare(call) if call.kernel == "gmm" else None


def config(folder):
    """Returns a run of one step, whose grouped matmuls the interpreter computes."""
    cfg = tiny.trainer_config(folder, max_step=1, evaler=False, model=tiny.model_config())
    return cfg.set(kernel_backends={"gmm": "tpu"})


if __name__ == "__main__":
    _plant(sys.argv[1])
    kernel_check.LIMIT_SECONDS["call"] = float(sys.argv[2])
    kernel_check.PLATFORMS = ("cpu",)
    kernel_check.compare = _compare
    if "here" in sys.argv:
        trainer = config(sys.argv[3]).instantiate(parent=None)
        path = kernel_check._path(trainer.config, "here")
        for verdict in kernel_check._in_this_process(trainer, path):
            print(verdict.kernel, verdict.fault)
    else:
        kernel_check.main()
