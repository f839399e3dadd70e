"""Checks of a training step's state: masters, moments, accumulators and the loss scale."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from jaxmp import _core, _programs
from jaxmp._tools.audit import (
    _auditor,
    _check_integers,
    _check_matmuls,
    _check_ops,
    _checks,
    _dataflow,
    _labels,
    _origins,
    _trace,
)
from jaxmp._tools.audit._dataflow import From, Power, Update
from jaxmp._tools.audit._rows import Finding
from jaxmp._tools.fixes import _rewrite
from jaxmp._tools.report import _section
from jaxmp.optim import _moments, _roles, _rounding

# ---------------------------------------------------------------------------
# Checks
# ---------------------------------------------------------------------------


OPTIMIZER_STATE_16BIT = _checks.Check(
    id="optimizer_state_16bit",
    explanation="The optimizer's moments or accumulators are stored in 16 bits: those of optax, or"
    " arrays in which a step averages gradients. A warning for first moments in bfloat16.",
    fix="tx = jaxmp.load_recipe('bf16_params').optimizer(tx)",
)
UNUSED_LOSS_SCALE = _checks.Check(
    id="unused_loss_scale",
    explanation="A dynamic loss scale is among the arguments, and no gradient was computed with"
    " it.",
    fix="loss, grads = state.value_and_grad(loss_fn)(batch)",
)
MISSING_LOSS_SCALE = _checks.Check(
    id="missing_loss_scale",
    explanation="The backward pass of a training step multiplies in float16 without a loss scale. A"
    " warning for a gradient inside of a loss, such as a penalty or forces, whose scale is not that"
    " of the training.",
    fix="tx = jaxmp.load_recipe('fp16').optimizer(tx)\n"
    "loss, grads = state.value_and_grad(loss_fn)(batch)",
)
MISSING_MASTER = _checks.Check(
    id="missing_master",
    explanation="A training step adds its updates to 16-bit parameters, and no FP32 master stores"
    " what rounding loses, or it rounds FP32 parameters itself. A warning under a recipe with"
    ' `master = "none"`, and for perturbed 16-bit parameters, of which it computes a gradient.',
    fix="tx = jaxmp.load_recipe('bf16_params').optimizer(tx)",
    includes_optimizer=True,
)

# Fields of optax's states with a first moment: that of Adam, and the momentum of SGD.
_FIRST_MOMENTS = ("mu", "trace")
_FIX_OPTAX_STATE = (
    "Remove mu_dtype, accumulator_dtype and similar arguments. If the parameters have 16 bits, make"
    " FP32 moments and masters of the FP32 parameters:\n"
    "    tx = jaxmp.load_recipe('{recipe}').optimizer(tx)"
)
_FIX_INIT = (
    "Remove mu_dtype, accumulator_dtype and similar arguments, and make the state from the FP32"
    " parameters:\n    opt_state = tx.init(params)"
)
_FIX_ROUNDED = (
    "Make FP32 moments, from the optimizer without its rounding:\n"
    "    tx = jaxmp.load_recipe('{recipe}').replace(master='none').optimizer(tx)\n"
    "    tx = jaxmp.optim.stochastic_rounding(tx)"
)
_FIX_INJECTED = "tx = optax.inject_hyperparams(optax.adam, hyperparam_dtype=jnp.float32)(1e-3)"
_FIX_CAST = (
    "Store FP32 parameters, and cast them inside the loss:\n"
    "    loss_fn(jax.tree.map(lambda p: p.astype(jnp.{dtype}), params))"
)
_PERTURBED = (
    "a loss reads 16-bit parameters that are perturbed by gradients: changes below {least} of a"
    " value are rounded away."
)
FIX_NNX = "loss, grads = optimizer.value_and_grad(loss_fn)(model, batch)"
_FIX_AVERAGE = (
    "Make the average in FP32, from the train state, the optimizer or the parameters:\n"
    "    ema = jaxmp.optim.fp32_copy(params)\n"
    "Update it in FP32, in NNX with jaxmp.nnx.EMA:\n"
    "    ema = jaxmp.optim.incremental_update(params, ema, step_size)"
)
# Limits of each dtype, for messages.
_TEXTS = {
    "bfloat16": {"least": "2**-9", "limit": "256", "recipe": "bf16_params", "lost": "0.999 is 1"},
    "float16": {"least": "2**-12", "limit": "2048", "recipe": "fp16_params", "lost": "1e-8 is 0"},
}


# Parameters of Flax's layers, whose sums are those of the whole residual stream.
_OF_FLAX = frozenset(("kernel", "bias", "scale", "embedding"))


def label_arguments(audit: _auditor.Auditor) -> None:
    """Labels the arguments before the walk, so that updates of them are known."""
    traced = audit.traced
    for label, var in traced.inputs():
        audit.flow.mark(var, label)
    # Under `vmap`, a loss scale is an array.
    scales = {var for _, var in traced.dynamic_scales()}
    roles, leaves = traced.roles(), traced.leaves
    for number, (var, leaf) in enumerate(zip(traced.variables, leaves, strict=True)):
        if _checks.dtype_of(var) in _checks.FLOATS:
            audit.flow.mark(var, From(number, _dataflow.PLUS))
            *owner, name = _core.path_names(leaf.path)
            if name not in _OF_FLAX and roles[number] != _roles.INPUT:
                audit.flow.mark(var, _labels.Summand(tuple(owner), name))
            if var.aval.size == 1:
                audit.flow.mark(var, _dataflow.SCALAR)
            if var.aval.size == 1 or var in scales:
                audit.flow.mark(var, Power(number, 1.0))
        elif jnp.issubdtype(_checks.dtype_of(var), jnp.integer) and var.aval.size == 1:
            audit.flow.mark(var, _check_integers.STEPS)
            audit.flow.mark(var, Power(number, 1.0))


# ---------------------------------------------------------------------------
# Arguments
# ---------------------------------------------------------------------------


@OPTIMIZER_STATE_16BIT.on(_checks.PROGRAM)
def check_optimizer_state(audit: _auditor.Auditor) -> Iterator[Finding]:
    """Reports 16-bit leaves of optimizer states, and moments that are written by hand."""
    step, kept = step_of(audit), _moments_by_choice(audit.traced)
    is_injected = lambda number: step.leaves[number].field == "hyperparams"
    is_average = lambda number: step.leaves[number].role == _roles.AVERAGE
    numbers = (n for n in step.avals if step.in_optimizer[n] and n not in kept)
    numbers = filter(step.is_16bit, numbers)
    # A schedule, or the step itself, may replace a hyperparameter.
    returned = {label.number for label in audit.flow.labels(From, *audit.results)}
    numbers = (n for n in numbers if n in returned or not is_injected(n))
    key_of = lambda n: (step.avals[n].dtype.name, is_average(n), is_injected(n))
    states = _section.grouped(numbers, key_of)
    for key, group in states.items():
        yield _optimizer_state_finding(*key, group, step)
    if not states and not kept:
        yield from _check_moments(step)


@UNUSED_LOSS_SCALE.on(_checks.PROGRAM)
def check_unused_scale(audit: _auditor.Auditor) -> Iterator[Finding]:
    """Reports loss scales that the backward pass does not depend on."""
    for leaf, var in audit.traced.dynamic_scales() if audit.has_backward else ():
        if not audit.flow.scaled_by.isdisjoint(_dataflow.powers_of(audit.flow.of(var))):
            continue
        location = jtu.keystr(leaf.path[: -len(leaf.below)])
        message = f"the dynamic loss scale at {location} is not applied to the loss, so small"
        message += " float16 gradients underflow."
        yield UNUSED_LOSS_SCALE.finding(message, _gradients_with([leaf], audit.traced))


def _gradients_with(leaves: list[_roles.StateLeaf], traced: _trace.Traced) -> str:
    """Returns code for gradients with the loss scale of the state that contains some leaves."""
    if traced.nnx_objects:
        return FIX_NNX
    return traced.gradients_with(leaves[0]) if leaves else ""


def _optimizer_state_finding(
    dtype: str, is_average: bool, is_injected: bool, numbers: list[int], step: TrainingStep
) -> Finding:
    # A step adds a tenth of the gradient to a first moment, or the whole of it to a momentum, which
    # 8 bits of precision resolve.
    place = step.locations[numbers[0]]
    is_first = dtype == "bfloat16" and all(step.leaves[n].field in _FIRST_MOMENTS for n in numbers)
    if is_first:
        message = f"{len(numbers)} first moments are bfloat16, such as {place}."
    elif is_injected:
        message = f"hyperparameters are {dtype}, such as {place}, in which {{lost}}."
    else:
        message = f"{len(numbers)} arrays are {dtype}, such as {place}: small updates are rounded"
        effect = "stop changing" if dtype == "bfloat16" else "underflow"
        message += f" away, and second moments {effect}."
    owners = {type(leaf.owner) for leaf in step.leaves}
    fix = _FIX_INIT if step.trains_fp32 else _FIX_OPTAX_STATE
    fix = _FIX_ROUNDED if _rounding.StochasticRoundingState in owners else fix
    fix = _FIX_AVERAGE if is_average else _FIX_INJECTED if is_injected else fix
    op = next((update.op for update in step.updates.get(numbers[0], ())), None)
    texts = _fill(message, dtype), _fill(fix, dtype)
    severity = _checks.WARNING if is_first else _checks.ERROR
    return OPTIMIZER_STATE_16BIT.finding(*texts, op, severity=severity, count=len(numbers))


def _moments_by_choice(traced: _trace.Traced) -> set[int]:
    """Returns the numbers of the arguments that `moment_dtype` stores in 16 bits."""
    is_chosen = lambda node: isinstance(node, _moments.MomentState)
    nodes = jtu.tree_leaves(traced.arguments, is_leaf=is_chosen)
    flags = [is_chosen(node) for node in nodes for _ in jtu.tree_leaves(node)]
    return {n for n, position in enumerate(traced.positions) if flags[position]}


# ---------------------------------------------------------------------------
# Updates
# ---------------------------------------------------------------------------


class TrainingStep:
    """The arguments that a program updates."""

    def __init__(self, audit: _auditor.Auditor) -> None:
        self.flow, traced = audit.flow, audit.traced
        self.leaves, self.locations = traced.leaves, traced.texts()
        self.in_optimizer = traced.in_optimizer()
        # Number of an argument -> its updates among the results.
        self.updates: dict[int, list[Update]] = {}
        # Those that are returned under the key of the argument, perhaps in a tuple.
        self.returned: set[Update] = set()
        for index, var in enumerate(audit.results):
            for label in self.flow.labels(Update, var):
                argument = traced.variables[label.number].aval
                if (argument.shape, argument.dtype) == (var.aval.shape, _checks.dtype_of(var)):
                    self.updates.setdefault(label.number, []).append(label)
                if index < len(traced.results) and label.number in traced.replaced[index]:
                    self.returned.add(label)
        self.avals = {n: var.aval for n, var in enumerate(traced.variables)}
        # Numbers of the arguments that are updated with gradients; none if nothing is trained.
        self.learned = {n for n, row in self.updates.items() if any(x.has_gradient for x in row)}
        # Plain SGD updates packed masters as bits, which have no summands.
        packed = (n for n, leaf in enumerate(self.leaves) if leaf.role == _roles.REMAINDER)
        self.learned.update(packed if audit.has_backward else ())

    @property
    def trains_fp32(self) -> bool:
        """True if gradients update FP32 arguments only, apart from the optimizer's state."""
        learned = [n for n in self.learned if not self.in_optimizer[n]]
        return bool(learned) and not any(map(self.is_16bit, learned))

    def is_16bit(self, number: int) -> bool:
        """Returns True for an argument in 16 bits."""
        return self.avals[number].dtype in _core.FLOATS_16BIT

    def _first_16bit(self) -> list[Update]:
        rows = (row for n, row in self.updates.items() if self.is_16bit(n))
        return [max(row, key=lambda update: update.has_gradient) for row in rows]

    def updates_16bit(self) -> list[Update]:
        """Returns the first update of each 16-bit argument of a training step."""
        updates = self._first_16bit() if self.learned else []
        return [u for u in updates if not is_compensated(u.op.equation, u.op.body)]

    def state_16bit(self) -> list[Update]:
        """Returns the updates of 16-bit arguments that are not parameters, moments or averages.

        In a program that trains nothing, only scalars and arguments that are returned under their
        own keys, and averages, are state.
        """

        def is_state(update: Update) -> bool:
            if self.learned:
                return not (update.has_gradient or self.is_average(update))
            # A scalar parameter may also be a summand of the loss.
            is_scalar = self.avals[update.number].size == 1
            is_scalar &= not update.op.location.differentiated
            return is_scalar or update in self.returned or update.is_average

        updates = (u for u in self._first_16bit() if not self.in_optimizer[u.number])
        return [update for update in updates if is_state(update)]

    def is_parameter(self, update: Update) -> bool:
        """Returns True for an argument that the loss reads and gradients update."""
        is_read = update.number in self.flow.differentiated
        return is_read and update.has_gradient and not self.is_average(update)

    def is_average(self, update: Update) -> bool:
        """Returns True for an average of parameters, such as an EMA."""
        shapes_of = lambda numbers: {self.avals[n].shape for n in numbers}
        is_added = lambda update: update.factor == _dataflow.PLUS and update.has_gradient
        masters = {n for n, row in self.updates.items() if any(map(is_added, row))}
        masters -= set(filter(self.is_16bit, masters))
        # A parameter of the last step, which a master in the state replaces.
        packed = [n for n, leaf in enumerate(self.leaves) if leaf.role == _roles.REMAINDER]
        shapes = shapes_of((*masters, *packed))
        stored = filter(self.is_16bit, self.flow.differentiated)
        trained = masters.union(n for n in stored if self.avals[n].shape in shapes)
        trained |= self.flow.differentiated & self.learned
        # A parameter of which a small part is subtracted (weight decay) is not an average.
        is_parameter = update.factor == _dataflow.PLUS and update.number in self.flow.differentiated
        # New parameters with packed masters are bits, which have no summands.
        is_beside_packed = self.avals[update.number].shape in shapes_of(packed)
        is_beside_packed &= update.has_gradient and update.factor != _dataflow.PLUS
        is_beside_packed &= not self.in_optimizer[update.number]
        return not is_parameter and (bool(update.others & trained) or is_beside_packed)

    def is_gradient_sum(self, update: Update) -> bool:
        """Returns True for an array, unknown to the loss, that gradients are added to."""
        is_read = update.number in self.flow.differentiated
        return not is_read and update.has_gradient and not self.is_average(update)

    def findings(
        self, check: _checks.Check, updates: list[Update], text: str, fix: str = "", **fields: Any
    ) -> Iterator[Finding]:
        """Yields one finding for each dtype of some updated arguments.

        Args:
          check: the check.
          updates: one of each argument.
          text: the predicate of the message, with the names of `_TEXTS` in braces.
          fix: the remedy, with the same names; "" for code that makes the first one in FP32.
          **fields: other fields of the finding.
        """
        dtype_of = lambda update: self.avals[update.number].dtype.name
        for dtype, own in sorted(_section.grouped(updates, dtype_of).items()):
            message = f"arguments in {dtype}, such as {self.locations[own[0].number]}, {text}."
            texts = _fill(message, dtype), _fill(fix or self.fix(updates[0]), dtype)
            yield check.finding(*texts, own[0].op, count=len(own), **fields)

    def fix(self, update: Update, wide: str = "float32") -> str:
        """Returns code that makes an argument in FP32, and does not round its new value.

        Args:
          update: of the argument.
          wide: "float32", or "int32" for counts.
        """
        fix = f"Store it in {wide}, and do not cast the new value to 16 bits:\n"
        fix += f"    jnp.zeros({self.avals[update.number].shape}, jnp.{wide})"
        (result,) = update.op.equation.outvars
        for reader in (update.op.equation, *update.op.body.readers(result)):
            cast = update.op.sibling(reader)
            code = _rewrite.in_fp32(cast.expression) if cast.rounded is not None else ""
            fix = "\n".join([fix, *_origins.without_rounding(cast, code)])
        return fix


