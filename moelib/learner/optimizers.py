"""Optimizers, on Optax: functions whose configs stand in `Learner.Config.optimizer`.

    config_for_function(adamw_optimizer).set(
        learning_rate=config_for_function(schedules.wsd).set(peak_lr=3e-4, ...),
        b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.1)

Shared arguments:
    learning_rate: A number, or a schedule whose first update is step 1 (moelib.learner.schedules).
    weight_decay: Decoupled: each update also takes learning_rate * weight_decay * scale of the
        parameter away, where the scale is the `weight_decay_scale` of its ParameterSpec (0 for
        biases and norms).
    weight_decay_per_param_scale: Replaces these scales: (regex of a path "a/b/c", scale), first
        match wins, a rule that matches nothing is an error; or a function of the spec, such as
        `transforms.matrices_only`.
    mu_dtype: Dtype of the first moment, float32 if None. Everything else is kept in float32.
    param_specs: The model's ParameterSpecs; the learner fills this in.
"""

from collections.abc import Sequence
from typing import Any

import optax
import optax.contrib

from moelib.core import tree
from moelib.core.param import ParameterSpec, is_spec, specs_by_path
from moelib.core.tree import Nested
from moelib.learner import factored, transforms
from moelib.learner.schedules import Schedule
from moelib.learner.transforms import PathScales


def sgd_optimizer(
    learning_rate: float | Schedule,
    *,
    momentum: float = 0.0,
    nesterov: bool = False,
    weight_decay: float = 0.0,
    weight_decay_per_param_scale: PathScales = (),
    mu_dtype: Any = None,
    param_specs: Nested | None = None,
) -> optax.GradientTransformation:
    """Returns stochastic gradient descent: m = momentum * m + g; p -= learning_rate * m.

    Raises:
        ValueError: If `nesterov` or `mu_dtype` is set but there is no momentum.
    """
    if not momentum and (nesterov or mu_dtype is not None):
        raise ValueError(
            f"sgd_optimizer: nesterov={nesterov} and mu_dtype={mu_dtype} do nothing at momentum 0; "
            "set momentum, or leave them out."
        )
    inner = optax.identity()
    if momentum:
        inner = optax.trace(momentum, nesterov=nesterov, accumulator_dtype=mu_dtype)
    decay = transforms.add_decayed_weights(
        weight_decay, per_param_scale=weight_decay_per_param_scale, param_specs=param_specs
    )
    return _descend(inner, learning_rate, decay)


def adam_optimizer(
    learning_rate: float | Schedule,
    *,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    mu_dtype: Any = None,
) -> optax.GradientTransformation:
    """Returns Adam, without weight decay. Source: Kingma and Ba, arXiv:1412.6980, algorithm 1."""
    return adamw_optimizer(learning_rate, b1=b1, b2=b2, eps=eps, mu_dtype=mu_dtype)


def adamw_optimizer(
    learning_rate: float | Schedule,
    *,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    weight_decay_per_param_scale: PathScales = (),
    mu_dtype: Any = None,
    param_specs: Nested | None = None,
) -> optax.GradientTransformation:
    """Returns AdamW as PyTorch, Megatron and Optax have it: the decay is times the learning rate.

    Args:
        learning_rate: See the top of this file, as for the other shared arguments.
        b1: Decay of the mean of gradients.
        b2: Decay of the mean of their squares.
        eps: Added to the root of the mean of squares.
        weight_decay: Strength of the decay.
        weight_decay_per_param_scale: Factors of the decay.
        mu_dtype: Dtype of the mean of gradients.
        param_specs: Filled in by the learner.

    Source: Loshchilov and Hutter, arXiv:1711.05101, algorithm 2.
    """
    decay = transforms.add_decayed_weights(
        weight_decay, per_param_scale=weight_decay_per_param_scale, param_specs=param_specs
    )
    adam = optax.scale_by_adam(b1=b1, b2=b2, eps=eps, mu_dtype=mu_dtype)
    return _descend(adam, learning_rate, decay)


def adamw_decoupled_optimizer(
    learning_rate: float,
    *,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    update_schedule: float | Schedule = 1.0,
    weight_decay: float = 0.0,
    weight_decay_per_param_scale: PathScales = (),
    mu_dtype: Any = None,
    param_specs: Nested | None = None,
) -> optax.GradientTransformation:
    """Returns AdamW as in its paper: p -= schedule * (learning_rate * adam + weight_decay * p).

    The decay does not change with the learning rate, so both can be tuned apart. The rate that the
    learner reports is schedule * learning_rate.

    Args:
        learning_rate: A number, the rate at a schedule of 1.
        b1: Decay of the mean of gradients.
        b2: Decay of the mean of their squares.
        eps: Added to the root of the mean of squares.
        update_schedule: Multiplies the whole update; a schedule with a peak of 1.
        weight_decay: Strength of the decay at a schedule of 1.
        weight_decay_per_param_scale: Factors of the decay.
        mu_dtype: Dtype of the mean of gradients.
        param_specs: Filled in by the learner.

    Raises:
        ValueError: If `learning_rate` is a schedule.

    Source: Loshchilov and Hutter, arXiv:1711.05101, algorithm 2.
    """
    if callable(learning_rate):
        raise ValueError(
            "adamw_decoupled_optimizer: learning_rate is a schedule; set it to a number, and "
            "update_schedule to the schedule with a peak of 1."
        )
    decay = transforms.add_decayed_weights(
        weight_decay, per_param_scale=weight_decay_per_param_scale, param_specs=param_specs
    )
    adam = optax.scale_by_adam(b1=b1, b2=b2, eps=eps, mu_dtype=mu_dtype)
    return optax.chain(
        transforms.in_float32(adam),
        optax.scale(learning_rate),
        decay,
        transforms.scale_by_learning_rate(update_schedule, reported_scale=learning_rate),
    )


