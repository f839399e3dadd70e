"""Search of the first call of a model: results that must not be rounded, and missing precision.

The first call with arguments of these shapes is traced once more. In this trace each module labels
its floating arguments and results by the primitive `name`, and `Uses` finds the labels whose values
reach a softmax, an order or a loss, or are the results of the model and have no other use. Layers
return the FP32 sums of such results, and modules pass them on without a cast.

The same trace shows matmuls that compute in FP32 although the policy of their module does not say
so: of classes that cast their operands themselves, and of layers that `wrap` does not reach; and a
model of which no layer uses FP8.
"""

from __future__ import annotations

import copy
import dataclasses
import os
import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from jaxmp._autocast._resolve import is_traced_by_autocast
from jaxmp._core._compat import ClosedJaxpr, Jaxpr, JaxprEqn, context, current_context
from jaxmp._core._dtypes import FLOAT32, bits, is_16bit
from jaxmp._core._trees import is_float
from jaxmp._core._typing import PyTree
from jaxmp._flax._casts import IsLeaf, ModulePolicy, computes_in_16_bits
from jaxmp._flax._layer_table import CONV, LayerTraits
from jaxmp._policies._load import PolicyMap
from jaxmp._programs import _jaxprs
from jaxmp._programs._analysis import Forward
from jaxmp._programs._constructs import Form, form_of, scan_of, sub_jaxprs
from jaxmp._programs._interpreter import Frame
from jaxmp._programs._locations import Lines
from jaxmp._programs._matmuls import MATMULS, WIDENED_MATMUL, count_flops, matmul_of
from jaxmp._programs._operations import label_of, name_of, new_dtype_of
from jaxmp._programs._uses import EXACT, Use, Uses, wide_results
from jaxmp.errors import RecipeWarning
from jaxmp.fp8 import _explain

# ---------------------------------------------------------------------------
# Search
# ---------------------------------------------------------------------------


class _Module(NamedTuple):
    """Module that was called.

    Attributes:
      cls: name of its class.
      method: the method, if it is not a forward pass; otherwise "".
      is_low: True if its matmuls should read 16 bits.
    """

    cls: str
    method: str
    is_low: bool


class Labeling:
    """`Context.decisions` while a model is traced with labels: the modules that were called."""

    def __init__(self) -> None:
        self.modules: dict[str, _Module] = {}
        # Labels of the results of linear layers.
        self.layers: set[str] = set()