def step_of(audit: _auditor.Auditor) -> TrainingStep:
    """Returns the step of an audit, which is made once."""
    if not audit.collected[TrainingStep]:
        audit.collected[TrainingStep].append(TrainingStep(audit))
    return audit.collected[TrainingStep][0]


def _fill(text: str, dtype: str) -> str:
    for key, value in (_TEXTS[dtype] | {"dtype": dtype}).items():
        text = text.replace(f"{{{key}}}", value)
    return text


def is_compensated(addition: _programs.Equation, body: _programs.Body) -> bool:
    """Returns True for a Kahan sum, from which its operand is subtracted: the rest is kept."""
    (total,) = addition.outvars
    operands = [v for v in addition.invars if not _programs.is_literal(v)]
    differences = (e.invars for e in body.readers(total) if e.primitive.name == "sub")
    return any(total in pair and any(v in pair for v in operands) for pair in differences)


@_check_matmuls.IMPLICIT_PROMOTION.on(_checks.PROGRAM)
def report_results(audit: _auditor.Auditor) -> None:
    """Reports promotions of returned values. A softmax, a choice or a loss reads FP32.

    The FP32 state of a training step, such as an average, is meant to be wide.
    """
    step = step_of(audit)

    def is_state(var: _programs.Atom) -> bool:
        return any(label.number in step.updates for label in audit.flow.labels(Update, var))

    results = [var for var in audit.results if not (step.learned and is_state(var))]
    labels = audit.flow.labels(_check_matmuls.PromotedValue, *results)
    for label in sorted(labels, key=lambda label: label.number):
        use = audit.use_of(label.op.result)
        if not use & (_programs.Use.SOFTMAX | _programs.Use.ORDER | _programs.Use.LOSS):
            label.report(", and the program returns the wide result")