def lion_optimizer(
    learning_rate: float | Schedule,
    *,
    b1: float = 0.9,
    b2: float = 0.99,
    weight_decay: float = 0.0,
    weight_decay_per_param_scale: PathScales = (),
    mu_dtype: Any = None,
    param_specs: Nested | None = None,
) -> optax.GradientTransformation:
    """Returns Lion: the sign of a mix of gradient (1 - b1) and momentum (b1, which decays by b2).

    Every element moves by the learning rate, so it is set 3 to 10 times lower than Adam's and the
    decay as many times higher. Source: Chen et al., arXiv:2302.06675, program 1.
    """
    decay = transforms.add_decayed_weights(
        weight_decay, per_param_scale=weight_decay_per_param_scale, param_specs=param_specs
    )
    lion = optax.scale_by_lion(b1=b1, b2=b2, mu_dtype=mu_dtype)
    return _descend(lion, learning_rate, decay)


def adafactor_optimizer(
    learning_rate: float | Schedule,
    *,
    b1: float | None = None,
    decay_exponent: float = 0.8,
    multiply_by_parameter_scale: bool = True,
    clipping_threshold: float | None = 1.0,
    min_dim_size_to_factor: int = 128,
    eps: float = 1e-30,
    weight_decay: float = 0.0,
    weight_decay_per_param_scale: PathScales = (),
    mu_dtype: Any = None,
    param_specs: Nested | None = None,
) -> optax.GradientTransformation:
    """Returns Adafactor, whose second moments take a row and a column of each matrix.

    Args:
        learning_rate: See the top of this file. With `multiply_by_parameter_scale` it is relative
            to the size of each parameter: about 1e-2.
        b1: Decay of a mean of the updates; None for none, and no memory for it.
        decay_exponent: Squares decay by 1 - t^-decay_exponent at step t.
        multiply_by_parameter_scale: Whether updates are times the root mean square of their
            parameter (at least 1e-3).
        clipping_threshold: Largest root mean square of an update before the learning rate; None
            for no bound.
        min_dim_size_to_factor: Matrices smaller than this in either dimension are not factored.
        eps: Added to squared gradients.
        weight_decay: Strength of the decay, times the learning rate as in `adamw_optimizer`.
        weight_decay_per_param_scale: Factors of the decay.
        mu_dtype: Dtype of the mean of updates.
        param_specs: Filled in by the learner; without it what is stacked counts as one matrix.

    Raises:
        ValueError: If `mu_dtype` is set but `b1` is not.

    Source: Shazeer and Stern, arXiv:1804.04235, algorithms 4 and 5.
    """
    if b1 is None and mu_dtype is not None:
        raise ValueError(
            f"adafactor_optimizer: mu_dtype={mu_dtype} does nothing without b1; set b1, or leave "
            "mu_dtype out."
        )
    parts = [
        factored.scale_by_factored_rms(
            decay_exponent=decay_exponent,
            min_dim_size_to_factor=min_dim_size_to_factor,
            eps=eps,
            param_specs=param_specs,
        )
    ]
    if clipping_threshold is not None:
        parts.append(factored.clip_by_rms(clipping_threshold, param_specs=param_specs))
    if multiply_by_parameter_scale:
        parts.append(factored.scale_by_param_rms(param_specs=param_specs))
    if b1 is not None:
        parts.append(optax.ema(b1, debias=False, accumulator_dtype=mu_dtype))
    decay = transforms.add_decayed_weights(
        weight_decay, per_param_scale=weight_decay_per_param_scale, param_specs=param_specs
    )
    return _descend(optax.chain(*parts), learning_rate, decay)


