"""The functions `parity` and `assert_parity`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

from jaxmp._core import _messages, _typing
from jaxmp._policies import _recipe
from jaxmp._programs import _jaxprs
from jaxmp._tools.validate import _metrics, _parity_report, _parity_search
from jaxmp.errors import ValidationError, ValidationFailedError

# A function of the batch, an exported program, or a recipe with which `program` makes a function.
ProgramLike: TypeAlias = Callable[..., Any] | export.Exported | _recipe.Recipe | str
_CALL = "jaxmp.parity(train_log_probs, serve_log_probs, [(params, tokens)])"


def parity(
    train: ProgramLike,
    serve: ProgramLike,
    batches: Sequence[_typing.PyTree],
    *,
    outputs: str = "log_probs",
    program: Callable[[_recipe.Recipe], Callable[..., Any]] | None = None,
    batch_size: int | None = None,
    shift: int = 0,
    search: bool = True,
) -> _parity_report.ParityReport:
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
      >>> report.cause.operation, report.cause.kind
      ('convert_element_type', 'dtype')
    """
    _check(batches, outputs, batch_size, shift)
    functions = [
        _function(each, name, program) for each, name in ((train, "train"), (serve, "serve"))
    ]
    batches = [batch if isinstance(batch, tuple) else (batch,) for batch in batches]
    served = _served(functions[1], batch_size, shift)
    _check_outputs([jax.eval_shape(each, *batches[0]) for each in (functions[0], served)], outputs)
    compiled = jax.jit(functions[0]), jax.jit(served)
    pairs = [tuple(np.asarray(_array(fn(*batch))) for fn in compiled) for batch in batches]
    for number, (x, y) in enumerate(pairs):
        _check_nan(x, y, number)
    x, y = (np.concatenate(list(map(np.atleast_1d, each))) for each in zip(*pairs, strict=True))
    rows = _metrics.rows_of(x, y, outputs)
    cause, before = None, 0.0
    is_equal = all(np.array_equal(x, y, equal_nan=True) for x, y in pairs)
    if search and not is_equal:
        distances = [_metrics.rows_of(x, y, outputs)[0].difference for x, y in pairs]
        batch = batches[int(np.argmax(distances))]
        traced = [_jaxprs.trace(each, batch, {}) for each in (functions[0], served)]
        cause, before = _parity_search.find_cause(*traced, shift)
    return _parity_report.ParityReport(
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
    batches: Sequence[_typing.PyTree],
    *,
    band: tuple[float, float] = (0.999, 1.002),
    share: float = 1.0,
    **options: Any,
) -> _parity_report.ParityReport:
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
    if band not in names or not 0 < share <= 1:
        raise ValidationError(
            f"assert_parity received band={band!r} and share={share!r}. The bands are {[*names]}, "
            "and a share is in 0 to 1:\n"
            "    jaxmp.assert_parity(train, serve, batches, band=(0.99, 1.01), share=0.999)"
        )
    report = parity(train, serve, batches, **options)
    measured = getattr(report.rows[0], names[band])
    if measured < share:
        raise ValidationFailedError(
            f"{measured:.4%} of the outputs have a ratio of serving and training in {band[0]} to "
            f"{band[1]}; {share:.4%} are required.\n\n{report}"
        )
    return report


# ---------------------------------------------------------------------------
# Arguments
# ---------------------------------------------------------------------------


