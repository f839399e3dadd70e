"""Makes the program that measures a training step."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn

from jaxmp._core._dtypes import FLOAT32
from jaxmp._core._shardings import sampled
from jaxmp._core._typing import Array
from jaxmp._policies._op_table import OpTable
from jaxmp._programs._bind import runs_in_fp32
from jaxmp._programs._constructs import CONSTRUCTS
from jaxmp._programs._interpreter import Frame
from jaxmp._programs._jaxprs import BACKWARD, Path
from jaxmp._programs._locations import module_of, root_of
from jaxmp._programs._operations import dot_of
from jaxmp._tools.audit._trace import Traced, check_function, is_array, trace
from jaxmp._tools.stats._measure import TensorStats, fp8_scale, measure
from jaxmp._tools.stats._observe import ACTIVATIONS, GRADIENTS, SCALES, Key, Observer
from jaxmp._tools.stats._report import StatsReport, make_report
from jaxmp.errors import AuditError
from jaxmp.optim._roles import AVERAGE, FP8, MASTER, PARAMETER, STATISTICS

EMULATED = FLOAT16, FLOAT8 = "float16", "float8"
# Elements of a tensor that are compared, at most.
_SAMPLES = 65536
_TABLE = OpTable()


class Emulation(Observer):
    """Observer that computes in another format, and returns samples of the tensors.

    The results of the operations that the op table runs in 16 bits are rounded, in modules and of
    all matmuls: to float16, or to bfloat16 for FP8. Operations that read an FP32 result, as in a
    norm, compute in FP32 until a matmul or the end of the module. For FP8, the operands of matmuls
    without batch axes are rounded to E4M3, and to E5M2 in the backward pass, each with the scale of
    its largest magnitude. Numbers beyond the range of a format become its largest number.

    Args:
      name: "float16", "float8", or "" for the step as it is.
      scale: the loss scale of the backward pass in float16.
    """

    def __init__(self, name: str, scale: Any) -> None:
        super().__init__()
        self.name, self.scale = name, scale
        # Scopes with FP32 results, such as norms, which also sum their gradients in FP32.
        self._fp32_modules: set[Path] = set()

    def measure(self, x: Array, *_: Any) -> Array:
        """Returns a regular subset of the elements."""
        return sampled(x, _SAMPLES)

    def _entered(self, equation: JaxprEqn, operands: list[Any], frame: Frame) -> list[Any]:
        inside, place, primitive = frame.state, frame.place.of(equation), equation.primitive.name
        is_matmul = primitive in ("dot_general", "conv_general_dilated")
        is_inside = self.name and (place.scopes or is_matmul) and runs_in_fp32(equation)
        if not is_inside or primitive in CONSTRUCTS or not any(map(_is_fp32, operands)):
            self.ended = ()
            results = super()._entered(equation, operands, frame)
            if primitive in CONSTRUCTS:
                inside.wide.update(itertools.compress(equation.outvars, self.ended))
            return results
        is_backward = place.phase == BACKWARD
        is_wide = any(map(inside.is_wide, equation.invars)) and primitive != "add_any"
        flags = [inside.is_cotangent(var) for var in equation.invars]
        is_batch_sum = primitive == "reduce_sum" and 0 in equation.params["axes"]
        if is_backward and is_batch_sum and not is_wide and place.scopes not in self._fp32_modules:
            # A sum over the batch, as of a bias, accumulates in the format.
            (result,) = self.bound(equation, [self._narrow(operands[0], True)])
            return [self._wide(result, True)]
        if is_matmul:
            # Parameters, inputs and cotangents may come from outside of the module, in FP32.
            operands = [self._rounded(x, f) for x, f in zip(operands, flags, strict=True)]
        if self.name == FLOAT8 and primitive == "dot_general" and not dot_of(equation).batch[0]:
            pairs = zip(operands, flags, strict=True)
            operands = [_fp8(x, f) if _is_fp32(x) else x for x, f in pairs]
        results = super()._entered(equation, operands, frame)
        if not is_matmul and (is_wide or _TABLE.category(primitive) == "fp32"):
            ends = inside.outputs.last
            inside.wide.update(var for var in equation.outvars if var not in ends)
            self._fp32_modules.add(place.scopes)
            pairs = zip(equation.outvars, results, strict=True)
            return [self._rounded(x, is_backward) if var in ends else x for var, x in pairs]
        return [self._rounded(x, is_backward) for x in results]

    def _scale(self, is_backward: bool) -> Any:
        return self.scale if is_backward and self.name == FLOAT16 else np.float32(1)

    def _narrow(self, x: Array, is_backward: bool) -> Array:
        dtype = np.float16 if self.name == FLOAT16 else jnp.bfloat16
        return _stored(x, dtype, self._scale(is_backward))

    def _wide(self, x: Array, is_backward: bool) -> Array:
        return lax.div(lax.convert_element_type(x, FLOAT32), self._scale(is_backward))

    def _rounded(self, x: Any, is_backward: bool) -> Any:
        if not _is_fp32(x):
            return x
        if self.name == FLOAT8:
            return lax.reduce_precision(x, 8, 7)
        return self._wide(self._narrow(x, is_backward), is_backward)


def _is_fp32(x: Any) -> bool:
    return getattr(x, "dtype", None) == FLOAT32


def _stored(x: Array, dtype: Any, scale: Any) -> Array:
    """Returns an array in a format, times a scale; larger numbers become the largest one."""
    largest = np.float32(jnp.finfo(dtype).max)
    scaled = lax.clamp(-largest, lax.mul(x, scale), largest)
    # XLA may remove a pair of conversions.
    return lax.optimization_barrier(lax.convert_element_type(scaled, jnp.dtype(dtype)))


def _fp8(x: Array, is_cotangent: bool) -> Array:
    name = "float8_e5m2" if is_cotangent else "float8_e4m3fn"
    scale = fp8_scale(lax.reduce_max(lax.abs(x), range(x.ndim)), name)
    return lax.div(lax.convert_element_type(_stored(x, name, scale), FLOAT32), scale)


# Kind -> module -> samples of its tensors.
Samples = dict[str, dict[str, list[Array]]]


@jax.jit
def errors_of(exact: Samples, rounded: Samples) -> dict[str, dict[str, Array]]:
    """Returns the norm of the difference of a module's tensors, over the norm of the tensors."""

    def error(first: list[Array], second: list[Array]) -> Array:
        unit = jnp.finfo(FLOAT32).tiny
        for x in first:
            unit = jnp.maximum(unit, jnp.max(jnp.abs(x), initial=0))
        norm = lambda xs: jnp.sqrt(sum(jnp.sum(jnp.square(x / unit)) for x in xs))
        differences = [x - y for x, y in zip(first, second, strict=True)]
        return norm(differences) / jnp.maximum(norm(first), jnp.finfo(FLOAT32).tiny)

    return {
        kind: {module: error(tensors, rounded[kind][module]) for module, tensors in group.items()}
        for kind, group in exact.items()
    }


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainingStats:
    """Statistics of a training step: a pytree of arrays.

    Attributes:
      tensors: kind -> name -> statistics. Kinds are "parameters", "gradients", "updates",
        "activations", "operands" and "fp8_scales".
      loss_scale: the loss scale among the arguments, of which the gradients are multiples; 1
        without one.
      errors: format of `what_if` -> "gradients" or "activations" -> module -> relative error: the
        norm of the difference that the format makes, over the norm of the module's tensors.

    Example:
      >>> step = jax.grad(lambda w, x: (x @ w).sum())
      >>> stats = with_stats(step)(jnp.ones((16, 32)), jnp.ones((8, 16)))
      >>> stats.tensors["parameters"]["w"].rms.tolist()
      1.0
    """

    tensors: dict[str, dict[str, TensorStats]]
    loss_scale: Array
    errors: dict[str, dict[str, dict[str, Array]]] = dataclasses.field(default_factory=dict)

    def report(self) -> StatsReport:
        """Returns the losses in each candidate format, and the loss scale to start with."""
        return make_report(self.tensors, self.loss_scale, self.errors)