def muon_optimizer(
    learning_rate: float | Schedule,
    *,
    beta: float = 0.95,
    nesterov: bool = True,
    ns_steps: int = 5,
    consistent_rms: float | None = None,
    weight_decay: float = 0.0,
    weight_decay_per_param_scale: PathScales = (),
    adam_learning_rate: float | Schedule | None = None,
    adam_b1: float = 0.9,
    adam_b2: float = 0.95,
    adam_eps: float = 1e-8,
    adam_axes: Sequence[str] = ("vocab",),
    adam_paths: Sequence[str] = (),
    mu_dtype: Any = None,
    param_specs: Nested | None = None,
) -> optax.GradientTransformation:
    """Returns Muon for matrices, whose momentum it makes orthogonal, and AdamW for all others.

    A matrix maps the input dimensions of a parameter's fan axes to its output dimensions; all
    other dimensions (layers of a scan, experts, query/key/value) make independent matrices: an
    expert weight [L, E, D, F] is L * E of them.

    Args:
        learning_rate: See the top of this file.
        beta: Decay of the momentum.
        nesterov: Whether the step looks ahead by one gradient.
        ns_steps: Number of Newton-Schulz iterations.
        consistent_rms: If set, an update is times sqrt(max(fan in, fan out)) * consistent_rms: at
            0.2 its root mean square is like Adam's, and Adam's learning rates and decay can be
            used. If None, times sqrt(max(1, fan out / fan in)).
        weight_decay: Strength of the decay, of all parameters.
        weight_decay_per_param_scale: Factors of the decay.
        adam_learning_rate: The rate of AdamW; `learning_rate` if None.
        adam_b1: Decay of AdamW's mean of gradients.
        adam_b2: Decay of AdamW's mean of squares.
        adam_eps: AdamW's epsilon.
        adam_axes: Weights that have one of these logical axes are for AdamW: embedding and head.
        adam_paths: Weights whose path fully matches one of these regexes are for AdamW too.
        mu_dtype: Dtype of the first moments.
        param_specs: Filled in by the learner.

    Raises:
        ValueError: If there are no `param_specs`: the shape of an array does not say which
            dimensions are a matrix. Or if one of `adam_paths` matches no path.

    Source: Jordan et al., https://kellerjordan.github.io/posts/muon; `consistent_rms`: Liu et al.,
    arXiv:2502.16982, section 2.2.
    """
    if param_specs is None:
        raise ValueError(
            "muon_optimizer: param_specs is None, so nothing says which dimensions are a matrix; "
            "use it in a Learner, or set param_specs to the model's ParameterSpecs."
        )
    specs = specs_by_path(param_specs)
    labels = _muon_labels(param_specs, adam_axes, adam_paths)
    muon = optax.chain(
        optax.contrib.scale_by_muon(
            beta=beta,
            nesterov=nesterov,
            ns_steps=ns_steps,
            mu_dtype=mu_dtype,
            weight_dimension_numbers=lambda params: tree.map_by_path(
                lambda path, _: _matrix_axes(specs[path]), params
            ),
        ),
        optax.stateless(
            lambda updates, _: tree.map_by_path(
                lambda path, u: u * _muon_scale(specs[path], consistent_rms), updates
            )
        ),
    )
    decay = transforms.add_decayed_weights(
        weight_decay, per_param_scale=weight_decay_per_param_scale, param_specs=param_specs
    )
    matrices = _descend(muon, learning_rate, decay)
    others = adamw_optimizer(
        learning_rate if adam_learning_rate is None else adam_learning_rate,
        b1=adam_b1,
        b2=adam_b2,
        eps=adam_eps,
        weight_decay=weight_decay,
        weight_decay_per_param_scale=weight_decay_per_param_scale,
        mu_dtype=mu_dtype,
        param_specs=param_specs,
    )
    return transforms.split({"matrices": matrices, "others": others}, labels)


def _descend(
    direction: optax.GradientTransformation,
    learning_rate: float | Schedule,
    decay: optax.GradientTransformation,
) -> optax.GradientTransformation:
    """Returns p -= learning_rate * (direction, computed in float32, + decay)."""
    return optax.chain(
        transforms.in_float32(direction), decay, transforms.scale_by_learning_rate(learning_rate)
    )


def _muon_labels(
    param_specs: Nested, adam_axes: Sequence[str], adam_paths: Sequence[str]
) -> dict[str, str]:
    """Returns "matrices" or "others" for each path."""

    def label(spec: ParameterSpec) -> str:
        is_matrix = spec.fan_axes is not None and not set(adam_axes) & set(spec.axes)
        return "matrices" if is_matrix else "others"

    rules = [(pattern, "others") for pattern in adam_paths]
    chosen = tree.match_rules(
        param_specs, rules, default="", place="muon_optimizer: adam_paths", is_leaf=is_spec
    )
    specs = specs_by_path(param_specs)
    return {path: rule or label(specs[path]) for path, rule in tree.by_path(chosen).items()}


def _matrix_axes(spec: ParameterSpec) -> optax.contrib.MuonDimensionNumbers:
    assert spec.fan_axes is not None
    return optax.contrib.MuonDimensionNumbers(spec.fan_axes.in_axis, spec.fan_axes.out_axis)


def _muon_scale(spec: ParameterSpec, consistent_rms: float | None) -> float:
    fan_in, fan_out = spec.fans()
    if consistent_rms is not None:
        return max(fan_in, fan_out) ** 0.5 * consistent_rms
    return max(1.0, fan_out / fan_in) ** 0.5
