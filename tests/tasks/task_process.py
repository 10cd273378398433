"""A run of a task in a process of its own, evaluated and predicted by all processes together."""

import json
import sys

import jax
import numpy as np

import moelib
from moelib.launch import DeviceFlags

COLLATED = []


def collate(examples):
    """Stacks examples, and counts them."""
    COLLATED.append(len(examples))
    return {name: [example[name] for example in examples] for name in examples[0]}


def main(folder, mesh, coordinator="", num_processes="1", process_id="0"):
    """Trains, evaluates and predicts; prints what came out as JSON."""
    if coordinator:
        DeviceFlags(
            distributed_coordinator=coordinator,
            num_processes=int(num_processes),
            process_id=int(process_id),
        ).set_up()
    from tests.tasks import test_task  # It computes when it is imported.

    task = test_task.make_task(collate=collate, metric=test_task.count_hits)
    examples = test_task.EXAMPLES
    result = test_task.fit(
        task, folder, eval_examples=examples[:21], batch_size=16, max_step=3, mesh=mesh
    )
    rows = max(COLLATED)
    settings = {"trainer_dir": folder, "mesh": mesh}
    scores = moelib.evaluate(task, examples, **settings)
    found = moelib.predict(task, examples, **settings)
    values = {
        "loss": result.metrics["loss"],
        "validation": result.evaluations["validation"],
        "scores": scores,
        "first": np.array([r["first"] for r in found]).tolist(),
        "rows": rows,
        "processes": jax.process_count(),
    }
    print(json.dumps(values))


if __name__ == "__main__":
    main(*sys.argv[1:])
