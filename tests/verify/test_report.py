"""The report: a table of meshes by checks, what was skipped and why, what failed."""

from moelib.verify.outcome import Outcome, Status
from moelib.verify.report import Report
from moelib.verify.shrink import Change


def report(*outcomes):
    made = Report("a-config", 8, [Change("model.dim", 2048, 16)], ["fsdp 8", "model 8"])
    for outcome in outcomes:
        made.outcomes.append(outcome)
    return made


def test_a_mesh_that_passed_is_same_and_one_that_cannot_be_is_explained():
    made = report(
        Outcome("1 device", "compiled", Status.PASSED),
        Outcome("fsdp 8", "compiled", Status.PASSED, seconds=2.0),
        Outcome("fsdp 8", "loss", Status.PASSED, seconds=1.0),
        Outcome("fsdp 8", "resumed", Status.PASSED, seconds=0.5),
        Outcome("model 8", "compiled", Status.SKIPPED, "4 heads"),
    )
    assert made.status is Status.PASSED
    table = made.tables()[1]
    assert table.columns[:3] == ("mesh", "loss", "gradients")
    assert table.rows[0][:3] == ["fsdp 8", "same", ""]
    assert table.rows[0][-1] == "3.5"
    assert table.rows[1][:3] == ["model 8", "-", "-"]
    assert "Not checked: model 8, compiled: 4 heads" in made.lines()
    assert made.lines()[-1].startswith("1 of 2 meshes: same")


def test_a_number_within_the_rounding_of_a_scheme_is_not_the_same():
    made = report(Outcome("fsdp 8", "loss", Status.PASSED, "within the rounding of FP8"))
    assert made.tables()[1].rows[0][:2] == ["fsdp 8", "rounded"]
    assert "Rounded: fsdp 8, loss: within the rounding of FP8" in made.lines()


def test_a_failure_is_the_last_line_and_the_status():
    made = report(
        Outcome("fsdp 8", "compiled", Status.PASSED),
        Outcome("fsdp 8", "gradients", Status.FAILED, "w[0] is 2, expected 1"),
    )
    assert made.status is Status.FAILED
    assert made.lines()[-1] == "FAILED: fsdp 8, gradients: w[0] is 2, expected 1"
    text = made.to_markdown()
    assert "| fsdp 8 |  | DIFFERS |" in text
    assert "| `model.dim` | `2048` | `16` |" in text


def test_no_mesh_at_all_is_no_success():
    made = report(
        Outcome("1 device", "compiled", Status.PASSED),
        Outcome("fsdp 8", "compiled", Status.SKIPPED, "no"),
        Outcome("model 8", "compiled", Status.SKIPPED, "no"),
    )
    assert made.status is Status.SKIPPED
    assert "nothing was verified" in made.lines()[-1]


def test_a_mesh_that_was_only_begun_does_not_count():
    made = report(
        Outcome("1 device", "exported", Status.PASSED),
        Outcome("fsdp 8", "resumed", Status.SKIPPED, "no checkpointer"),
        Outcome("model 8", "compiled", Status.PASSED),
    )
    assert made.status is Status.SKIPPED
    assert made.lines()[-1].startswith("1 of 2 meshes: same")
    assert "then stopped" in made.lines()[-1]


def test_a_requested_mesh_has_to_pass_and_is_named():
    made = report(
        Outcome("fsdp 8", "resumed", Status.PASSED),
        Outcome("model 8", "compiled", Status.SKIPPED, "4 heads"),
    )
    assert made.status is Status.PASSED
    made.requested = True
    assert made.status is Status.SKIPPED
    assert any("requested: model 8" in line for line in made.lines())


def test_tracebacks_are_in_the_report():
    made = report(Outcome("fsdp 8", "loss", Status.FAILED, "KeyError: 'x'", traceback="Trace x"))
    assert "Trace x" in made.to_markdown()
