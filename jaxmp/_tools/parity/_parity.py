"""The functions `parity` and `assert_parity`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

from jaxmp._core._messages import did_you_mean
from jaxmp._core._typing import PyTree
from jaxmp._policies._recipe import Recipe, load_recipe
from jaxmp._programs import _jaxprs
from jaxmp._tools.parity import _metrics, _search
from jaxmp._tools.parity._report import ParityReport
from jaxmp.errors import ValidationError, ValidationFailedError

# A function of the batch, an exported program, or a recipe with which `program` makes a function.
ProgramLike: TypeAlias = Callable[..., Any] | export.Exported | Recipe | str
_CALL = "jaxmp.parity(train_log_probs, serve_log_probs, [(params, tokens)])"


def parity(
    train: ProgramLike,
    serve: ProgramLike,
    batches: Sequence[PyTree],
    *,
    outputs: str = "log_probs",
    program: Callable[[Recipe], Callable[..., Any]] | None = None,
    batch_size: int | None = None,
    shift: int = 0,
    search: bool = True,
) -> ParityReport:
    """Compares the outputs of a program that trains with those of one that serves, and explains.

    Both are compiled and run on the same batches. If the outputs differ, both are run again on the
    batch with the largest difference, one operation at a time, and the first module is named whose
    results differ by more than rounding explains, with the change that removes the difference. The
    change was run before. Keep the batches of a search small: all intermediate values of one batch
    are stored.

    Args:
      train: a function of a batch; a `jax.export.Exported`; or a recipe, with `program`. It returns
        one array of outputs. A batch that is a tuple is passed as several arguments.
      serve: likewise. It may be `train`, with `batch_size` or `shift`. It may decode token by token
        with a cache, as long as it returns the outputs of all positions.
      batches: a list of batches. Parameters may be a part of them: `(params, tokens)`.
      outputs: "log_probs", the log-probabilities of the tokens, `[..., position]`, in which
        positions that are NaN in both programs are left out; "logits", `[..., position,
        vocabulary]`; or "outputs", of which only ratios are compared.
      program: makes the function of a recipe, if `train` or `serve` is one.
      batch_size: number of examples that serving computes at a time: parts of the last argument
        along the first axis. None: as many as training.
      shift: number of positions by which serving rolls the examples of the last argument.
      search: False to compare the outputs only.

    Returns:
      The report: `rows` with the differences, and `cause`.

    Raises:
      ValidationError: before anything is computed, for arguments of other types; if the outputs
        have different shapes; if training returns NaN where serving does not, or the reverse.

    Example:
      >>> def train(w, x):
      ...     with jax.named_scope("head"):
      ...         return jax.nn.log_softmax(x @ w)
      >>> def serve(w, x):
      ...     return train(w.astype(jnp.bfloat16).astype(jnp.float32), x)
      >>> keys = jax.random.split(jax.random.key(0))
      >>> w, x = jax.random.normal(keys[0], (8, 4)), jax.random.normal(keys[1], (2, 8))
      >>> report = parity(train, serve, [(w, x)])
      >>> report.cause.module, report.cause.operation
      ('head', 'dot_general')
    """
    _check(batches, outputs, batch_size, shift)
    functions = [
        _function(each, name, program) for each, name in ((train, "train"), (serve, "serve"))
    ]
    batches = [batch if isinstance(batch, tuple) else (batch,) for batch in batches]
    _check_sizes(batches, batch_size, shift)
    served = _served(functions[1], batch_size, shift)
    _check_outputs([jax.eval_shape(each, *batches[0]) for each in (functions[0], served)], outputs)
    compiled = jax.jit(functions[0]), jax.jit(served)
    pairs = [tuple(np.asarray(_array(fn(*batch))) for fn in compiled) for batch in batches]
    for number, (x, y) in enumerate(pairs):
        _check_nan(x, y, number)
    rows = _metrics.rows_of(*(_metrics.joined(each) for each in zip(*pairs, strict=True)), outputs)
    cause, before = None, 0.0
    is_equal = all(np.array_equal(x, y, equal_nan=True) for x, y in pairs)
    if search and not is_equal:
        distances = [_metrics.rows_of(x, y, outputs)[0].difference for x, y in pairs]
        batch = batches[int(np.argmax(distances))]
        traced = [_jaxprs.trace(each, batch, {}) for each in (functions[0], served)]
        programs = [_search.Program(each.closed, each.arrays) for each in traced]
        cause, before = _search.find_cause(*programs, shift)
    return ParityReport(
        outputs=outputs,
        batches=len(batches),
        rows=tuple(rows),
        cause=cause,
        searched=search and not is_equal,
        by_operations=before,
    )


def assert_parity(
    train: ProgramLike,
    serve: ProgramLike,
    batches: Sequence[PyTree],
    *,
    band: tuple[float, float] = (0.999, 1.002),
    share: float = 1.0,
    **options: Any,
) -> ParityReport:
    """Checks in a test that serving computes the outputs of training.

    Args:
      train, serve, batches: as in `parity`.
      band: the smallest and the largest ratio of serving and training that are in parity: 0.999 to
        1.002 (the default, as in MaxText), 0.99 to 1.01, or 0.95 to 1.05.
      share: the smallest share of the outputs in the band.
      **options: those of `parity`.

    Returns:
      The report of `parity`.

    Raises:
      ValidationFailedError: with the report, if fewer outputs are in the band.
      ValidationError: as `parity`; for another band, or a share outside of 0 to 1.

    Example:
      >>> log_probs = lambda x: jax.nn.log_softmax(x)
      >>> assert_parity(log_probs, log_probs, [jnp.ones((2, 4))]).rows[0].band
      1.0
    """
    names = {value: name for name, value in _metrics.BANDS.items()}
    if tuple(band) not in names or not 0 < share <= 1:
        raise ValidationError(
            f"assert_parity received band={band!r} and share={share!r}. The bands are "
            f"{', '.join(map(str, names))}, and a share is in 0 to 1:\n"
            "    jaxmp.assert_parity(train, serve, batches, band=(0.99, 1.01), share=0.999)"
        )
    report = parity(train, serve, batches, **options)
    measured = getattr(report.rows[0], names[tuple(band)])
    if measured < share:
        raise ValidationFailedError(
            f"{measured:.4%} of the outputs have a ratio of serving and training in {band[0]} to "
            f"{band[1]}; {share:.4%} are required.\n\n{report}"
        )
    return report


# ---------------------------------------------------------------------------
# Arguments
# ---------------------------------------------------------------------------


def _check(batches: object, outputs: object, batch_size: object, shift: object) -> None:
    if (
        isinstance(batches, (Mapping, tuple, str))
        or not isinstance(batches, Sequence)
        or not batches
    ):
        text = "is empty" if isinstance(batches, list) else f"is a {type(batches).__name__}"
        raise ValidationError(f"batches {text}. Pass a list of batches:\n    {_CALL}")
    if outputs not in _metrics.KINDS:
        raise ValidationError(
            f"outputs={outputs!r} is none of {', '.join(map(repr, _metrics.KINDS))}."
            f"{did_you_mean(str(outputs), _metrics.KINDS)}"
        )
    for name, value, least in (("batch_size", batch_size, 1), ("shift", shift, 0)):
        is_number = isinstance(value, int) and not isinstance(value, bool) and value >= least
        if value is not None and not is_number:
            raise ValidationError(
                f"{name}={value!r} is not a number of examples of at least {least}: {name}=1."
            )


def _function(
    each: ProgramLike, name: str, program: Callable[[Recipe], Callable[..., Any]] | None
) -> Callable[..., Any]:
    if isinstance(each, export.Exported):
        return each.call
    if isinstance(each, (str, Recipe)):
        if program is None:
            raise ValidationError(
                f"{name}={each!r} is a recipe, and parity has no function to run with it. Pass "
                "one that returns a function of the batch:\n"
                "    jaxmp.parity('bf16', 'fp16', batches, program=lambda recipe: "
                "recipe.wrap(model).apply)"
            )
        each = program(load_recipe(each))
    if not callable(each) or isinstance(each, (jax.stages.Compiled, jax.stages.Lowered)):
        raise ValidationError(
            f"{name} is of type {type(each).__name__}. Pass a function of the batch, or a "
            f"jax.export.Exported:\n    {_CALL}"
        )
    return each


def _check_sizes(batches: Sequence[tuple[Any, ...]], batch_size: int | None, shift: int) -> None:
    for number, batch in enumerate(batches):
        sizes = {jnp.shape(x)[:1] for x in jax.tree.leaves(batch[-1])}
        if (batch_size or shift) and (len(sizes) != 1 or () in sizes):
            raise ValidationError(
                f"batch_size and shift split the last argument of a batch along its first axis; "
                f"the arrays of batch {number} have the sizes {sorted(sizes)} there. Pass the "
                f"parameters first: {_CALL}"
            )
        size = next(iter(sizes), (0,))
        if batch_size and size[0] % batch_size:
            raise ValidationError(
                f"batch {number} has {size[0]} examples, which are no multiple of "
                f"batch_size={batch_size}. Pass a divisor, such as batch_size=1."
            )


def _served(fn: Callable[..., Any], batch_size: int | None, shift: int) -> Callable[..., Any]:
    """Returns the serving function for another batch size, or other positions of the examples."""
    if batch_size is None and not shift:
        return fn

    def served(*batch: PyTree) -> Any:
        *rest, last = batch
        last = jax.tree.map(lambda x: jnp.roll(x, shift, 0), last) if shift else last
        size = jax.tree.leaves(last)[0].shape[0]
        step = batch_size or size
        part = lambda start: jax.tree.map(lambda x: x[start : start + step], last)
        results = [_array(fn(*rest, part(start))) for start in range(0, size, step)]
        result = results[0] if len(results) == 1 else jnp.concatenate(results)
        return jnp.roll(result, -shift, 0) if shift else result

    return served


def _array(result: PyTree) -> Any:
    return jax.tree.leaves(result)[0]


def _check_outputs(shapes: Sequence[Any], outputs: str) -> None:
    for name, shape in zip(("train", "serve"), shapes, strict=True):
        leaves = jax.tree.leaves(shape)
        is_float = len(leaves) == 1 and jnp.issubdtype(leaves[0].dtype, jnp.floating)
        if not is_float or leaves[0].ndim < (2 if outputs == _metrics.LOGITS else 0):
            texts = ", ".join(f"{x.dtype}{list(x.shape)}" for x in leaves) or "nothing"
            raise ValidationError(
                f"{name} returns {texts}. Return one array of floats: {outputs}, as in\n"
                "    jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1)[..., 0]"
            )
    first, second = (jax.tree.leaves(shape)[0].shape for shape in shapes)
    if first != second:
        raise ValidationError(
            f"train returns outputs of the shape {first}, and serve of {second}. Return the same "
            "positions of the same examples in both, such as outputs[:, 1:]."
        )


def _check_nan(train: np.ndarray, serve: np.ndarray, number: int) -> None:
    is_other = np.isnan(train.astype(np.float64)) != np.isnan(serve.astype(np.float64))
    if is_other.any():
        index = tuple(int(n) for n in np.argwhere(is_other)[0])
        raise ValidationError(
            f"The outputs of batch {number} at {index} are {train[index]} in training and "
            f"{serve[index]} in serving. Only positions that are NaN in both are left out; "
            "jaxmp.locate_nonfinite(serve, *batch) names the cause of others."
        )
