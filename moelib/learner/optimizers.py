"""Optimizers, on Optax: functions whose configs are values of `Learner.Config.optimizer`.

    config_for_function(adamw_optimizer).set(
        learning_rate=config_for_function(schedules.wsd).set(peak_lr=3e-4, ...),
        b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.1)

Shared arguments:
    learning_rate: A number, or a schedule whose first update is step 1 (moelib.learner.schedules).
    weight_decay: Strength of the decoupled decay: each update also subtracts learning_rate *
        weight_decay * scale times the parameter, where the scale is the `weight_decay_scale` of its
        ParameterSpec (0 for biases and norms).
    weight_decay_per_param_scale: Scales that replace those of the specs: (regex of a path "a/b/c",
        scale), first match wins, a regex without a match is an error; or a function of the spec.
    param_specs: The model's ParameterSpecs, filled in by the learner.

The learner's `first_moment` and `second_moment` set the formats of the state, float32 by default.
Decay rates of means (b1, b2, beta, momentum) are 0 or more and below 1; others are a UserError.
"""

from collections.abc import Sequence

import jax
import optax
import optax.contrib

from moelib.core import tree
from moelib.core.errors import UserError
from moelib.core.param import ParameterSpec, specs_by_path
from moelib.core.tree import Nested
from moelib.learner import factored, transforms
from moelib.learner.schedules import Schedule, as_schedule
from moelib.learner.transforms import ModelSpecs, PathScales


def sgd_optimizer(
    learning_rate: float | Schedule,
    *,
    momentum: float = 0.0,
    nesterov: bool = False,
    weight_decay: float = 0.0,
    weight_decay_per_param_scale: PathScales = (),
    param_specs: ModelSpecs = None,
) -> optax.GradientTransformation:
    """Returns stochastic gradient descent: m = momentum * m + g; p -= learning_rate * m.

    Raises:
        UserError: If `nesterov` is set without momentum.
    """
    if nesterov and not momentum:
        raise UserError(
            "sgd_optimizer: nesterov=True has no effect at momentum 0; set momentum, or "
            "nesterov=False."
        )
    _check_decay_rates("sgd_optimizer", momentum=momentum)
    trace = optax.trace(momentum, nesterov=nesterov)
    inner = trace if momentum else optax.identity()
    return _descend(inner, learning_rate, weight_decay, weight_decay_per_param_scale, param_specs)


def adam_optimizer(
    learning_rate: float | Schedule,
    *,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
) -> optax.GradientTransformation:
    """Returns Adam, without weight decay. Source: Kingma and Ba, arXiv:1412.6980, algorithm 1."""
    return adamw_optimizer(learning_rate, b1=b1, b2=b2, eps=eps)


def adamw_optimizer(
    learning_rate: float | Schedule,
    *,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    weight_decay_per_param_scale: PathScales = (),
    param_specs: ModelSpecs = None,
) -> optax.GradientTransformation:
    """Returns AdamW as in PyTorch, Megatron and Optax: the learning rate multiplies the decay.

    `b1` and `b2` are the decay rates of the means of gradients and of squared gradients; `eps` is
    added to the root of the mean square.

    Source: Loshchilov and Hutter, arXiv:1711.05101, algorithm 2.
    """
    _check_decay_rates("adamw_optimizer", b1=b1, b2=b2)
    adam = optax.scale_by_adam(b1=b1, b2=b2, eps=eps)
    return _descend(adam, learning_rate, weight_decay, weight_decay_per_param_scale, param_specs)


