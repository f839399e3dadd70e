"""Checks of a training step: masters, the loss scale, 16-bit accumulators, gradient reductions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import jax.tree_util as jtu

from jaxmp._audit._arguments import Traced, in_optimizer, short
from jaxmp._audit._auditor import Auditor
from jaxmp._audit._check_ops import FIX_ACCUMULATOR
from jaxmp._audit._checks import ERROR, WARNING
from jaxmp._audit._context import dtype_of
from jaxmp._audit._dataflow import LARGE, PLUS, SCALAR, UNKNOWN, From, Update
from jaxmp._audit._report import Finding
from jaxmp._core._dtypes import CASTABLE, FLOAT64, is_16bit
from jaxmp._recipe_files._load import RecipeData

_FLOATS = CASTABLE | {FLOAT64}


def mark_arguments(auditor: Auditor, traced: Traced) -> None:
    """Labels the arguments, so that the results that update them are known."""
    for number, var in traced.variables.items():
        if dtype_of(var) in _FLOATS:
            auditor.flow.mark(var, SCALAR if var.aval.size == 1 else From(number, PLUS))
    for var in traced.jaxpr.constvars:
        if dtype_of(var) in _FLOATS and var.aval.size == 1:
            auditor.flow.mark(var, SCALAR)


def step_findings(
    auditor: Auditor, traced: Traced, recipe: RecipeData | None, known: Iterable[Finding]
) -> Iterator[Finding]:
    """Findings about what a training step updates.

    Args:
      auditor: after its walk.
      traced: the program.
      recipe: what `policies=` stands for; None without policies.
      known: findings about the arguments, which are not repeated.
    """
    step = _Step(auditor, traced)
    if not step.is_training:
        return
    said = {finding.check for finding in known}
    yield from step.missing_masters(
        WARNING if recipe is not None and recipe.master == "none" else ERROR
    )
    yield from step.accumulators()
    if "optimizer_state_16bit" not in said:
        yield from step.moments()
    if "unused_loss_scale" not in said:
        yield from step.missing_loss_scale()


class _Step:
    """The arguments that a program updates."""

    def __init__(self, auditor: Auditor, traced: Traced) -> None:
        self.auditor, self.flow = auditor, auditor.flow
        leaves = jtu.tree_flatten_with_path(traced.arguments)[0]
        self.locations = [short(jtu.keystr(path)) for path, _ in leaves]
        self.in_optimizer = in_optimizer(traced)
        # Number of an argument -> its updates among the results.
        self.updates: dict[int, list[Update]] = {}
        for var in traced.jaxpr.outvars:
            for label in self.flow.of(var):
                if isinstance(label, Update):
                    argument = traced.variables[label.number].aval
                    if (argument.shape, argument.dtype) == (var.aval.shape, dtype_of(var)):
                        self.updates.setdefault(label.number, []).append(label)
        self.dtypes = {n: traced.variables[n].aval.dtype for n in self.updates}

    @property
    def is_training(self) -> bool:
        """True if some argument is updated with gradients."""
        return any(update.has_gradient for update in self._all())

    def _all(self) -> Iterator[Update]:
        for updates in self.updates.values():
            yield from updates

    def _is_average(self, update: Update) -> bool:
        """Returns True for an average of parameters, such as an EMA."""
        masters = {n for n, dtype in self.dtypes.items() if self._is_master(n, dtype)}
        trained = masters | (self.flow.differentiated & self.updates.keys())
        # A parameter of which a small part is subtracted is no average.
        is_parameter = update.factor == PLUS and update.number in self.flow.differentiated
        return not is_parameter and bool(update.others & trained)

    def _is_master(self, number: int, dtype: Any) -> bool:
        return not is_16bit(dtype) and any(
            update.factor == PLUS and update.has_gradient for update in self.updates[number]
        )

    def _half(self) -> Iterator[tuple[int, Update]]:
        for number, updates in self.updates.items():
            if is_16bit(self.dtypes[number]):
                yield number, updates[0]

    def missing_masters(self, severity: str) -> Iterator[Finding]:
        """16-bit parameters to which a step is added in 16 bits."""
        found = {
            number: update
            for number, update in self._half()
            if number in self.flow.differentiated
            and update.has_gradient
            and not self._is_average(update)
        }
        fix = (
            "Keep FP32 masters in the optimizer's state, made from FP32 parameters:\n"
            "    tx = jaxmp.load_recipe('{recipe}').optimizer(tx)"
            if any(self.in_optimizer)
            else "Keep FP32 parameters, and cast them inside the loss:\n"
            "    loss_fn(jax.tree.map(lambda p: p.astype(jnp.{dtype}), params))"
        )
        words = "are updated without FP32 masters: steps below {least} of a value are rounded away"
        yield from self._findings("missing_master", found, words, fix, severity)

    def accumulators(self) -> Iterator[Finding]:
        """Sums and averages over steps in 16 bits."""
        sums = {
            number: update
            for number, update in self._half()
            if number not in self.flow.differentiated
            and update.factor == PLUS
            and update.has_gradient
            and not self._is_average(update)
            and not self.in_optimizer[number]
        }
        words = "accumulate gradients: a sum of ones stalls at {stall}"
        yield from self._findings("accumulator_16bit", sums, words, FIX_ACCUMULATOR)
        averages = {n: u for n, u in self._half() if self._is_average(u)}
        fix = (
            "Keep the average in FP32:\n"
            "    ema = jax.tree.map(lambda p: p.astype(jnp.float32), params)"
        )
        words = "average parameters: changes below {least} of a value are rounded away"
        yield from self._findings("accumulator_16bit", averages, words, fix)

    def moments(self) -> Iterator[Finding]:
        """The optimizer's moments, where it is written by hand."""
        found = {
            number: update
            for number, update in self._half()
            if number not in self.flow.differentiated
            and update.factor in (LARGE, UNKNOWN)
            and update.has_gradient
            and not self._is_average(update)
        }
        words = "average gradients: small updates are rounded away"
        fix = "Make the moments in FP32:\n    jnp.zeros(p.shape, jnp.float32)"
        yield from self._findings("optimizer_state_16bit", found, words, fix)

    def missing_loss_scale(self) -> Iterator[Finding]:
        """A backward pass in float16 whose cotangents are not scaled."""
        op = self.auditor.float16_backward
        if op is None or self.flow.scale_used or self.flow.has_scale:
            return
        file, line = self.auditor.findings.line_of(op)
        fix = (
            "tx = jaxmp.load_recipe('fp16').optimizer(tx)\n"
            "loss, grads = state.value_and_grad(loss_fn)(batch)"
            if any(self.in_optimizer)
            else "grads = jaxmp.grad(loss_fn, loss_scale=jaxmp.StaticLossScale(2.0**12))(params)"
        )
        yield Finding(
            check="missing_loss_scale",
            message="the backward pass multiplies in float16 without a loss scale: gradients below"
            " 6e-8 become zero.",
            fix=fix,
            file=file,
            line=line,
        )

    def _findings(
        self, check: str, found: dict[int, Update], words: str, fix: str, severity: str = ERROR
    ) -> Iterator[Finding]:
        for dtype in sorted({self.dtypes[n].name for n in found}):
            numbers = [n for n in found if self.dtypes[n].name == dtype]
            file, line = self.auditor.findings.line_of(found[numbers[0]].op)
            which = f"such as {self.locations[numbers[0]]}"
            yield Finding(
                check=check,
                severity=severity,
                file=file,
                line=line,
                message=_filled(f"arguments in {dtype}, {which}, {words}.", dtype),
                fix=_filled(fix, dtype),
                count=len(numbers),
            )


# What the texts of findings say of each dtype.
_TEXTS = {
    "bfloat16": {"least": "2**-9", "stall": "256", "recipe": "bf16_params"},
    "float16": {"least": "2**-12", "stall": "2048", "recipe": "fp16_params"},
}


def _filled(text: str, dtype: str) -> str:
    for key, value in (_TEXTS[dtype] | {"dtype": dtype}).items():
        text = text.replace(f"{{{key}}}", value)
    return text
