"""Makes the fixture of multi-token prediction: a tiny DeepSeek-V3 with two modules, and its losses.

Run it in a Python that has torch and transformers; it writes the folder multi_token/:

    python -m tests.huggingface.make_multi_token

transformers does not read these modules. They are written here from the equations of section 2.2
of arXiv:2412.19437, document by document, around transformers' decoder layer. The order of the two
inputs of `eh_proj` is that of the published weights. expected.safetensors holds

    input_ids, position_ids, segment_ids, labels   [B, S] as in the fixtures of families
    loss.K                                         mean cross-entropy of depth K
    grad.KEY                                       of the objective, for each tensor
"""

import json
import pathlib
import sys

import torch
from safetensors.torch import load_file, save_file

from tests.huggingface.make_fixtures import batch, build

FOLDER = pathlib.Path(__file__).parent / "multi_token"
NUM_DEPTHS, WEIGHT = 2, 0.3


class Module(torch.nn.Module):
    """The parameters of a depth, by the names of the published checkpoint."""

    def __init__(self, model):
        super().__init__()
        config, deepseek = model.config, sys.modules[type(model).__module__]
        dim, norm = config.hidden_size, deepseek.DeepseekV3RMSNorm
        self.enorm, self.hnorm = norm(dim, config.rms_norm_eps), norm(dim, config.rms_norm_eps)
        self.eh_proj = torch.nn.Linear(2 * dim, dim, bias=False)
        self.block = deepseek.DeepseekV3DecoderLayer(config, config.num_hidden_layers)
        self.norm = norm(dim, config.rms_norm_eps)
        with torch.no_grad():
            for name, tensor in [*self.named_parameters(), *self.named_buffers()]:
                if "norm" in name:
                    tensor.uniform_(0.5, 1.5)
                elif "bias" in name:
                    tensor.uniform_(-0.5, 0.5)
                else:
                    tensor.normal_(0, tensor.shape[-1] ** -0.5)

    def tensors(self):
        """Returns the tensors that are this depth's own, by name."""
        names = {"block.": "", "norm.weight": "shared_head.norm.weight"}
        for name, tensor in [*self.named_parameters(), *self.named_buffers()]:
            for old, new in names.items():
                if name.startswith(old):
                    name = new + name.removeprefix(old)
                    break
            yield name, tensor


def depths(model, modules, ids, hidden):
    """Returns the sum of the losses of each depth over one document, and their number."""
    for k, module in enumerate(modules, 1):
        if len(ids) < k + 1:
            break
        hidden = hidden[: len(ids) - k]
        embedded = model.model.embed_tokens(ids[k:])
        x = module.eh_proj(torch.cat([module.enorm(embedded), module.hnorm(hidden)], -1))[None]
        size = x.shape[1]
        later = torch.full((size, size), -torch.inf).triu(1)[None, None]
        rope = model.model.rotary_emb(x, position_ids=torch.arange(size)[None])
        out = module.block(x, attention_mask=later, position_embeddings=rope)
        hidden = module.norm(out[0] if out.ndim == 3 else out[0][0])
        logits, targets = model.lm_head(hidden[:-1]), ids[k + 1 :]
        yield k, torch.nn.functional.cross_entropy(logits, targets, reduction="sum"), len(targets)


def main():
    model = build("deepseek_v3")
    modules = [Module(model) for _ in range(NUM_DEPTHS)]
    ids, positions, segments = batch()
    labels = ids.clone()
    labels[1, 7] = -100
    hidden = model.model(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state
    loss = model(input_ids=ids, position_ids=positions, labels=labels, use_cache=False).loss
    sums, counts = dict.fromkeys((1, 2), 0.0), dict.fromkeys((1, 2), 0)
    for row, document in ((0, 1), (1, 1), (1, 2)):
        own = segments[row] == document
        for k, total, num in depths(model, modules, ids[row, own], hidden[row, own]):
            sums[k], counts[k] = sums[k] + total, counts[k] + num
    objective = loss + WEIGHT / NUM_DEPTHS * sum(sums.values()) / ids.numel()
    objective.backward()
    FOLDER.mkdir(exist_ok=True)
    model.save_pretrained(FOLDER)
    (FOLDER / "generation_config.json").unlink(missing_ok=True)
    config = json.loads((FOLDER / "config.json").read_text())
    config["num_nextn_predict_layers"] = NUM_DEPTHS
    (FOLDER / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    tensors = load_file(FOLDER / "model.safetensors")
    made = {"input_ids": ids, "position_ids": positions, "segment_ids": segments, "labels": labels}
    made |= {f"loss.{k}": sums[k].detach() / counts[k] for k in sums}
    shared = {
        "embed_tokens.weight": "model.embed_tokens.weight",
        "shared_head.head.weight": "lm_head.weight",
    }
    for name in shared.values():
        made[f"grad.{name}"] = model.get_parameter(name).grad
    for depth, module in enumerate(modules):
        prefix = f"model.layers.{model.config.num_hidden_layers + depth}."
        tensors |= {prefix + copy: tensors[name].clone() for copy, name in shared.items()}
        for name, tensor in module.tensors():
            experts = {"mlp.experts.gate_up_proj": ("gate_proj", "up_proj")}
            if name in experts or name == "mlp.experts.down_proj":
                for e in range(len(tensor)):
                    parts = tensor[e].chunk(2) if name in experts else [tensor[e]]
                    grads = tensor.grad[e].chunk(2) if name in experts else [tensor.grad[e]]
                    for part, grad, x in zip(
                        experts.get(name, ["down_proj"]), grads, parts, strict=True
                    ):
                        key = f"{prefix}mlp.experts.{e}.{part}.weight"
                        tensors[key], made[f"grad.{key}"] = x, grad
                continue
            tensors[prefix + name] = tensor
            if getattr(tensor, "grad", None) is not None:
                made[f"grad.{prefix}{name}"] = tensor.grad
    own = lambda values: {n: x.detach().clone().contiguous() for n, x in values.items()}
    save_file(own(tensors), FOLDER / "model.safetensors", metadata={"format": "pt"})
    save_file(own(made), FOLDER / "expected.safetensors")
    print({n: float(x) for n, x in made.items() if n.startswith("loss")}, counts)


if __name__ == "__main__":
    main()
