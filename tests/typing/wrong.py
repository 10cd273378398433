"""Mistakes that type checkers find: each line names the rules of pyrefly and of pyright."""

import moelib
from moelib.core.config import config_for_function
from moelib.models.causal_lm import CausalLM
from moelib.train.trainer import SpmdTrainer
from tests.typing.right import Ffn, half

Ffn.default_config().set(input_dims=8)  # unexpected-keyword, reportCallIssue
Ffn.default_config().set(input_dim="8")  # bad-argument-type, reportArgumentType
Ffn.default_config().clone(inputdim=8)  # unexpected-keyword, reportCallIssue
Ffn.Config(actt="gelu")  # unexpected-keyword, reportCallIssue
text: str = Ffn.default_config().input_dim  # bad-assignment, reportAssignmentType
SpmdTrainer.default_config().learner.set(optimiser=3)  # unexpected-keyword, reportCallIssue
CausalLM.default_config().set(vocab_size="8")  # bad-argument-type, reportArgumentType
SpmdTrainer.default_config().set(watcher={})  # unexpected-keyword, reportCallIssue
moelib.fit(SpmdTrainer.default_config(), max_step="10")  # bad-argument-type, reportArgumentType
steps: str = moelib.fit(SpmdTrainer.default_config()).step  # bad-assignment, reportAssignmentType
name: str = config_for_function(half).instantiate()  # bad-assignment, reportAssignmentType
config_for_function(3)  # bad-argument-type, reportArgumentType
