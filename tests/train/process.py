"""A run of the tiny trainer in a process of its own, which may send itself a signal."""

import argparse
import json
import os
import signal

from moelib.data.batches.input import check_rows, check_state
from moelib.data.batches.lm_input import LMInputIterator
from moelib.data.batches.synthetic import SyntheticInput
from moelib.launch import DeviceFlags
from moelib.train.routing_log import RoutingEvaler
from moelib.train.watchers.bad_steps import BadSteps
from tests.tiny import model_config, trainer_config


class HostInput(SyntheticInput):
    """An input with positions of one host each, like a streaming input."""

    def iterator(self, rows=None):
        return _HostIterator(self, check_rows(rows, self.config.global_batch_size))


class _HostIterator(LMInputIterator):
    def state(self):
        return {"step": self.step, "input": {**self.source.identity, "rows": str(self._rows)}}

    def restore(self, state):
        check_state(state, self.state()["input"])
        self.step = state["step"]


def main():
    """Trains; `--signal_at N` sends a process a signal as soon as it has taken step N."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", required=True)
    parser.add_argument("--max_step", type=int, default=8)
    parser.add_argument("--save_every", type=int, default=4)
    parser.add_argument("--local_dir")  # For a local checkpoint every second step.
    parser.add_argument("--signal_at", type=int)
    parser.add_argument("--signal", default="SIGTERM")
    parser.add_argument("--signal_to", type=int, default=0)  # Index of the process.
    parser.add_argument("--coordinator")
    parser.add_argument("--process_id", type=int, default=0)
    parser.add_argument("--num_processes", type=int, default=1)
    parser.add_argument("--own_positions", action="store_true")  # Of each host in the data.
    parser.add_argument("--corrupt_after", type=int)  # Once, a step; with a policy for bad ones.
    parser.add_argument("--routing_log", action="store_true")  # Of a model with MoE layers.
    parser.add_argument("--seeds", type=int, nargs=2, default=(0, 0))  # Of each process's input.
    args = parser.parse_args()
    if args.coordinator:
        job = (args.coordinator, args.num_processes, args.process_id)
        names = ("distributed_coordinator", "num_processes", "process_id")
        DeviceFlags(**dict(zip(names, job, strict=True))).set_up()
    cfg = trainer_config(args.dir, max_step=args.max_step, save_every=args.save_every)
    if args.local_dir:
        cfg.checkpointer.set(local_dir=args.local_dir, local_every_n_steps=2)
    cfg.input.seed = args.seeds[args.process_id]
    if args.routing_log:
        cfg.model = model_config()
        log = RoutingEvaler.default_config().set(evaler="val", max_batches=2)
        cfg.watchers["routing_log"] = log
    if args.own_positions:
        fields = {name: value for name, value in cfg.input.items() if name != "klass"}
        cfg.input = HostInput.default_config().set(**fields)
    if args.corrupt_after:
        cfg.watchers["bad_steps"] = BadSteps.default_config()
    trainer = cfg.instantiate(parent=None)
    run_step = trainer.run_step

    def run_step_and_signal(batch, *, input_state=None):
        metrics = run_step(batch, input_state=input_state)
        if trainer.step == args.corrupt_after:
            args.corrupt_after, state = None, trainer.trainer_state
            model = {**state.model, "head": state.model["head"] * float("nan")}
            trainer._state = state._replace(model=model)
        if trainer.step == args.signal_at and args.process_id == args.signal_to:
            if args.signal == "SIGKILL":
                trainer.checkpointer.close()
            os.kill(os.getpid(), getattr(signal, args.signal))
        return metrics

    trainer.run_step = run_step_and_signal
    out = trainer.run()
    print(json.dumps({"step": out["step"], "stopped_by": out["stopped_by"]}))


if __name__ == "__main__":
    from tests.train import process  # A run may name no class of __main__.

    process.main()
