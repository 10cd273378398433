import os

from moelib.train.run_log import EVENTS_FILE, log_event, read_events


def test_events_are_read_in_their_order_and_incomplete_lines_are_not(tmp_path):
    folder = os.fspath(tmp_path)
    assert read_events(folder) == []
    log_event(folder, "start", step=0)
    log_event(folder, "end", step=7)
    with open(tmp_path / EVENTS_FILE, "a") as file:
        file.write('[]\n{"time": 1.0, "event": "sta')
    assert [(x["event"], x["step"]) for x in read_events(folder)] == [("start", 0), ("end", 7)]