class ModelSearch:
    """Findings of the calls of one model. Copies of it share them; a pickled one begins anew."""

    def __init__(self) -> None:
        # Method, and shapes of its arguments -> labels of values -> why they are not rounded.
        self._labels: dict[Hashable, dict[str, str]] = {}
        # Labels of the results of linear layers.
        self._layers: set[str] = set()
        self._messages: list[str] = []

    def __reduce__(self) -> tuple[type[ModelSearch], tuple[()]]:
        return ModelSearch, ()

    def of_call(
        self,
        key: tuple[type, PolicyMap, tuple[str, ...]],
        called: Any,
        arguments: PyTree,
        prepare: Callable[[], tuple[Callable[..., PyTree], PyTree, int]],
    ) -> Hashable:
        """Returns the labels of the values of a call of a model that are not rounded.

        Args:
          key: class, policies and path of the model. A part of a model has a path.
          called: its method.
          arguments: of the call.
          prepare: returns a function that calls the model, all arrays that it reads, and how many
            of them are the first ones, which are variables of the model.
        """
        active, policies = current_context().decisions, key[1]
        is_low = policies.default.matmul == "fp8" or computes_in_16_bits(policies)
        if active is not None or not is_low:
            return active
        leaves, structure = jax.tree.flatten(arguments)
        name = getattr(called, "__qualname__", ""), getattr(called, "__code__", called)
        call = key[2], name, structure, *map(_described, leaves)
        if call not in self._labels:
            # Only a call of the whole model shows that no layer uses FP8; `explain` lists them.
            is_whole = name[0].endswith("__call__") and not _explain.is_recording()
            is_first, self._labels[call] = not self._labels, {}
            self._search(call, key, prepare, is_first=is_first, is_whole=is_whole)
        return frozenset(self._labels[call])

    def warn(self, stacklevel: int) -> None:
        """Reports what a search showed, once.

        Args:
          stacklevel: of the user's call, counted from the caller, as in `warnings.warn`.
        """
        messages, self._messages = self._messages, []
        for message in messages:
            warnings.warn(message, RecipeWarning, stacklevel=stacklevel + 1)

    def reasons(self) -> dict[str, str]:
        """Returns path -> why the results of the layer are not rounded."""
        return {
            label.removeprefix(_PREFIX).rpartition(".")[0]: reason
            for labels in self._labels.values()
            for label, reason in labels.items()
            if label in self._layers
        }

    def _search(
        self,
        call: Hashable,
        key: tuple[type, PolicyMap, tuple[str, ...]],
        prepare: Callable[[], tuple[Callable[..., PyTree], PyTree, int]],
        *,
        is_first: bool,
        is_whole: bool,
    ) -> None:
        labeling, is_cast = Labeling(), is_traced_by_autocast()
        try:
            fn, arrays, count = prepare()
            search = context(decisions=labeling)
            with search, _explain.recorded() as fp8, warnings.catch_warnings():
                warnings.simplefilter("ignore")
                closed = _jaxprs.trace(fn, (arrays,), {}).closed
        except Exception:
            # The call itself raises the same error, or it reads values of arrays outside of `jit`.
            return
        uses = _LabelUses()
        uses.facts(closed.jaxpr, wide_results(closed.jaxpr))
        reasons = {label: _reason(use) for label, use in uses.of_labels.items()}
        cls, policies, path = key
        in_fp8 = policies.default.matmul == "fp8"
        if in_fp8 and len(labeling.layers) == 1:  # It is a part of a model.
            reasons = {label: reason for label, reason in reasons.items() if reason != _OF_MODEL}
        reasons = {label: reason for label, reason in reasons.items() if reason}
        self._layers |= labeling.layers
        reached = _Reached(labeling.layers & reasons.keys())
        reached.run(closed, [_DATA] * len(closed.jaxpr.invars))
        # Strict promotion refuses an operation of FP32 sums and a 16-bit array.
        is_strict = jax.config.jax_numpy_dtype_promotion == "strict"  # pyright: ignore
        if not (is_strict and reached.meets_16_bits):
            self._labels[call] = {
                label: reasons[label] for label in reached.labels & reasons.keys()
            }
        if is_first and not path:
            low = "" if is_cast else _low_share(cls, closed, count, labeling)
            unused = (
                _unused_fp8(cls, fp8.rows, self._labels[call], closed.jaxpr)
                if in_fp8 and is_whole
                else ""
            )
            self._messages += filter(None, (low, unused))


def copied(arguments: PyTree) -> PyTree:
    """Copies the arguments of a call that are not arrays, because the call may change them."""
    is_array = lambda leaf: hasattr(leaf, "shape") and hasattr(leaf, "dtype")
    return jax.tree.map(lambda leaf: leaf if is_array(leaf) else copy.deepcopy(leaf), arguments)


def _described(leaf: Any) -> Hashable:
    """Returns the shape and dtype of an array, a bool or text, or the type of another object.

    A number that changes with each call, such as a time, is no reason for another search.
    """
    if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
        return leaf.shape, leaf.dtype
    return leaf if isinstance(leaf, (bool, str)) else type(leaf)


# ---------------------------------------------------------------------------
# Labels
# ---------------------------------------------------------------------------

ARGUMENT, RESULT = "argument", "result"
_PREFIX = "jaxmp "


def _owner(path: str, method: str, kind: str) -> str:
    """Returns the first part of the labels of the arguments or results of a method."""
    return f"{_PREFIX}{path}.{method} {kind} "


