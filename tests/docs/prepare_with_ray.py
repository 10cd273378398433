"""The example of Ray in docs/data.md: `python prepare_with_ray.py` in a folder with web/."""

import ray

from moelib.data.sources.json_lines import JsonLines
from moelib.data.tokens.preparation import begin_store, finish_store, make_part, plan_store
from moelib.data.tokens.tokenizer import Tokenizer

if __name__ == "__main__":
    # --8<-- [start:map]
    ray.init(runtime_env={"env_vars": {"TOKENIZERS_PARALLELISM": "false"}})  # A core per task.
    source = JsonLines.default_config().set(paths=["web"]).instantiate()
    tokenizer = Tokenizer.default_config().set(path="tokenizer.json").instantiate()
    preparation = plan_store(source, tokenizer, "data/web")
    begin_store(preparation, tokenizer)
    shared = ray.put(preparation)  # Of the file names and sizes alone.
    task = ray.remote(max_retries=3)(make_part)
    ray.get([task.remote(shared, index) for index in range(len(preparation.parts))])
    store = finish_store(preparation)
    # --8<-- [end:map]