def _check(batches: Any, outputs: str, batch_size: int | None, shift: int) -> None:
    if not isinstance(batches, Sequence) or isinstance(batches, (tuple, str)) or not batches:
        text = "is empty" if isinstance(batches, list) else f"is a {type(batches).__name__}"
        raise ValidationError(f"batches {text}. Pass a list of batches:\n    {_CALL}")
    if outputs not in _metrics.KINDS:
        raise ValidationError(
            f"outputs={outputs!r} is none of {', '.join(map(repr, _metrics.KINDS))}."
            f"{_messages.did_you_mean(str(outputs), _metrics.KINDS)}"
        )
    for number, batch in enumerate(batches if batch_size is not None or shift else ()):
        last = batch[-1] if isinstance(batch, tuple) else batch
        sizes = {jnp.shape(x)[:1] for x in jax.tree.leaves(last)}
        size = sizes.pop() if len(sizes) == 1 else ()
        step = size[0] if size and batch_size is None else batch_size
        if not size or not isinstance(step, int) or step < 1 or size[0] % step:
            raise ValidationError(
                f"batch_size={batch_size!r} and shift={shift!r} split and roll the last argument "
                f"along the first axis, and that of batch {number} has the shapes "
                f"{[jnp.shape(x) for x in jax.tree.leaves(last)]}. Pass the parameters first and "
                f"a divisor of the number of examples, batch_size=1:\n    {_CALL}"
            )


def _function(
    each: ProgramLike, name: str, program: Callable[[_recipe.Recipe], Callable[..., Any]] | None
) -> Callable[..., Any]:
    if isinstance(each, export.Exported):
        return each.call
    if isinstance(each, (str, _recipe.Recipe)) and program is not None:
        each = program(_recipe.load_recipe(each))
    if not callable(each) or isinstance(each, (jax.stages.Compiled, jax.stages.Lowered)):
        raise ValidationError(
            f"{name} is {each!r}, of type {type(each).__name__}. Pass a function of the batch, a "
            f"jax.export.Exported, or a recipe and the function that it is for:\n    {_CALL}\n"
            "    jaxmp.parity('bf16', 'fp16', batches, program=lambda recipe: "
            "recipe.wrap(model).apply)"
        )
    return each


def _served(fn: Callable[..., Any], batch_size: int | None, shift: int) -> Callable[..., Any]:
    """Returns the serving function for another batch size, or other positions of the examples."""

    def served(*batch: _typing.PyTree) -> Any:
        *rest, last = batch
        last = jax.tree.map(lambda x: jnp.roll(x, shift, 0), last)
        size = jax.tree.leaves(last)[0].shape[0]
        step = batch_size or size
        part = lambda start: jax.tree.map(lambda x: x[start : start + step], last)
        results = [_array(fn(*rest, part(start))) for start in range(0, size, step)]
        return jnp.roll(jnp.concatenate(results), -shift, 0)

    return fn if batch_size is None and not shift else served


def _array(result: _typing.PyTree) -> Any:
    return jax.tree.leaves(result)[0]


def _check_outputs(shapes: Sequence[Any], outputs: str) -> None:
    texts = [
        ", ".join(f"{x.dtype}{list(x.shape)}" for x in jax.tree.leaves(each)) for each in shapes
    ]
    for name, each, text in zip(_parity_search.PROGRAM_NAMES, shapes, texts, strict=True):
        leaves, least = jax.tree.leaves(each), 2 * (outputs == _metrics.LOGITS)
        is_one = len(leaves) == 1 and jnp.issubdtype(leaves[0].dtype, jnp.floating)
        if not is_one or leaves[0].ndim < least:
            raise ValidationError(
                f"The {name} program returns {text or 'nothing'}. Return one array of {outputs}:\n"
                "    jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1)[..., 0]"
            )
    if _array(shapes[0]).shape != _array(shapes[1]).shape:
        raise ValidationError(
            f"The training program returns {texts[0]}, and the serving program {texts[1]}. Return "
            "the same positions of the same examples in both, such as outputs[:, 1:]."
        )


def _check_nan(train: np.ndarray, serve: np.ndarray, number: int) -> None:
    is_other = np.isnan(train.astype(np.float64)) != np.isnan(serve.astype(np.float64))
    for index in map(tuple, np.argwhere(is_other)[:1].tolist()):
        raise ValidationError(
            f"The outputs of batch {number} at {index} are {train[index]} in training and "
            f"{serve[index]} in serving. Only positions that are NaN in both are left out; "
            "jaxmp.locate_nonfinite(serve, *batch) names the cause of others."
        )