@MISSING_MASTER.on(_checks.PROGRAM)
def check_masters(audit: _auditor.Auditor) -> Iterator[Finding]:
    """Reports 16-bit parameters that are updated in 16 bits."""
    step = step_of(audit)
    updates = list(filter(step.is_parameter, step.updates_16bit()))
    recipe = audit.context.recipe
    severity = _checks.WARNING if recipe is not None and recipe.master == "none" else _checks.ERROR
    fix = (
        "Store FP32 masters in the optimizer state, made from FP32 parameters:\n"
        "    tx = jaxmp.load_recipe('{recipe}').optimizer(tx)"
        if any(step.in_optimizer)
        else _FIX_CAST
    )
    text = "are updated without FP32 masters: updates below {least} of a value are rounded away"
    yield from step.findings(MISSING_MASTER, updates, text, fix, severity=severity)


@MISSING_MASTER.on(_checks.PROGRAM)
def check_rounded_masters(audit: _auditor.Auditor) -> Iterator[Finding]:
    """Reports FP32 parameters whose new values the step rounds to 16 bits."""
    step = step_of(audit)
    for var in audit.results:
        labels = audit.flow.labels(Update, var) if _checks.dtype_of(var) == _core.FLOAT32 else ()
        numbers = {x.number for x in labels if x.number in step.updates and x.has_gradient}
        maker = audit.maker_of(var) if numbers and var.aval.size > 1 else None
        if maker is None or step.in_optimizer[min(numbers)]:
            continue
        dtype = _checks.half_of([maker.result, *maker.operands, *(x.op.result for x in labels)])
        if maker.name == "reduce_precision":
            dtype = np.dtype(jnp.bfloat16)
        if dtype is not None:
            message = f"the step rounds {step.locations[min(numbers)]} to {dtype.name}, although it"
            message += " is FP32: updates below {least} of a value are rounded away."
            fix = "Add the updates in FP32:\n    params = optax.apply_updates(params, updates)"
            yield MISSING_MASTER.finding(_fill(message, dtype.name), fix, maker)


