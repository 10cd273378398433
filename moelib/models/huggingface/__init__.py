"""Models of Hugging Face transformers: their configs as ours, their tensors as our parameters.

One file a family says two things: how its config.json reads as a `CausalLM.Config` and back, and
where each of its tensors stands in our parameters. `families` finds a family; `tensors` moves
weights, one tensor at a time.
"""
