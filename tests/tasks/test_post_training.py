"""Preferences and rewards: what a run learns, what is recorded, and what is refused."""

import dataclasses
import http.server
import json
import math
import pathlib
import shutil
import threading
import time

import numpy as np
import pytest

from moelib.core import trusted_code
from moelib.core.config import config_for_function
from moelib.core.errors import UserError
from moelib.data.tokens.tokenizer import ByteTokenizer
from moelib.inference.rollout import Rollout
from moelib.planning.plan import plan
from moelib.runs.folder import SAMPLE
from moelib.tasks.fine_tuning import FineTuning
from moelib.tasks.finetune import finetune_config
from moelib.tasks.fit import fit
from moelib.tasks.openai_sampler import OpenAISampler, ServerError
from moelib.tasks.rollout_input import RewardError, RolloutInput, write_stop_ids
from moelib.tasks.rollout_samples import RolloutSamples
from tests.tasks.base_model import save_base


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Returns a folder with a model and records."""
    root = tmp_path_factory.mktemp("base")
    save_base(root / "model")
    pairs = [
        {"prompt": f"{i}?", "chosen": f"yes {i}", "rejected": f"no, not {i}"} for i in range(9)
    ]
    lines = {"pairs": pairs, "prompts": [{"prompt": f"{i}?", "wanted": "e"} for i in range(5)]}
    for name, records in lines.items():
        (root / f"{name}.jsonl").write_text("".join(json.dumps(x) + "\n" for x in records))
    return root


def settings(folder, trainer_dir, objective, **fields):
    data = folder / ("pairs.jsonl" if objective == "dpo" else "prompts.jsonl")
    base = {"max_step": 4, "batch_size": 8, "seq_len": 64, "lr": 1e-2, "dtype": "float32"}
    base |= {"chat_template": "plain", "full": True}
    if objective != "dpo":
        base |= {"group_size": 4, "max_new_tokens": 6, "reward": f"{__name__}:share_of_letters"}
    return FineTuning(
        model=str(folder / "model"),
        data=str(data),
        trainer_dir=str(trainer_dir),
        objective=objective,
        **base | fields,
    )


def share_of_letters(prompts, completions, wanted):
    """Returns the share of ASCII letters in each answer; a reward."""
    assert prompts[0][0]["role"] == "user"
    assert wanted == ["e"] * len(completions)
    return [sum(x.isascii() and x.isalpha() for x in text) / 3 for text in completions]


def metrics_of(settings):
    """Returns the metrics of all steps of a run."""
    fit(finetune_config(settings).set(log_every_n_steps=1))
    lines = (pathlib.Path(settings.trainer_dir) / "metrics.jsonl").read_text().splitlines()
    return [found for line in lines if "loss" in (found := json.loads(line))]


@pytest.mark.parametrize("full", [pytest.param(True, marks=pytest.mark.slow), False])
def test_preferences_begin_at_the_reference_and_are_learned(folder, tmp_path, full):
    steps = metrics_of(settings(folder, tmp_path / "run", "dpo", full=full, max_step=8))
    assert steps[0]["loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert steps[0]["margin"] == pytest.approx(0, abs=1e-4)
    assert "tokens_per_second" not in steps[-1]
    assert steps[-1]["examples_per_second"] == pytest.approx(
        steps[-1]["num_tokens"] / steps[-1]["step_seconds"], rel=1e-6
    )
    assert steps[-1]["margin"] > 1
    assert steps[-1]["accuracy"] == 1
    assert steps[-1]["loss"] < 0.6


@pytest.mark.parametrize("objective", ["grpo", pytest.param("gspo", marks=pytest.mark.slow)])
def test_rewards_rise_and_the_sampler_agrees_with_the_trainer(folder, tmp_path, objective):
    steps = metrics_of(
        settings(folder, tmp_path, objective, max_step=20, batch_size=64, lr=3e-2, max_new_tokens=3)
    )
    assert all(x["mismatch"] < 1e-5 for x in steps)
    replaced = [name for name in steps[0] if "replaced" in name]
    assert len(replaced) == 2
    assert all(x[name] < 0.01 for x in steps for name in replaced)
    assert ("examples_per_second" in steps[-1]) is (objective == "gspo")
    assert steps[0]["reward"] < 0.3
    assert steps[-1]["reward"] > 0.8


def test_a_resumed_run_draws_the_same_answers_and_shows_them(folder, tmp_path, capsys):
    fields = {"max_step": 4, "max_new_tokens": 3, "steps_per_rollout": 2}
    whole = metrics_of(settings(folder, tmp_path / "whole", "grpo", **fields))
    lines = (tmp_path / "whole/events.jsonl").read_text().splitlines()
    shown, events = "".join(capsys.readouterr()), map(json.loads, lines)
    best, worst = [x for x in events if x["event"] == SAMPLE]
    for x in (best, worst):
        assert x["prompt"] in [f"{i}?" for i in range(5)]
        assert x["reward"] == pytest.approx(
            share_of_letters([[{"role": "user"}]], [x["text"]], ["e"])[0]
        )
        assert f"step 4, reward {x['reward']:g}: " in shown
    assert best["reward"] >= worst["reward"]
    cut = settings(folder, tmp_path / "cut", "grpo", **fields)
    fit(finetune_config(cut).set(log_every_n_steps=1), max_step=2)
    resumed = metrics_of(cut)
    assert [x["step"] for x in resumed] == [1, 2, 3, 4]
    for name in ("loss", "reward", "mismatch", "gradient_norm"):
        assert [x[name] for x in resumed] == [x[name] for x in whole]
    assert whole[1]["mismatch"] < 1e-5  # Against the log probabilities before the first step.


# -- What ends a run, and what samplers and rewards must give ------------------------------------


PROMPT = {
    "ids": [72, 63],
    "messages": [{"role": "user", "content": "H?"}],
    "columns": {"wanted": "e"},
}


def prompts_folder(folder, lines=(PROMPT,)):
    """Writes prompts of a byte tokenizer into a folder."""
    ByteTokenizer.default_config().instantiate().save(str(folder))
    (folder / "prompts.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    return str(folder)


def canned(answers):
    """Returns a sampler that gives these texts."""

    def sample(prompts, seeds):
        assert len(prompts) == len({*seeds})
        return [Rollout([*text.encode()], [-0.5] * len(text)) for text in answers]

    return sample


def rollout_input(folder, answers=("a", "bb", "cc", "d"), **fields):
    fields = {"group_size": 4, "max_new_tokens": 3, "seq_len": 8, "global_batch_size": 4} | fields
    fields = {"experts": []} | fields
    cfg = RolloutInput.default_config().set(path=prompts_folder(folder), **fields)
    cfg.sampler = config_for_function(canned).set(answers=list(answers))
    opened = cfg.instantiate()
    opened.policy = lambda: (None, None)
    return opened


def length(prompts, completions, wanted):
    return [len(text) for text in completions]


def ones(prompts, completions, wanted):
    return [1] * len(completions)


def nan(prompts, completions, wanted):
    return [math.nan] * len(completions)


def narrow(completions):
    return [0.0] * len(completions)


def too_few(prompts, completions, wanted):
    return [0.0]


def raises(prompts, completions, wanted):
    raise ZeroDivisionError("no")


def hangs(prompts, completions, wanted):
    time.sleep(5)


def test_rows_hold_answers_with_the_advantages_of_their_groups(tmp_path):
    batch = rollout_input(tmp_path, reward=f"{__name__}:length").batch(0, range(4))
    np.testing.assert_array_equal(batch["input_ids"][1][:3], [72, 63, ord("b")])
    labels = [[-1, 97, -1], [-1, 98, 98], [-1, 99, 99], [-1, 100, -1]]
    np.testing.assert_array_equal(batch["target_labels"][:, :3], labels)
    np.testing.assert_array_equal(batch["segment_ids"].sum(1), [2, 3, 3, 2])
    np.testing.assert_allclose(batch["sampler_log_probs"][1][:4], [0, -0.5, -0.5, 0])
    deviation = 1 / np.sqrt(3)  # Of 1, 2, 2, 1 with 3 degrees of freedom.
    np.testing.assert_allclose(
        batch["advantages"], np.array([-0.5, 0.5, 0.5, -0.5]) / deviation, rtol=1e-3
    )


def test_damaged_prompts_are_named_and_changed_ones_are_other_data(tmp_path):
    made = rollout_input(tmp_path, reward=f"{__name__}:length")
    other = json.dumps(PROMPT | {"ids": [72]})
    (tmp_path / "prompts.jsonl").write_text(other + "\n")
    assert made.config.instantiate().identity != made.identity
    for line in ("{", "3", '{"ids": ["a"]}', "{}"):
        (tmp_path / "prompts.jsonl").write_text(f"{other}\n{line}\n")
        with pytest.raises(UserError, match=r"prompts\.jsonl:2 is no prompt .* delete the folder"):
            made.config.instantiate()


def test_another_number_of_answers_goes_on_with_the_next_prompt(tmp_path):
    def opened(size, steps=1):
        fields = {"global_batch_size": size, "steps_per_rollout": steps}
        fields |= {"answers": "a" * size * steps, "reward": f"{__name__}:ones"}
        cfg = rollout_input(tmp_path, **fields).config
        prompts_folder(tmp_path, [PROMPT | {"ids": [72, i]} for i in range(6)])
        source = cfg.instantiate()
        source.policy = lambda: (None, None)
        source._log_probs = lambda policy, batch: batch["sampler_log_probs"]
        return source.iterator()

    asked = lambda batches: next(batches)["input_ids"][::4, 1].tolist()
    want, seen, state = asked(opened(24)), [], {}
    # The first rollout has two prompts, of which one is in its first step.
    for size, steps in ((4, 2), (8, 1), (16, 1)):
        batches = opened(size, steps)
        batches.follow(state)
        seen += asked(batches)
        state = batches.state()
    assert seen[:5] == [want[0], *want[2:]]
    assert state["step"] == 3


def test_answers_with_equal_rewards_teach_nothing(tmp_path):
    batch = rollout_input(tmp_path, reward=f"{__name__}:ones").batch(0, range(4))
    assert np.all(batch["target_labels"] == -1)
    assert batch["rewards"].tolist() == [1] * 4


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"answers": "aaaa", "experts": [2, 4, 1]}, "without the experts"),
        ({"answers": "aaa"}, "gave 3 answers"),
        ({"answers": ["four", "a", "a", "a"]}, "of up to 4 tokens"),
    ],
)
def test_answers_of_another_sampler_must_fit(tmp_path, fields, message):
    with pytest.raises(UserError, match=message):
        rollout_input(tmp_path, reward=f"{__name__}:ones", **fields).batch(0, range(4))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nan", "gave nan to the completion 'a'"),
        ("too_few", r"returned \[0.0\]; return a list of 4"),
        ("raises", "raised ZeroDivisionError: no"),
        ("hangs", "took longer than reward_seconds=0.2"),
    ],
)
def test_rewards_that_are_no_numbers_are_refused(tmp_path, name, message):
    opened = rollout_input(tmp_path, reward=f"{__name__}:{name}", reward_seconds=0.2)
    with pytest.raises(RewardError, match=message):
        opened.batch(0, range(4))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"group_size": 1}, "group_size=1: set it to 2 or more"),
        ({"group_size": 3}, "a divisor of the 4 answers"),
        ({"seq_len": 3}, "set seq_len to 4 or more"),
        ({"reward": "os:system"}, "standard library"),
        ({"reward": f"{__name__}:absent"}, "absent"),
        (
            {"reward": f"{__name__}:narrow"},
            r"\(completions\): .*\(prompts, completions, wanted\)",
        ),
    ],
)
def test_settings_that_do_not_fit_are_refused(tmp_path, fields, message):
    with pytest.raises(UserError, match=message):
        rollout_input(tmp_path, **{"reward": f"{__name__}:ones"} | fields)


def test_a_field_with_the_name_of_an_argument_is_refused_before_answers_are_drawn(tmp_path):
    cfg = rollout_input(tmp_path, reward=f"{__name__}:ones").config
    prompts_folder(tmp_path, [PROMPT | {"columns": {"wanted": "e", "completions": ["x"]}}])
    with pytest.raises(UserError, match=r"records have the field 'completions', .* rename"):
        cfg.instantiate()


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "chosen and rejected are the same"),
        ({"prompt": "a", "chosen": "b"}, "not rejected"),
        ({"chosen": "b", "rejected": "c"}, "chosen is a text; add a prompt"),
        ({"prompt": "a", "chosen": "b", "rejected": " "}, "an empty message"),
        ({"prompt": "a", "chosen": "b", "rejected": "\ud800"}, "half a surrogate pair"),
    ],
)
def test_pairs_of_no_use_are_named(folder, tmp_path, record, message):
    (tmp_path / "pairs.jsonl").write_text(json.dumps(record))
    given = settings(folder, tmp_path / "run", "dpo")
    with pytest.raises(UserError, match=message):
        finetune_config(dataclasses.replace(given, data=str(tmp_path / "pairs.jsonl")))


@pytest.mark.parametrize("objective", ["dpo", "grpo"])
def test_wrong_records_are_errors_or_skipped_and_counted(folder, tmp_path, capsys, objective):
    given = settings(folder, tmp_path / "run", objective)
    answered = {"prompt": [{"role": role, "content": "a"} for role in ("user", "assistant")]}
    lines = pathlib.Path(given.data).read_text() + json.dumps(answered) + '\n{"prompt": 3}\n{\n'
    (tmp_path / "mixed.jsonl").write_text(lines)
    given = dataclasses.replace(given, data=str(tmp_path / "mixed.jsonl"))
    first = lines.count("\n") - 2
    with pytest.raises(UserError, match=rf"jsonl:{first}: .*; correct it, or set skip_bad_lines"):
        finetune_config(given)
    finetune_config(dataclasses.replace(given, skip_bad_lines=True))
    assert "3 records left out (" in (out := capsys.readouterr().out)
    assert f"); the first: {tmp_path / 'mixed.jsonl'}:{first}: " in out


def test_an_input_without_answers_has_none_to_show(folder, tmp_path):
    cfg = finetune_config(settings(folder, tmp_path / "run", "dpo"))
    cfg.watchers["answers"] = RolloutSamples.default_config()
    with pytest.raises(UserError, match=r"watchers\.answers: the input draws no answers"):
        fit(cfg)


@pytest.mark.parametrize("objective", ["dpo", "grpo"])
def test_a_plan_says_that_answers_are_not_counted(folder, tmp_path, objective):
    cfg = finetune_config(settings(folder, tmp_path / "run", objective))
    table = plan(cfg, "v6e:2x2", current_mesh=True).table()
    assert (table.footnotes[-1].startswith("The answers")) is (objective == "grpo")


@pytest.mark.parametrize(("end", "warns"), [("THE END", True), ("e", False)])
def test_an_end_of_answers_in_several_tokens_is_named(folder, tmp_path, caplog, end, warns):
    template = tmp_path / "template.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}" + end + "\n{% endfor %}")
    run = tmp_path / "run"
    finetune_config(settings(folder, run, "grpo", chat_template=str(template)))
    assert (f"{end!r}, which is 7 tokens" in caplog.text) is warns


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"reward": "absent_here:f"}, "no module absent_here here; set reward"),
        ({"reward": "broken_reward:f"}, r"broken_reward cannot be imported \(NameError"),
        ({"reward": "broken_reward"}, "set it to module:function"),
        ({"reward": "some_reward:absent"}, "reward: .*: some_reward has no 'absent'"),
        (
            {"reward": "some_reward:number"},
            "reward: .*number' of type int; name a class or a function",
        ),
        ({"max_new_tokens": 64}, "max_new_tokens=64 leaves no room .* seq_len=64"),
    ],
)
def test_rewards_without_a_function_are_refused_before_the_data(
    folder, tmp_path, monkeypatch, fields, message
):
    (tmp_path / "broken_reward.py").write_text("nothing_of_this_name")
    (tmp_path / "some_reward.py").write_text("number = 3")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(trusted_code, "_folders", {str(tmp_path)})  # As the command allows its own.
    with pytest.raises(UserError, match=message):
        finetune_config(settings(folder, tmp_path / "run", "grpo", **fields))
    assert not (tmp_path / "run.data").exists()


def test_data_of_another_request_are_not_used(folder, tmp_path):
    finetune_config(settings(folder, tmp_path / "run", "grpo"))
    with pytest.raises(UserError, match="made with another seq_len"):
        finetune_config(settings(folder, tmp_path / "run", "grpo", seq_len=65))
    with pytest.raises(UserError, match="made with another max_new_tokens"):
        finetune_config(settings(folder, tmp_path / "run", "grpo", max_new_tokens=5))
    with pytest.raises(UserError, match="needs a reward"):
        finetune_config(settings(folder, tmp_path / "run", "grpo", reward=None))


def test_the_reference_of_other_weights_at_the_same_path_is_not_used(folder, tmp_path):
    save_base(tmp_path / "model")
    given = settings(folder, tmp_path / "run", "dpo")
    given = dataclasses.replace(given, model=str(tmp_path / "model"))
    for _ in range(2):
        finetune_config(given)
    shutil.rmtree(tmp_path / "model")
    save_base(tmp_path / "model", seed=1)
    with pytest.raises(UserError, match=r"run\.data was made with another model"):
        finetune_config(given)


# -- A server --------------------------------------------------------------------------------------


class _Server(http.server.BaseHTTPRequestHandler):
    answers = []  # Of the requests, in order: (status, content).

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append(body)
        status, content = self.server.answers.pop(0)
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(content).encode())

    def log_message(self, format, *args):
        pass


@pytest.fixture
def server():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Server) as running:
        running.bodies, running.answers = [], []
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield running
        running.shutdown()


def ask(server, **fields):
    cfg = OpenAISampler.default_config().set(
        url=f"http://127.0.0.1:{server.server_port}", model="m", max_new_tokens=3, num_retries=1
    )
    return cfg.set(**fields).instantiate()([[5, 6]], [7])


def completion(**fields):
    choice = {"token_ids": [1, 2], "logprobs": {"token_logprobs": [-0.1, -0.2]}}
    return {"choices": [choice | {"finish_reason": "stop"} | fields]}


def test_a_server_gives_answers_and_their_experts(server):
    experts = {"routed_experts": [[[2, 3]], [[4, 5]]]}
    given = completion(**experts) | {"prompt_routed_experts": [[[0, 1]], [[1, 0]]]}
    server.answers += [(503, {}), (200, given)]
    (found,) = ask(server, with_experts=True)
    assert found[:2] == ([1, 2], [-0.1, -0.2])
    assert found.expert_ids.tolist() == [[[0, 1]], [[1, 0]], [[2, 3]]]
    body = server.bodies[1]
    assert (body["prompt"], body["temperature"], body["seed"]) == ([5, 6], 1.0, 7)
    # The defaults of generation_config.json at vLLM, each without an effect.
    plain = {"top_k": -1, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
    assert body.items() >= plain.items()


def test_a_server_ends_answers_where_the_chat_template_does(server, tmp_path):
    cfg = rollout_input(tmp_path, reward=f"{__name__}:ones").config.clone()
    write_stop_ids(str(tmp_path), [10])
    sampler = OpenAISampler.default_config().set(model="m", max_new_tokens=3, stop_ids=[11])
    cfg.sampler = sampler.set(url=f"http://127.0.0.1:{server.server_port}")
    server.answers += [(200, completion())] * 4
    opened = cfg.instantiate()
    opened.policy = lambda: (None, None)
    opened.batch(0, range(4))
    assert [body["stop_token_ids"] for body in server.bodies] == [[10, 11, 256]] * 4


@pytest.mark.parametrize(
    ("answer", "fields", "message"),
    [
        ((200, completion(token_ids=None)), {}, "returns token_ids and logprobs"),
        ((200, completion()), {"with_experts": True}, "prompt_routed_experts"),
        ((200, completion(token_ids=[1])), {}, "1 tokens and 2 log probabilities"),
        ((404, {"error": "no such model"}), {}, "404: .*no such model"),
    ],
)
def test_a_server_without_what_training_needs_is_refused(server, answer, fields, message):
    server.answers.append(answer)
    with pytest.raises(ServerError, match=message):
        ask(server, **fields)