@MISSING_MASTER.on(_checks.MATMUL)
def check_perturbations(op: _checks.OpOccurrence, *_: Any) -> None:
    """Reports 16-bit parameters that are perturbed by gradients, and read by a loss."""
    flow, dtype = op.audit.flow, _checks.half_of(op.operands[:2])
    is_16bit = lambda x: _checks.half_of([x]) or _labels.WAS_16_BITS in flow.of(x)
    is_of_loss = op.is_forward and op.location.differentiated
    for update in flow.labels(Update, *op.operands[:2]) if dtype and is_of_loss else ():
        rounded = flow.of_all(filter(is_16bit, update.op.operands))
        is_parameter = op.audit.traced.roles()[update.number] != _roles.INPUT
        if update.has_gradient and is_parameter and From(update.number, update.factor) in rounded:
            message, fix = (_fill(text, str(dtype)) for text in (_PERTURBED, _FIX_CAST))
            update.op.add(MISSING_MASTER, message, fix, severity=_checks.WARNING)


@_check_ops.ACCUMULATOR_16BIT.on(_checks.PROGRAM)
def check_accumulators(audit: _auditor.Auditor) -> Iterator[Finding]:
    """Reports 16-bit sums of gradients and averages of parameters over steps."""
    step = step_of(audit)
    updates = step.updates_16bit()
    added = [u for u in updates if u.factor == _dataflow.PLUS and not step.in_optimizer[u.number]]
    sums = list(filter(step.is_gradient_sum, added))
    text = "accumulate gradients: a sum of ones stops at {limit}"
    yield from step.findings(_check_ops.ACCUMULATOR_16BIT, sums, text)
    # `optimizer_state_16bit` has those of an optimizer.
    own = (update for update in updates if not step.in_optimizer[update.number])
    averages = list(filter(step.is_average, own))
    text = "average parameters: changes below {least} of a value are rounded away"
    yield from step.findings(_check_ops.ACCUMULATOR_16BIT, averages, text, _FIX_AVERAGE)


