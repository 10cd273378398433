"""An example in one of several processes; prints what its function `run` returns, as JSON.

python -m tests.experiments.tasks.example_process NAME FOLDER ARGUMENTS COORDINATOR NUMBER INDEX
"""

import importlib
import json
import sys

from moelib.launch import DeviceFlags

if __name__ == "__main__":
    name, folder, arguments, coordinator, number, index = sys.argv[1:]
    DeviceFlags(
        distributed_coordinator=coordinator, num_processes=int(number), process_id=int(index)
    ).set_up()
    example = importlib.import_module(f"experiments.tasks.{name}")
    found = example.run(folder, **json.loads(arguments))
    print(json.dumps({key: float(value) for key, value in found.items()}))
