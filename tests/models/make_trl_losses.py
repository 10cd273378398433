"""Prints losses and gradients of TRL for fixed inputs, as JSON; run by a Python that has TRL.

PYTHON -m tests.models.make_trl_losses > tests/models/trl_losses.json
"""

import json
import sys
import types
from unittest import mock

import numpy as np
import torch
from trl.trainer.dpo_trainer import DPOTrainer
from trl.trainer.grpo_trainer import GRPOTrainer

SHAPE = B, S = 6, 9
GRPO = {  # Arguments of `policy_loss`: those of TRL.
    "dapo": {"loss_type": "dapo", "importance_sampling_level": "token", "clip": (0.2, 0.28)},
    "grpo": {"loss_type": "grpo", "importance_sampling_level": "token", "clip": (0.2, 0.2)},
    "grpo_kl": {
        "loss_type": "grpo",
        "importance_sampling_level": "token",
        "clip": (0.2, 0.2),
        "beta": 0.04,
    },
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence", "clip": (3e-4, 4e-4)},
}


def inputs():
    """Returns random log probabilities, advantages and a mask of answers of several lengths."""
    rng = np.random.default_rng(0)
    log_probs = -rng.exponential(1.0, SHAPE)
    mask = np.arange(S) < rng.integers(1, S + 1, B)[:, None]
    return {
        "log_probs": log_probs,
        "old": log_probs + rng.normal(0, 0.2, SHAPE),
        "reference": log_probs + rng.normal(0, 0.3, SHAPE),
        "advantages": rng.normal(0, 1, B),
        "mask": mask,
    }


def a_trainer():
    """Returns an object with the attributes of a trainer, on one device."""
    trainer = mock.MagicMock()
    trainer.accelerator.gather.side_effect = lambda x: x
    trainer.accelerator.gather_for_metrics.side_effect = lambda x: x
    trainer.accelerator.device = "cpu"
    return trainer


def of_grpo(values, *, loss_type, importance_sampling_level, clip, beta=0.0):
    """Returns the loss and the gradient of the log probabilities."""
    tensors = {name: torch.tensor(x) for name, x in values.items()}
    leaf = tensors["log_probs"].requires_grad_()
    trainer = a_trainer()
    trainer.args = types.SimpleNamespace(delta=None, use_bias_correction_kl=False)
    trainer.args.steps_per_generation = 1
    trainer.loss_type, trainer.beta = loss_type, beta
    trainer.importance_sampling_level = importance_sampling_level
    trainer.epsilon_low, trainer.epsilon_high = clip
    trainer.top_entropy_quantile, trainer.off_policy_mask_threshold = 1.0, None
    trainer.use_vllm, trainer.aux_loss_enabled = False, False
    trainer._entropy_bonus_enabled = trainer.use_adaptive_entropy = False
    trainer.current_gradient_accumulation_steps = trainer.accelerator.num_processes = 1
    trainer._get_per_token_logps_and_entropies.return_value = (leaf, torch.zeros(SHAPE), None)
    ids = torch.zeros(SHAPE, dtype=torch.long)
    batch = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": ids[:, :1] + 1,
        "completion_ids": ids,
        "completion_mask": tensors["mask"].long(),
        "advantages": tensors["advantages"],
        "old_per_token_logps": tensors["old"],
        "ref_per_token_logps": tensors["reference"],
        "num_items_in_batch": tensors["mask"].sum(),
    }
    loss = GRPOTrainer._compute_loss(trainer, mock.MagicMock(), batch)
    loss.backward()
    return {"loss": loss.item(), "gradient": leaf.grad.tolist()}


def of_dpo(values):
    """Returns the mean loss of pairs, the first half of the answers being the preferred ones."""
    tensors = {name: torch.tensor(x) for name, x in values.items()}
    masked = (tensors["log_probs"] * tensors["mask"]).requires_grad_()
    # TRL reads probabilities of tokens from the second on.
    reference = (tensors["reference"] * tensors["mask"]).sum(1)
    trainer = a_trainer()
    trainer.ld_alpha, trainer.precompute_ref_logps, trainer.beta = None, True, 0.1
    trainer.f_divergence_type, trainer.loss_types = "reverse_kl", ["sigmoid"]
    trainer.loss_weights, trainer.use_weighting, trainer.aux_loss_enabled = [1.0], False, False
    batch = {
        "input_ids": torch.zeros((B, S + 1), dtype=torch.long),
        "attention_mask": torch.ones((B, S + 1), dtype=torch.long),
        "completion_mask": torch.nn.functional.pad(tensors["mask"].long(), (1, 0)),
        "ref_chosen_logps": reference[: B // 2],
        "ref_rejected_logps": reference[B // 2 :],
    }
    zeros = torch.zeros(SHAPE)
    others = dict.fromkeys(("mean_logits", "entropy"), zeros) | {"is_top1": zeros.bool()}
    outputs = mock.MagicMock(log_probs=masked, **others)
    loss = DPOTrainer._compute_loss(trainer, lambda **_: outputs, batch, False)
    loss.backward()
    return {"loss": loss.item(), "gradient": masked.grad.tolist()}


def main():
    """Prints the inputs and the results."""
    values = inputs()
    results = {name: of_grpo(values, **settings) for name, settings in GRPO.items()}
    results["dpo"] = of_dpo(values)
    found = {name: x.tolist() for name, x in values.items()}
    json.dump({"inputs": found, "results": results}, sys.stdout)
    print()


if __name__ == "__main__":
    main()