def _check_moments(step: TrainingStep) -> Iterator[Finding]:
    """Reports the moments of an optimizer that is written by hand."""
    moments = list(filter(step.is_gradient_sum, step.updates_16bit()))
    moments = [u for u in moments if u.factor in (_dataflow.LARGE, _dataflow.UNKNOWN)]
    text = "average gradients: small updates are rounded away"
    yield from step.findings(OPTIMIZER_STATE_16BIT, moments, text)


@MISSING_LOSS_SCALE.on(_checks.PROGRAM)
def check_missing_scale(audit: _auditor.Auditor) -> Iterable[Finding]:
    """Reports a backward pass in float16 whose cotangents are not scaled."""
    unscaled = [op for op, scales in audit.float16_scales if not scales]
    is_scaled = audit.flow.has_scale or not unscaled
    # A dynamic scale is reported as an unused one.
    if is_scaled or not step_of(audit).learned or audit.traced.dynamic_scales():
        return
    message = "the backward pass multiplies in float16 without a loss scale: gradients below 6e-8"
    fix = "grads = jaxmp.grad(loss_fn, loss_scale=jaxmp.StaticLossScale(2.0**12))(params)"
    of_optimizer = [leaf for leaf in audit.traced.leaves if leaf.in_optimizer]
    if gradients := _gradients_with(of_optimizer, audit.traced):
        fix = f"tx = jaxmp.load_recipe('fp16').optimizer(tx)\n{gradients}"
    yield MISSING_LOSS_SCALE.finding(f"{message} become zero.", fix, unscaled[0])