def adamw_decoupled_optimizer(
    learning_rate: float,
    *,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    update_schedule: float | Schedule = 1.0,
    weight_decay: float = 0.0,
    weight_decay_per_param_scale: PathScales = (),
    param_specs: ModelSpecs = None,
) -> optax.GradientTransformation:
    """Returns AdamW as in its paper: p -= schedule * (learning_rate * adam + weight_decay * p).

    The decay does not depend on the learning rate, a number, so that both can be tuned separately.
    `update_schedule` has a peak of 1; the reported rate is schedule * learning_rate.

    Raises:
        UserError: If `learning_rate` is a schedule, negative or NaN.

    Source: Loshchilov and Hutter, arXiv:1711.05101, algorithm 2.
    """
    if callable(learning_rate):
        raise UserError(
            "adamw_decoupled_optimizer: learning_rate is a schedule; set it to a number, and "
            "update_schedule to the schedule with a peak of 1."
        )
    as_schedule(learning_rate)  # Refuses a negative one.
    _check_decay_rates("adamw_decoupled_optimizer", b1=b1, b2=b2)
    adam = optax.scale_by_adam(b1=b1, b2=b2, eps=eps)
    decay = transforms.add_decayed_weights(
        weight_decay, per_param_scale=weight_decay_per_param_scale, param_specs=param_specs
    )
    return optax.chain(
        adam,
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
    param_specs: ModelSpecs = None,
) -> optax.GradientTransformation:
    """Returns Lion: the sign of b1 * momentum + (1 - b1) * gradient; the momentum decays by b2.

    Every element moves by the learning rate, so it is set 3 to 10 times lower than Adam's, and the
    decay higher by the same factor. Source: Chen et al., arXiv:2302.06675, program 1.
    """
    _check_decay_rates("lion_optimizer", b1=b1, b2=b2)
    lion = optax.scale_by_lion(b1=b1, b2=b2)
    return _descend(lion, learning_rate, weight_decay, weight_decay_per_param_scale, param_specs)


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
    param_specs: ModelSpecs = None,
) -> optax.GradientTransformation:
    """Returns Adafactor, which keeps the second moments of a matrix as a row and a column.

    Without `param_specs`, stacked weights count as one matrix. Arguments that are not shared:
        b1: Decay rate of a mean of the updates; None for none, and no memory for it.
        decay_exponent: Exponent of the decay rate 1 - t^-decay_exponent of squares at step t.
        multiply_by_parameter_scale: Whether updates are relative to the root mean square of their
            parameter (at least 1e-3); the learning rate is then about 1e-2.
        clipping_threshold: Largest root mean square of an update before the learning rate; None
            for no bound.
        min_dim_size_to_factor: Smallest dimension of a matrix that is factored.
        eps: Term added to squared gradients.

    Source: Shazeer and Stern, arXiv:1804.04235, algorithms 4 and 5.
    """
    _check_decay_rates("adafactor_optimizer", b1=b1 or 0.0)
    parts = [
        factored.scale_by_factored_rms(param_specs, decay_exponent, min_dim_size_to_factor, eps)
    ]
    if clipping_threshold is not None:
        parts.append(factored.clip_by_rms(param_specs, clipping_threshold))
    if multiply_by_parameter_scale:
        parts.append(factored.scale_by_param_rms(param_specs))
    if b1 is not None:
        parts.append(optax.ema(b1, debias=False))
    return _descend(
        optax.chain(*parts), learning_rate, weight_decay, weight_decay_per_param_scale, param_specs
    )


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
    param_specs: ModelSpecs = None,
) -> optax.GradientTransformation:
    """Returns Muon, which orthogonalizes the momentum of matrices, with AdamW for all others.

    A matrix maps the input dimensions of a parameter's fan axes to its output dimensions; all other
    dimensions (layers of a scan, experts, query/key/value) index independent matrices: an expert
    weight [L, E, D, F] is L * E of them.

    Arguments that are not shared:
        beta: Decay rate of the momentum.
        nesterov: Whether the step looks ahead by one gradient.
        ns_steps: Number of Newton-Schulz iterations.
        consistent_rms: Factor of sqrt(max(fan in, fan out)) for each update: at 0.2 its root mean
            square is like Adam's, and Adam's learning rates and decay can be used. If None,
            updates are multiplied by sqrt(max(1, fan out / fan in)).
        adam_learning_rate: Rate of AdamW; `learning_rate` if None.
        adam_b1, adam_b2, adam_eps: `b1`, `b2` and `eps` of AdamW.
        adam_axes: Logical axes whose weights AdamW updates: embedding and head.
        adam_paths: Regexes of whole paths whose weights AdamW updates too.

    Raises:
        UserError: If there are no `param_specs`, which tell the dimensions of a matrix, or a regex
            of `adam_paths` matches no path.

    Source: Jordan et al., https://kellerjordan.github.io/posts/muon; `consistent_rms`: Liu et al.,
    arXiv:2502.16982, section 2.2.
    """
    if param_specs is None:
        raise UserError(
            "muon_optimizer: param_specs is None, so the matrices are unknown; use it "
            "in a Learner, or set param_specs to the model's ParameterSpecs."
        )
    _check_decay_rates("muon_optimizer", beta=beta, adam_b1=adam_b1, adam_b2=adam_b2)
    specs = specs_by_path(param_specs)

    def scale(path: str, update: jax.Array) -> jax.Array:
        return update * _muon_scale(specs[path], consistent_rms)

    def axes(path: str, _: jax.Array) -> optax.contrib.MuonDimensionNumbers:
        return _matrix_axes(specs[path])

    muon = optax.chain(
        optax.contrib.scale_by_muon(
            beta=beta,
            nesterov=nesterov,
            ns_steps=ns_steps,
            weight_dimension_numbers=lambda params: tree.map_by_path(axes, params),
        ),
        optax.stateless(lambda updates, _: tree.map_by_path(scale, updates)),
    )
    matrices = _descend(
        muon, learning_rate, weight_decay, weight_decay_per_param_scale, param_specs
    )
    others = adamw_optimizer(
        learning_rate if adam_learning_rate is None else adam_learning_rate,
        b1=adam_b1,
        b2=adam_b2,
        eps=adam_eps,
        weight_decay=weight_decay,
        weight_decay_per_param_scale=weight_decay_per_param_scale,
        param_specs=param_specs,
    )
    rules = [(pattern, "others") for pattern in adam_paths]
    labels = tree.match_rules(specs, rules, default="", field="muon_optimizer: adam_paths")
    for path, spec in specs.items():
        is_matrix = spec.fan_axes is not None and not set(adam_axes) & set(spec.axes)
        labels[path] = labels[path] or ("matrices" if is_matrix else "others")
    return transforms.split({"matrices": matrices, "others": others}, labels)


