"""The parts of lm-eval that `LmEvalModel` uses, for tests where lm-eval is not installed.

They have the names, arguments and defaults of lm-eval 0.4.13, and nothing that runs a task.
"""

import sys
import types


class Instance:
    """A request of a task."""

    def __init__(self, *args):
        self.args = args


class TemplateLM:
    """The base class of models."""

    eot_token_id: int
    prefix_token_id: int

    def tok_encode(self, string, add_special_tokens=None, **kwargs):
        raise NotImplementedError

    def _loglikelihood_tokens(self, requests, disable_tqdm=False):
        raise NotImplementedError

    def loglikelihood(self, requests, disable_tqdm=False):
        """Encodes pairs whose context is not empty and has no space at its end."""
        encoded = []
        for context, continuation in (request.args for request in requests):
            context_ids, whole = self.tok_encode(context), self.tok_encode(context + continuation)
            encoded.append(((context, continuation), context_ids, whole[len(context_ids) :]))
        return self._loglikelihood_tokens(encoded, disable_tqdm=disable_tqdm)


def normalize_gen_kwargs(gen_kwargs, default_max_gen_toks=256):
    """Returns the settings of generation under one set of names."""
    settings = dict(gen_kwargs)
    until = settings.get("until", [])
    settings["until"] = until if isinstance(until, list) else [until]
    given = [settings.pop(name, None) for name in ("max_gen_toks", "max_new_tokens", "max_tokens")]
    settings["max_gen_toks"] = next((n for n in given if n is not None), default_max_gen_toks)
    settings["temperature"] = float(settings.get("temperature", 0.0))
    settings.setdefault("do_sample", settings["temperature"] > 0)
    return settings


class TaskManager:
    """Knows tasks by their name."""

    def __init__(self, include_path=None, include_defaults=True):
        self.all_tasks = ["own"] if include_path else []
        self.all_tasks += ["arc_easy", "piqa"] if include_defaults else []


def simple_evaluate(**settings):
    """Returns the results of tasks that are known without a model."""
    return {
        "results": {name: {"acc,none": 0.5, "acc_stderr,none": "N/A"} for name in settings["tasks"]}
    }


def install():
    """Makes the modules of lm-eval importable."""
    contents = {
        "lm_eval": {},
        "lm_eval.api": {},
        "lm_eval.api.instance": {"Instance": Instance},
        "lm_eval.api.model": {"TemplateLM": TemplateLM},
        "lm_eval.evaluator": {"simple_evaluate": simple_evaluate},
        "lm_eval.models": {},
        "lm_eval.models.utils": {"normalize_gen_kwargs": normalize_gen_kwargs},
        "lm_eval.tasks": {"TaskManager": TaskManager},
    }
    for name, members in contents.items():
        module = types.ModuleType(name)
        vars(module).update(members)
        sys.modules[name] = module
