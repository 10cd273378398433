"""Examples of tasks, trained in one of several processes."""

import json
import sys

from moelib.launch import DeviceFlags

SETTINGS = {
    "maml": {"num_steps": 20},
    "federated_averaging": {"num_rounds": 4},
    "ppo": {"num_epochs": 2},
}


def main(folder, coordinator, num_processes, process_id):
    """Trains each example for a few steps, and prints the scores as JSON."""
    DeviceFlags(
        distributed_coordinator=coordinator,
        num_processes=int(num_processes),
        process_id=int(process_id),
    ).set_up()
    import jax

    from experiments.tasks import federated_averaging, maml, ppo

    scores = {}
    for example in (maml, federated_averaging, ppo):
        name = example.__name__.rpartition(".")[2]
        scores[name] = example.run(f"{folder}/{name}", **SETTINGS[name])
    scores = jax.tree.map(float, scores)
    print(json.dumps({"processes": jax.process_count(), "devices": jax.device_count(), **scores}))


if __name__ == "__main__":
    main(*sys.argv[1:])