def _check_decay_rates(optimizer: str, **rates: float) -> None:
    for name, rate in rates.items():
        if not 0 <= rate < 1:
            raise UserError(f"{optimizer}: {name} is {rate}; set it to 0 or more and below 1.")


def _descend(
    direction: optax.GradientTransformation,
    learning_rate: float | Schedule,
    weight_decay: float,
    per_param_scale: PathScales,
    param_specs: Nested | None,
) -> optax.GradientTransformation:
    """Returns p -= learning_rate * (direction + decay)."""
    return optax.chain(
        direction,
        transforms.add_decayed_weights(
            weight_decay, per_param_scale=per_param_scale, param_specs=param_specs
        ),
        transforms.scale_by_learning_rate(learning_rate),
    )


def _matrix_axes(spec: ParameterSpec) -> optax.contrib.MuonDimensionNumbers:
    assert spec.fan_axes is not None
    return optax.contrib.MuonDimensionNumbers(spec.fan_axes.in_axis, spec.fan_axes.out_axis)


def _muon_scale(spec: ParameterSpec, consistent_rms: float | None) -> float:
    fan_in, fan_out = spec.fans()
    if consistent_rms is not None:
        return max(fan_in, fan_out) ** 0.5 * consistent_rms
    return max(1.0, fan_out / fan_in) ** 0.5
