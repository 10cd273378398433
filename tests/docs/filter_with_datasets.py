"""The example of `datasets` in docs/data.md: reads web/, and writes clean/."""

from datasets import load_dataset

if __name__ == "__main__":
    # --8<-- [start:filter]
    rows = load_dataset("json", data_files="web/*.jsonl*", split="train")
    rows = rows.filter(lambda row: len(row["text"].split()) >= 50, num_proc=2)
    seen: set[str] = set()
    rows = rows.filter(lambda row: not (row["text"] in seen or seen.add(row["text"])))
    for index in range(2):  # A file is at least a part of the work of `moelib prepare`.
        rows.shard(2, index).to_json(f"clean/{index:05d}.jsonl")
    # --8<-- [end:filter]