def with_stats(
    step: Callable[..., Any], *, what_if: Sequence[str] = ()
) -> Callable[..., TrainingStats]:
    """Returns a function that measures a training step instead of running it.

    The function has the arguments of the step, and returns statistics of its parameters, gradients
    and updates, of the outputs of its modules, of the operands of its matmuls, and of its FP8
    scales. It compiles a second program, so that the program of the training and its results do
    not change. Select the steps to measure yourself, and call it before the step if the step
    donates its arguments, outside of `jax.jit`::

        measure = jaxmp.with_stats(train_step)
        for number, batch in enumerate(batches):
            if number % 100 == 0:
                stats = measure(state, batch)
            state, loss = train_step(state, batch)

    Tensors inside jitted functions, loops, branches, rematerialized functions, `shard_map` and
    microbatches are included. In a loop and in a `shard_map`, they have a first axis with one
    element per iteration or device; of a while loop, the last iteration is measured.

    Args:
      step: a function of pytrees of arrays that computes gradients. It may be jitted, and may be a
        function of NNX modules, which are not changed.
      what_if: formats in which the step is run again, of "float16" and "float8", for the errors of
        the gradients and outputs of each module. In "float16", the results of operations are
        rounded, with the suggested loss scale. In "float8", the operands of the matmuls of layers
        are rounded, each with the scale of its largest magnitude, and other results to bfloat16.
        Measure a step in FP32. Each format costs about as much as the step, and so does the
        comparison.

    Returns:
      A function that returns `TrainingStats`, a pytree; its `report()` compares formats. Arguments
      that are not arrays are static: it is traced again when they change.

    Raises:
      AuditError: if `step` is not a function; if a format is unknown; if the step, or a function
        that it calls, was jitted with `compiler_options`.

    Example:
      >>> def loss_fn(w, x):
      ...     with jax.named_scope("dense"):
      ...         return jnp.square(x @ w).mean()
      >>> stats = with_stats(jax.grad(loss_fn))(jnp.ones((16, 32)), jnp.ones((8, 16)) * 2.0**-30)
      >>> sorted(stats.tensors["operands"]), float(stats.tensors["gradients"]["w"].amax) == 2.0**-60
      (['dense:lhs', 'dense:output_grad', 'dense:rhs'], True)
    """
    check_function(step, "with_stats")
    unknown = [name for name in what_if if name not in EMULATED]
    if unknown or isinstance(what_if, str):
        raise AuditError(
            f"with_stats received what_if={what_if!r}. Pass a sequence of formats, of "
            f"{', '.join(map(repr, EMULATED))}: what_if=[{EMULATED[0]!r}]."
        )
    programs: dict[Any, tuple[list[int], Callable[..., Any], Callable[..., Any]]] = {}

    def measured(*args: Any, **kwargs: Any) -> TrainingStats:
        leaves, structure = jax.tree.flatten((args, kwargs))
        types = [jax.typeof(leaf) if is_array(leaf) else leaf for leaf in leaves]
        key = structure, tuple(types)
        if key not in programs:
            shapes, names = structure.unflatten(types)
            # XLA must not leave out roundings.
            options: dict[str, Any] = {"xla_allow_excess_precision": False}
            traced = trace(step, shapes, names)
            program = _Program(traced)
            samples = jax.jit(program.samples, static_argnums=1, compiler_options=options)
            programs[key] = traced.positions, jax.jit(program, compiler_options=options), samples
        positions, program, samples = programs[key]
        arrays = [leaves[n] for n in positions]
        stats = program(arrays)
        if what_if:
            scale = (stats.report().loss_scale or stats.loss_scale) / stats.loss_scale
            runs = {name: samples(arrays, name, scale) for name in ("", *what_if)}
            errors = {name: errors_of(runs[""], runs[name]) for name in what_if}
            stats = dataclasses.replace(stats, errors=errors)
        return stats

    return measured