def labeled(
    module_policy: ModulePolicy, method: str, kind: str, tree: PyTree, is_leaf: IsLeaf
) -> PyTree:
    """Labels the floating arrays of arguments or results while a model is searched.

    Args:
      module_policy, method: of the module.
      kind: `ARGUMENT` or `RESULT`.
      tree: the arguments or results.
      is_leaf: as in `jax.tree.map`.
    """
    if not isinstance(current_context().decisions, Labeling):
        return tree
    owner = _owner(module_policy.resolved.path, method, kind)
    leaves, structure = jax.tree.flatten(tree, is_leaf=is_leaf)
    is_float = lambda leaf: isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jnp.floating)
    return structure.unflatten(
        checkpoint_name(leaf, f"{owner}{n}") if is_float(leaf) else leaf
        for n, leaf in enumerate(leaves)
    )


def unrounded(
    module_policy: ModulePolicy, method: str, kind: str, tree: PyTree, is_leaf: IsLeaf
) -> frozenset[int]:
    """Returns the ids of the arrays that are not rounded; arguments as in `labeled`."""
    decisions: Any = current_context().decisions
    if not decisions or isinstance(decisions, Labeling):
        return frozenset()
    owner = _owner(module_policy.resolved.path, method, kind)
    leaves = enumerate(jax.tree.leaves(tree, is_leaf=is_leaf))
    return frozenset(id(leaf) for n, leaf in leaves if f"{owner}{n}" in decisions)


def is_decision(traits: LayerTraits, cls: type, path: Sequence[str], method: str) -> bool:
    """Returns True if a method of a module is the matmul of a layer with an unrounded result.

    A method that a user overrides in a subclass may multiply by the kernel itself.
    """
    decisions: Any = current_context().decisions
    name = "/".join(path)
    is_matmul = method == ("attend" if traits.embedding else "__call__")
    is_layer = bool(traits.kernel or traits.embedding) and not traits.is_convolution
    if not decisions or not is_matmul or not is_layer:
        return False
    author, owner = getattr(cls, "_jaxmp_class", cls), traits.registered or traits.layer
    if getattr(author, method) is not getattr(owner, method, None):
        return False
    label = f"{_owner(name, method, RESULT)}0"
    if isinstance(decisions, Labeling):
        decisions.layers.add(label)
        return False
    return label in decisions


def note_module(module_policy: ModulePolicy, method: str, *, is_forward: bool) -> None:
    """Records a call of a module while a model is searched."""
    labeling = current_context().decisions
    if isinstance(labeling, Labeling):
        traits, dtype = module_policy.traits, module_policy.policy.compute_dtype
        # Those of Flax's layers that do not are meant to be in FP32.
        is_low = is_16bit(dtype) and not (traits.is_norm or traits.upcasts_params or traits.dtype)
        module = _Module(module_policy.cls.__name__, "" if is_forward else method, is_low)
        labeling.modules[module_policy.resolved.path] = module


# ---------------------------------------------------------------------------
# Analysis
# ---------------------------------------------------------------------------