@MISSING_LOSS_SCALE.on_operation(
    *("mul", "div", "neg"), *_checks.LAYOUT, *_programs.MATMULS, passes=[_programs.BACKWARD]
)
def collect_inner_gradients(op: _checks.OpOccurrence) -> None:
    """Collects float16 matmuls, and loss scales, of gradients inside of a loss."""
    is_matmul = op.name in _programs.MATMULS
    is_float16 = is_matmul and _core.FLOAT16 in map(_checks.dtype_of, op.operands)
    scales = (_dataflow.is_scale(op, var, op.audit.flow.of) for var in op.operands)
    is_scaled = not is_matmul and any(scales)
    if (is_scaled or is_float16) and op.is_differentiated_again:
        op.audit.collected[MISSING_LOSS_SCALE].append((op, is_scaled))


@MISSING_LOSS_SCALE.on(_checks.PROGRAM)
def check_inner_gradients(audit: _auditor.Auditor) -> None:
    """Reports gradients inside of a loss, to which no loss scale is applied."""
    inner = audit.collected[MISSING_LOSS_SCALE]
    if inner and not any(is_scaled for _, is_scaled in inner):
        message = "a gradient inside of the loss is computed in float16 without a loss scale of its"
        message += " own: elements below 6e-8 become zero."
        fix = "Scale the inner gradient, too, or compute it in FP32:\n"
        fix += "    grads = jaxmp.grad(fn, loss_scale=jaxmp.StaticLossScale(2.0**12))(x)"
        inner[0][0].add(MISSING_LOSS_SCALE, message, fix, severity=_checks.WARNING)