class _Program:
    """Statistics of a traced step, as a function of the arrays among its arguments."""

    def __init__(self, traced: Traced) -> None:
        self.traced, self.names, self.roles = traced, traced.texts(), traced.roles()

    def __call__(self, arrays: list[Any]) -> TrainingStats:
        observer = Observer()
        results = observer.run(self.traced.closed, arrays)
        rows: dict[str, dict[str, TensorStats]] = {}
        counts: collections.Counter[tuple[str, str]] = collections.Counter()

        def add(kind: str, name: str, stats: TensorStats) -> None:
            counts[kind, name] += 1
            suffix = f"#{counts[kind, name]}" if counts[kind, name] > 1 else ""
            rows.setdefault(kind, {})[name + suffix] = stats

        for kind, numbers in (("parameters", self._parameters()), (SCALES, self._of_role(FP8))):
            for number in numbers:
                add(kind, self.names[number], measure(arrays[number]))
        for key, module, stats in self._by_module(observer):
            if key.kind == GRADIENTS:
                add(GRADIENTS, self._parameter(key, module), stats)
            else:
                add(key.kind, f"{module}:{key.label}" if key.label else module, stats)
        for number, new in self._updated(results):
            old = lax.convert_element_type(arrays[number], jnp.float32)
            update = lax.sub(lax.convert_element_type(new, jnp.float32), old)
            add("updates", self.names[number], measure(update))
        scale = next((arrays[number] for number in self.traced.scales()), 1.0)
        return TrainingStats(rows, jnp.asarray(scale, jnp.float32))

    def samples(self, arrays: list[Any], name: str, scale: Array) -> Samples:
        """Returns samples of the gradients and outputs of each module in a format."""
        observer = Emulation(name, scale)
        observer.run(self.traced.closed, arrays)
        samples: Samples = {}
        for key, module, sample in self._by_module(observer):
            if key.kind in (ACTIVATIONS, GRADIENTS):
                samples.setdefault(key.kind, {}).setdefault(module, []).append(sample)
        return samples

    def _by_module(self, observer: Observer) -> Iterator[tuple[Key, str, Any]]:
        """Yields (key, module, measurement) of each tensor that an observer measured."""
        paths = [key.path for key in observer.side]
        root = root_of({path[:n]: None for path in paths for n in range(len(path) + 1)})
        of_fp8, of_parameters = (
            {self.traced.arrays[n].shape for n in numbers}
            for numbers in (self._of_role(FP8), self._parameters())
        )
        for key, measured in observer.side.items():
            if key.kind != GRADIENTS or key.shape not in of_fp8 - of_parameters:
                yield key, module_of(key.path, root), measured

    def _of_role(self, *roles: str) -> list[int]:
        """Returns the numbers of the floating-point arrays with one of these roles."""
        return [
            n
            for n, array in enumerate(self.traced.arrays)
            if self.roles[n] in roles and jnp.issubdtype(array.dtype, jnp.floating)
        ]

    def _parameters(self) -> list[int]:
        return self._of_role(PARAMETER, MASTER, AVERAGE, STATISTICS)

    def _parameter(self, key: Key, module: str) -> str:
        """Returns the parameter of a gradient; its module and shape if they fit several ones."""
        arrays = self.traced.arrays
        numbers = [n for n in self._of_role(PARAMETER) if arrays[n].shape == key.shape]
        fitting = [self.names[n] for n in numbers]
        parts = [part for part in module.split("/") if part]
        named = [n for n in fitting if all(re.search(rf"\b{re.escape(p)}\b", n) for p in parts)]
        unique = named if len(named) == 1 else fitting
        return unique[0] if len(unique) == 1 else f"{module}[{','.join(map(str, key.shape))}]"

    def _updated(self, results: list[Any]) -> list[tuple[int, Any]]:
        """Returns (number of a parameter, its new value); none without an optimizer's state."""
        traced = self.traced
        if not any(traced.in_optimizer()):
            return []
        paths = [path for path, _ in traced.results]
        new = {path[1:]: results[n] for n, path in reversed([*enumerate(paths)])}
        new |= {path: results[n] for n, path in enumerate(paths)}
        written = dict(zip(traced.written, results[len(paths) :], strict=True))
        pairs = []
        for number in self._parameters():
            leaf = traced.leaves[number]
            value = written.get(number, new.get(leaf.path[2:]))
            if value is not None and value.shape == leaf.value.shape:
                pairs.append((number, value))
        return pairs