class _LabelUses(Uses):
    """Uses of labeled values, except where another array, such as a carry, fixes their dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.of_labels: dict[str, Use] = {}

    def equation(self, equation: JaxprEqn, results: list[Any], frame: Frame) -> list[Any]:
        name = equation.primitive.name
        if name == "name":
            label = label_of(equation)
            self.of_labels[label] = self.of_labels.get(label, Use.NONE) | results[0]
        form = form_of(equation)
        if form in (Form.SCAN, Form.WHILE, Form.BRANCH) or name == "dynamic_update_slice":
            fixed = scan_of(equation).carry if form is Form.SCAN else len(results)
            results = [Use.NONE] * fixed + results[fixed:]
        return super().equation(equation, results, frame)


_CONSTANT, _DATA, _REACHED = range(3)


class _Reached(Forward):
    """Finds the labels of values that are computed from the results of layers, without a matmul.

    Args:
      layers: labels of the results of the layers.
    """

    nothing = _DATA

    def __init__(self, layers: set[str]) -> None:
        super().__init__()
        self._layers, self.labels = layers, set[str]()
        # True if such a value and a 16-bit array are operands of one operation.
        self.meets_16_bits = False

    def constant(self, array: Any) -> int:
        return _DATA if np.ndim(array) else _CONSTANT

    def join(self, first: int, second: int) -> int:
        return max(first, second)

    def equation(self, equation: JaxprEqn, operands: list[Any], frame: Frame) -> list[Any]:
        name, fact = equation.primitive.name, max(operands, default=_CONSTANT)
        if sub_jaxprs(equation):
            return self.enter(equation, operands, frame)
        if name == "name":
            label = label_of(equation)
            fact = _REACHED if label in self._layers else fact
            self.labels |= {label} if fact == _REACHED else set()
        elif name in MATMULS:
            fact = _DATA
        elif fact == _REACHED:
            others = (equation.invars[n].aval for n, each in enumerate(operands) if each == _DATA)
            self.meets_16_bits |= any(map(_is_strong_16bit, others))
        return [fact] * len(equation.outvars)


def _is_strong_16bit(aval: Any) -> bool:
    return is_float(aval) and is_16bit(aval.dtype) and not aval.weak_type


_OF_MODEL = "its results are those of the model"


def _reason(use: Use) -> str:
    """Returns why a value is not rounded; "" if it is."""
    reasons = {
        Use.ORDER: "argmax, top-k or a sort compares its results",
        Use.SOFTMAX: "a softmax reads its results",
        Use.LOSS: "a loss reads its results",
    }
    if use == Use.RESULT:
        return _OF_MODEL
    return next((reasons[each] for each in reasons if each in use), "")


# ---------------------------------------------------------------------------
# Missing precision
# ---------------------------------------------------------------------------


def low_precision_share(fn: Callable[..., Any], *args: PyTree, **kwargs: PyTree) -> float | None:
    """Returns the share of a function's matmul FLOPs in 16 bits or fewer; None without matmuls.

    Args:
      fn: any JAX function; nothing is computed.
      *args, **kwargs: its arguments, or their shapes.
    """
    args, kwargs = jax.tree.map(_shape_of, (args, kwargs))
    with _explain.recorded():
        return _share(_jaxprs.trace(fn, args, kwargs).closed)


def _share(closed: ClosedJaxpr) -> float | None:
    flops = count_flops(closed)
    is_float = lambda dtype: jnp.issubdtype(dtype, jnp.floating)
    flops = Counter({pair: n for pair, n in flops.items() if all(map(is_float, pair))})
    low = sum(flops[pair] for pair in flops if all(bits(dtype) <= 16 for dtype in pair))
    return low / flops.total() if flops.total() else None


def _shape_of(leaf: object) -> object:
    if not isinstance(leaf, jax.Array):
        return leaf
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, weak_type=getattr(leaf, "weak_type", False))


class _WeightMatmuls(Forward):
    """Finds the FP32 matmuls whose operand is a weight: an argument or constant, also if cast."""

    nothing = False

    def __init__(self, modules: dict[str, _Module]) -> None:
        super().__init__()
        self._modules = modules
        # Path -> FLOPs and an equation; first of modules that should read 16 bits, then of others.
        self.found: tuple[dict[str, tuple[float, JaxprEqn]], ...] = {}, {}

    def constant(self, array: Any) -> bool:
        return np.ndim(array) > 1

    def equation(self, equation: JaxprEqn, operands: list[Any], frame: Frame) -> list[Any]:
        name = equation.primitive.name
        if name in MATMULS and any(operands):
            matmul = matmul_of(equation)
            if FLOAT32 in (matmul.lhs, matmul.rhs):
                path = self._path(frame.place.of(equation).scopes)
                self.found[not self._modules[path].is_low][path] = matmul.flops, equation
            return [False]
        if name in EXACT:
            return [any(operands)] * len(equation.outvars)
        is_converted = name_of(equation) == WIDENED_MATMUL
        return [False] if is_converted else self.enter(equation, operands, frame)

    def _path(self, scopes: _jaxprs.Path) -> str:
        """Returns the path of the innermost module of the scopes of an equation."""
        inward = [scopes[:length] for length in range(len(scopes), -1, -1)]
        paths = (path for each in inward for path in _jaxprs.module_paths_of(each))
        return next((path for path in paths if path in self._modules), "")


def _low_share(cls: type, closed: ClosedJaxpr, count: int, labeling: Labeling) -> str:
    """Returns a warning of a model whose matmuls mostly ignore its 16-bit policy; "" for others."""
    share = _share(closed)
    if share is None or share >= 0.5:
        return ""
    matmuls, arguments = _WeightMatmuls(labeling.modules), len(closed.jaxpr.invars)
    matmuls.run(closed, [n < count for n in range(arguments)])
    ignored, chosen = ({path: row[0] for path, row in rows.items()} for rows in matmuls.found)
    if not ignored or sum(ignored.values()) < sum(chosen.values()):
        return ""
    path = max(ignored, key=ignored.__getitem__)
    name, method, _ = labeling.modules[path]
    file, line = Lines().of([matmuls.found[0][path][1]])
    where = f"the module {path!r}" if path else "the model"
    if method:
        reason = (
            f"The method {method!r} of the module {path!r} multiplies by its own parameters, but "
            "its arguments are cast only in a forward pass. Declare the method as one: "
            f"Rule({path!r}, forward_methods=[{method!r}])."
        )
    else:
        reason = (
            f"Matmuls of {where}, a {name} ({os.path.basename(file)}, line {line}), "
            "read float32 operands: it casts them, or it calls layers that are not its attributes, "
            "such as those of a closure, which policies do not reach and Flax NNX does not train. "
            "Apply the same recipe to each operation: loss_fn = jaxmp.autocast(loss_fn, recipe)."
        )
    return f"{share:.0%} of the matmul FLOPs of {cls.__name__} run in 16 bits or fewer. {reason}"


def note_weights(module_policy: ModulePolicy, own: Callable[[], Iterable[Any]]) -> None:
    """Records a module with a policy for FP8 and weights, `own()`, that no FP8 dot multiplies."""
    traits, cls, path = module_policy.traits, module_policy.cls, module_policy.resolved.path
    if not _explain.is_recording() or module_policy.resolved.scaling is None:
        return
    has_fp8 = getattr(traits.dot, "fp8", None) is not None
    # A layer of Flax that is wrapped alone is a part of a model.
    is_part = not path and cls.__module__.startswith("flax.")
    has_matrix = lambda: any(getattr(array, "ndim", 0) > 1 for array in own())
    if not (has_fp8 or is_part or traits.is_norm or traits.embedding) and has_matrix():
        why = "FP8 has no convolutions" if traits.dot is CONV else f"{cls.__name__} {_NO_DOT}"
        _explain.note_unsupported(path, why)


_NO_DOT = _explain.UNKNOWN_DOT


def _unused_fp8(cls: type, rows: list[Any], labels: dict[str, str], jaxpr: Jaxpr) -> str:
    """Returns a warning of a model that has matmuls, none of which computes in FP8; else ""."""
    decided = [_without_decisions(row, labels) for row in rows]
    if not decided or not all(row.exclusion_reason for row in decided):
        return ""
    equations = list(_jaxprs.equations(jaxpr))
    if set(MATMULS).isdisjoint(equation.primitive.name for equation in equations):
        return ""
    # A layer that was jitted before records no decision.
    casts = (each for each in equations if each.primitive.name == "convert_element_type")
    if decided == rows and any("float8" in str(new_dtype_of(each)) for each in casts):
        return ""
    return _explain.unused_text(cls.__name__, [row for row in decided if row.path or not row.k])


def _without_decisions(row: _explain.LayerDecision, labels: dict[str, str]) -> Any:
    """Returns the decision on a layer, which does not run in FP8 if its results are not rounded."""
    why = labels.get(f"{_owner(row.path, '__call__', RESULT)}0", "")
    return row if row.exclusion_reason else dataclasses.replace(row, exclusion_reason=why)
