"""The functions `parity` and `assert_parity`, their metrics, and their report.

The metrics of the difference of two programs' outputs are computed in FP64 on the host. Frameworks
for reinforcement learning measure the same quantities of sampled tokens: NeMo RL the mean of
exp(|difference|) (`token_mult_prob_error`) and KL divergences, verl and TRL the KL divergence with
its K1 and K3 estimators and the largest ratio, MaxText a band of the ratio. The JSON of the report
has the fields of `ParityReport` after those of the schema.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from scipy import special

from jaxmp import _core, _programs
from jaxmp._core import JSONValue
from jaxmp._policies import _recipe
from jaxmp._tools.report import _section, _views
from jaxmp._tools.validate import _parity_search
from jaxmp.errors import ValidationError, ValidationFailedError

LOG_PROBS, LOGITS, OUTPUTS = "log_probs", "logits", "outputs"
KINDS = (LOG_PROBS, LOGITS, OUTPUTS)
# Bands of the ratio of serving and training, by the name of the field of a row.
BANDS = {"band": (0.999, 1.002), "within_1": (0.99, 1.01), "within_5": (0.95, 1.05)}
# Rows of a table of positions.
_ROWS = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParityRow:
    """Difference of the outputs of some positions.

    Args:
      positions: first and last position, such as "0-15"; "all".
      count: compared values; for logits, distributions.
      band: share of the values whose ratio of serving and training is in 0.999 to 1.002.
      within_1: the same for 0.99 to 1.01.
      within_5: the same for 0.95 to 1.05.
      difference: mean absolute difference, of log-probabilities in nats.
      mult_error: mean of exp(absolute difference); 0 for outputs that are not log-probabilities.
      kl: KL(serving || training) in nats; 0 for other outputs. It is exact for logits. For tokens
        that serving has sampled, it is the K3 estimate, as in verl: the mean of
        ratio - 1 - log(ratio), with the ratio of training and serving.
      largest: the ratio that is farthest from 1.
    """

    positions: str
    count: int
    band: float
    within_1: float
    within_5: float
    difference: float
    mult_error: float
    kl: float
    largest: float


def rows_of(train: np.ndarray, serve: np.ndarray, kind: str) -> list[ParityRow]:
    """Returns the differences of all positions, and then those of ranges of positions.

    Args:
      train, serve: outputs `[..., position]`; logits `[..., position, vocabulary]`. Values that are
        NaN in both are left out.
      kind: "log_probs", "logits" or "outputs".
    """
    x, y = (np.asarray(each, np.float64) for each in (train, serve))
    if kind == LOGITS:
        x, y = (special.log_softmax(each, axis=-1) for each in (x, y))
    axis = x.ndim - 1 - (kind == LOGITS)
    length = x.shape[axis] if axis > 0 or (axis == 0 and kind != OUTPUTS) else 0
    parts = [("all", x, y)]
    edges = sorted({round(n * length / _ROWS) for n in range(_ROWS + 1)}) if length > 1 else []
    for start, stop in itertools.pairwise(edges):
        label = f"{start}-{stop - 1}" if stop - start > 1 else str(start)
        part = range(start, stop)
        parts.append((label, np.take(x, part, axis), np.take(y, part, axis)))
    return [_row(label, a, b, kind) for label, a, b in parts]


def _row(label: str, x: np.ndarray, y: np.ndarray, kind: str) -> ParityRow:
    used = ~(np.isnan(x) & np.isnan(y))
    # Shares and means are those of tokens that the serving program samples.
    weights = np.exp(y) if kind == LOGITS else used.astype(np.float64)
    used &= weights > 0
    count = int(np.prod(x.shape[:-1])) if kind == LOGITS else int(used.sum())
    x, y, weights = x[used], y[used], weights[used]
    mean = lambda z: float(np.sum(weights * z) / weights.sum()) if z.size else 0.0
    with np.errstate(all="ignore"):
        difference = np.where(x == y, 0.0, y - x)
        ratio = np.where(x == y, 1.0, y / x) if kind == OUTPUTS else np.exp(difference)
        distance = np.where(ratio > 0, np.abs(np.log(ratio)), np.inf)
        estimate = difference + (0 if kind == LOGITS else np.expm1(-difference))
    is_log = kind != OUTPUTS
    return ParityRow(
        positions=label,
        count=count,
        **{name: mean((low <= ratio) & (ratio <= high)) for name, (low, high) in BANDS.items()},
        difference=mean(np.abs(difference)),
        mult_error=mean(np.exp(np.abs(difference))) if is_log else 0.0,
        kl=max(mean(estimate), 0.0) if is_log else 0.0,
        largest=float(ratio[np.argmax(distance)]) if ratio.size else 1.0,
    )


# ---------------------------------------------------------------------------
# Report
# ---------------------------------------------------------------------------


_COLUMNS = ("positions", "0.999 to 1.002", "1 %", "5 %", "difference", "KL", "largest ratio")
# Other modules that differ, of which the text names at most so many.
_OTHERS = 3
_RATIO = (
    "Shares of the outputs whose ratio of serving and training is in 0.999 to 1.002, or differs by "
    "at most 1 % or 5 %; mean absolute difference; KL(serving || training); the ratio that is "
    "farthest from 1."
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParityReport(_views.Report):
    """Result of `jaxmp.parity`.

    Args:
      outputs: "log_probs", "logits" or "outputs".
      batches: number of compared batches.
      rows: the differences of all positions, and then those of ranges of positions.
      cause: the first operation that differs by more than rounding explains; None if there is none.
      searched: True if the programs were run one operation at a time, since their outputs differ.
      by_operations: mean absolute difference of these runs.
      unknown: operations that contain functions, which these runs do not enter.

    Example:
      >>> report = jaxmp.parity(jnp.tanh, jnp.tanh, [jnp.ones((2, 4))], outputs="outputs")
      >>> report.cause, report.rows[0].band
      (None, 1.0)
    """

    _subject = "parity report"
    _title = "Parity of training and serving"
    _command = "pathlib.Path('parity.json').write_text(report.to_json())"
    _error = ValidationError
    _schema: ClassVar[dict[str, JSONValue]] = {"schema": "jaxmp.parity", "schema_version": 1}

    outputs: str
    batches: int
    rows: tuple[ParityRow, ...]
    cause: _parity_search.ParityCause | None
    searched: bool
    by_operations: float
    unknown: tuple[str, ...] = ()

    def _sections(self, full: bool) -> list[_section.Section]:
        total = self.rows[0]
        cells = tuple(
            (
                row.positions,
                *(_section.share_text(x) for x in (row.band, row.within_1, row.within_5)),
                f"{row.difference:.3g}",
                f"{row.kl:.3g}" if self.outputs != OUTPUTS else "",
                f"{row.largest:.5g}",
            )
            for row in (self.rows if full else (total, *self.rows[1::3]))
        )
        mood = "bad" if self.cause else "good" if total.band == 1 else "open"
        section = _section.Section(self._headline(), _RATIO, _COLUMNS, cells, mood=mood)
        return [section, *([self._cause(self.cause)] if self.cause else [])]

    def _headline(self) -> str:
        total = self.rows[0]
        count = f"{_section.share_text(total.band)} of {total.count:,} outputs"
        text = f"{count} have a ratio in 0.999 to 1.002"
        if self.unknown:
            text += f"; the operations inside of {', '.join(self.unknown)} are not compared"
        if self.cause is not None:
            return f"{text}; first difference: {_location(self.cause)}"
        if not self.searched or self.unknown:
            return text
        if self.by_operations < 0.1 * total.difference:
            return f"{text}; the difference is in the compiled code: the operations agree"
        return f"{text}; rounding and the order of sums explain the differences"

    def _cause(self, cause: _parity_search.ParityCause) -> _section.Section:
        shown, more = ", ".join(cause.others[:_OTHERS]), len(cause.others) - _OTHERS
        others = f" Others differ, too: {shown}{f' and {more} more' if more > 0 else ''}."
        result = (
            f"Run with this change, the mean absolute difference is {cause.after:.3g} instead of "
            f"{cause.before:.3g}."
        )
        parts = (*_section.fix_parts(cause.fix), (False, result))
        return _section.Section(
            "Cause",
            f"{_location(cause)} is the first operation whose results differ by more than rounding "
            f"explains, for equal operands. Training: {cause.train}. Serving: {cause.serve}. "
            f"{cause.text and f'Its line: {cause.text}'}{others if cause.others else ''}",
            fixes=(_section.Fix("Change", parts),),
        )


def _location(cause: _parity_search.ParityCause) -> str:
    where = f"{cause.operation} in {_section.module_text(cause.module)}"
    return f"{where} ({cause.location})" if cause.location else where


# ---------------------------------------------------------------------------
# Functions
# ---------------------------------------------------------------------------


# A function of the batch, an exported program, or a recipe with which `program` makes a function.
ProgramLike: TypeAlias = Callable[..., Any] | export.Exported | _recipe.Recipe | str
_CALL = "jaxmp.parity(train_log_probs, serve_log_probs, [(params, tokens)])"


def parity(
    train: ProgramLike,
    serve: ProgramLike,
    batches: Sequence[_core.PyTree],
    *,
    outputs: str = "log_probs",
    program: Callable[[_recipe.Recipe], Callable[..., Any]] | None = None,
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
    rows = rows_of(x, y, outputs)
    cause, before, unknown = None, 0.0, set[str]()
    is_equal = all(np.array_equal(x, y, equal_nan=True) for x, y in pairs)
    if search and not is_equal:
        distances = [rows_of(x, y, outputs)[0].difference for x, y in pairs]
        batch = batches[int(np.argmax(distances))]
        first, second = (_programs.trace(each, batch, {}) for each in (functions[0], served))
        cause, before, unknown = _parity_search.find_cause(first, second, shift)
    return ParityReport(
        outputs=outputs,
        batches=len(batches),
        rows=tuple(rows),
        cause=cause,
        searched=search and not is_equal,
        by_operations=before,
        unknown=tuple(sorted(unknown)),
    )


def assert_parity(
    train: ProgramLike,
    serve: ProgramLike,
    batches: Sequence[_core.PyTree],
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
    names = {value: name for name, value in BANDS.items()}
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
    if not all(getattr(x, "is_fully_addressable", True) for x in jax.tree.leaves(batches)):
        raise ValidationError(
            "batches has arrays of several hosts, which no host can compare alone. Pass copies:"
            "\n    from jax.experimental import multihost_utils"
            "\n    batches = multihost_utils.process_allgather(batches, tiled=True)"
        )
    if outputs not in KINDS:
        raise ValidationError(
            f"outputs={outputs!r} is none of {', '.join(map(repr, KINDS))}."
            f"{_core.did_you_mean(str(outputs), KINDS)}"
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

    def served(*batch: _core.PyTree) -> Any:
        *rest, last = batch
        last = jax.tree.map(lambda x: jnp.roll(x, shift, 0), last)
        size = jax.tree.leaves(last)[0].shape[0]
        step = batch_size or size
        part = lambda start: jax.tree.map(lambda x: x[start : start + step], last)
        results = [_array(fn(*rest, part(start))) for start in range(0, size, step)]
        return jnp.roll(jnp.concatenate(results), -shift, 0)

    return fn if batch_size is None and not shift else served


def _array(result: _core.PyTree) -> Any:
    return jax.tree.leaves(result)[0]


def _check_outputs(shapes: Sequence[Any], outputs: str) -> None:
    texts = [
        ", ".join(f"{x.dtype}{list(x.shape)}" for x in jax.tree.leaves(each)) for each in shapes
    ]
    for name, each, text in zip(_parity_search.PROGRAM_NAMES, shapes, texts, strict=True):
        leaves, least = jax.tree.leaves(each), 2 * (outputs == LOGITS)
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
