"""The walk over a traced program, which calls the checks and counts matmuls."""

from __future__ import annotations

import functools
import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from types import CodeType
from typing import Any

from jaxmp import _core, _programs
from jaxmp._core._compat import ClosedJaxpr
from jaxmp._policies import _load, _op_table, _resolve
from jaxmp._programs import Scope
from jaxmp._tools.audit import _checks, _dataflow, _trace
from jaxmp._tools.audit._labels import ConditionalFinding, Flow, Logits, WasFp8
from jaxmp._tools.audit._rows import NOT_COUNTED, NOT_INSPECTED
from jaxmp.fp8 import _scaling


class PolicyContext:
    """Policies that a program is checked against, and the dtypes that they allow."""

    def __init__(
        self, recipe: _load.RecipeData | None, target: str = "cpu", text: str = "'bf16'"
    ) -> None:
        self.recipe = recipe
        self.policies = None if recipe is None else recipe.policies
        self.ops = _op_table.OpTable() if recipe is None else recipe.ops
        # Type of device that the program is traced for.
        self.target = target
        # The policies in the user's code: "'bf16'", or "recipe"; and code that applies them to a
        # model, to a function, and to a loss function.
        self.text = text
        # Paths of the modules among the arguments; empty if they are not known.
        self.modules = frozenset[str]()
        self.wrap_code = f"model = jaxmp.load_recipe({text}).wrap(model)"
        self.autocast_code = f"fn = jaxmp.autocast(fn, {text})"
        self.loss_code = f"loss_fn = jaxmp.autocast(loss_fn, {text})"
        sentence = "Keep the FP32 result, and let autocast multiply its gradient in 16 bits"
        outside = "outside of derivatives in the loss, such as `jax.jvp`"
        self.gradient_fix = f"{sentence}, {outside}:\n    {self.loss_code}"
        # Many operations are in one scope.
        self.allowed_dtypes = functools.cache(self._allowed_dtypes)

    def _allowed_dtypes(self, names: _programs.Path) -> frozenset[Any]:
        """Returns the dtypes in which matmuls of a scope may compute; empty without policies.

        A program contains no module types. The dtype of a rule by type is allowed wherever a later
        rule or the default policy applies by path.
        """
        if self.policies is None:
            return frozenset()
        if _programs.FULL_PRECISION in names:
            return frozenset({_core.FLOAT32})
        resolved = self.resolve(names)
        dtypes = {resolved.policy.compute_dtype}
        for other in self.policies.rules:
            if other is resolved.rule:
                break
            if other.module_type is not None and other.compute_dtype is not None:
                dtypes.add(other.compute_dtype)
        return frozenset(dtypes)

    def of_program(self, jaxpr: ClosedJaxpr, modules: frozenset[str]) -> PolicyContext:
        """Returns the context of a program: without a recipe, code names that of its 16 bits."""
        results = (var for equation in _programs.equations(jaxpr) for var in equation.outvars)
        counts = Counter(getattr(var.aval, "dtype", None) for var in results)
        is_fp16 = self.recipe is None and counts[_core.FLOAT16] > counts[_core.BFLOAT16]
        context = PolicyContext(self.recipe, self.target, "'fp16'" if is_fp16 else self.text)
        context.modules = modules
        return context

    def with_rule(self, rule: str) -> str:
        """Returns code that adds a rule, which precedes those of the policies."""
        recipe = self.text if self.text.isidentifier() else f"jaxmp.load_recipe({self.text})"
        policies = f"jaxmp.PolicyMap({self.text}, [{rule}])"
        return f"recipe = {recipe}.replace(policies={policies})"

    @property
    def scaling(self) -> _scaling.Scaling:
        """The FP8 scaling of the policies."""
        chosen = None if self.policies is None else self.policies.fp8
        return chosen or _scaling.CurrentScaling()

    @property
    def requires_fp32_reductions(self) -> bool:
        """True if the recipe requires sums of gradients over devices in FP32."""
        return self.recipe is not None and self.recipe.reduce_dtype == "float32"

    def requires_fp8(self, location: _programs.Location) -> bool:
        """Returns True if the policies require FP8 matmuls in linear layers at a location."""
        if self.policies is None or _programs.FULL_PRECISION in location.names:
            return False
        return self.resolve(location.names).scaling is not None

    def resolve(self, names: _programs.Path) -> _resolve.ResolvedPolicy:
        """Resolves the policy of name scopes."""
        assert self.policies is not None
        paths = [*_programs.module_paths_of(names), self.rule_path(names)]
        return _resolve.resolve_first(self.policies, paths)

    def rule_path(self, names: _programs.Path) -> str:
        """Returns the path by which rules find a module; "" for the root.

        If the modules are known, it does not contain other scopes of `jax.named_scope`.
        """
        path = _programs.module_paths_of(names)[0]
        modules = ""
        for name in path.split("/"):
            inner = f"{modules}/{name}".lstrip("/")
            modules = inner if inner in self.modules else modules
        return modules if self.modules else path


def _before_cast(var: _programs.Atom, op: _checks.OpOccurrence) -> _programs.Atom:
    """Returns the operand that JAX widens, because the gradient of a convolution is wider."""
    maker = op.body.maker_through(var, _LAYOUT)
    if maker is None or maker.primitive.name != "convert_element_type":
        return var
    (before,) = maker.invars
    is_widened = _checks.dtype_of(before).itemsize <= _checks.dtype_of(var).itemsize
    is_of_call = _programs.call_site(maker) == _programs.call_site(op.equation)
    return before if is_widened and is_of_call else var


_LAYOUT = _core.named("transpose rev")
_KERNELS = _core.named(
    "pallas_call mpmd_map tpu_custom_call mosaic_gpu_p ffi_call pure_callback cudnn_fusion"
    " scaled_dot scaled_matmul"
)
_ENTERED = _programs.CONSTRUCTS | _programs.OPAQUE_CALLS
_FUSED_ATTENTION = "dot_product_attention_"


class Auditor:
    """Walk over one program, with its findings and counts."""

    def __init__(self, context: PolicyContext) -> None:
        self.context, self.locations = context, _programs.Locations()
        self.findings = _checks.PendingFindings(self)
        self.flow = Flow(context.ops)
        self._uses: dict[Any, _programs.Use] = {}
        # The program, its jaxpr, and the jaxpr that is being walked, in which checks look up
        # constants.
        self.traced: _trace.Traced
        self.program: Scope
        self.known: Scope
        self.equations = 0
        self.has_backward = False
        # Matmuls of the backward pass that read float16, and the numbers of the scalar arguments
        # that their cotangents are proportional to.
        self.float16_backward: list[tuple[_checks.OpOccurrence, set[int]]] = []
        # (scopes, pass, dtype, dtype) -> [FLOPs, count].
        self.matmuls: dict[tuple[_programs.Path, str, str, str], list[int]] = {}
        # (scopes, pass, line) of a matmul -> the FP8 dtype that an operand has or had.
        self.fp8: dict[tuple[_programs.Path, str, tuple[str, int]], str] = {}
        # Parts of the program that are not counted, and why.
        self.notes: dict[str, None] = {}
        # Values that checks collect during the walk, by their type or check.
        self.collected: defaultdict[type | _checks.Check, list[Any]] = defaultdict(list)
        # (scopes, line) of a matmul -> the fix of the promotion that makes it wide.
        self.promotion_fixes: dict[tuple[_programs.Path, tuple[str, int]], str] = {}
        # The ids of equations that a compiler removes, such as those of a forward pass in the
        # `init` of a model.
        self._unused: set[int] = set()
        # Bytes that the matmuls read and write, apart from those without floats.
        self.matmul_bytes = 0
        # Calls of the matmuls before a backward pass -> True if some are outer products.
        self.matmul_calls: dict[tuple[CodeType, int] | None, bool] = {}
        # The ids of matmuls that sum over examples, outside of what a loss reads.
        self.statistics: set[int] = set()
        # (results, FLOPs) of matmuls that may be a part of an update, by line.
        self.of_updates: defaultdict[str, list[tuple[list[Any], int]]] = defaultdict(list)

    @functools.cached_property
    def root(self) -> _programs.Path:
        """The scope of the root module, after the walk."""
        return _programs.root_of(self.locations.names)

    def module_of(self, names: _programs.Path) -> str:
        """Returns the module path of scopes, after the walk."""
        return _programs.module_of(names, self.root)

    # -- for checks -------------------------------------------------------------------------

    @property
    def results(self) -> list[_programs.Atom]:
        """The results of the program."""
        return self.program.jaxpr.outvars

    @property
    def float16_scales(self) -> list[tuple[_checks.OpOccurrence, set[int]]]:
        """`float16_backward` without integers, such as a step, and the scalars that gradients
        update, such as a temperature.

        A loss scale, which may also change with the gradients, divides them.
        """
        updates = self.flow.labels(_dataflow.Update, *self.results)
        others = {update.number for update in updates if update.has_gradient}
        dtypes = map(_checks.dtype_of, self.traced.variables)
        others.update(n for n, dtype in enumerate(dtypes) if dtype not in _checks.FLOATS)
        others.difference_update(self.collected[_dataflow.Power])
        return [(op, scales - others) for op, scales in self.float16_backward]

    def maker_of(self, result: _programs.Atom) -> _checks.OpOccurrence | None:
        """Returns the operation that computes a result, inside of the calls that return it."""
        scope, var, op = self.program, result, None
        while var is not None and (maker := scope.body.maker(var)) is not None:
            location = self.locations.of(maker, _programs.Location() if op is None else op.location)
            op = _checks.OpOccurrence(maker, location, 1, scope.body, self.findings, op)
            below, var = var, None
            for inner in _programs.inners(maker)[-1:]:
                pairs = zip(inner.results, inner.jaxpr.outvars, strict=True)
                var = next((v for result, v in pairs if result is below), None)
                scope = scope.inside(maker)[-1]
        return op

    def use_of(self, var: _programs.Atom) -> _programs.Use:
        """Returns what a value is used for in the whole program."""
        return self._uses.get(var, _programs.Use.NONE)

    def report(self, cls: type[ConditionalFinding], variables: Iterable[Any], harm: str) -> None:
        """Reports conditional findings about values that have a harmful consequence.

        Args:
          cls: their type.
          variables: the values.
          harm: the consequence, as a part of a sentence.
        """
        for label in self.flow.labels(cls, *variables):
            label.report(harm)

    def updates_by(self, op: _checks.OpOccurrence) -> list[tuple[_programs.Atom, bool]]:
        """Returns the results of an operation if they may be a part of an update.

        Returns:
          (result, True) outside of modules and derivatives for values computed from gradients, and
          (result, False) for statistics of examples that no loss reads.
        """
        is_after = op.location.is_outside and _dataflow.GRADIENT in self.flow.of_all(op.operands)
        is_unread = op.location.differentiated and _programs.Use.LOSS not in op.use
        is_apart = op.is_forward and (op.location.is_outside or is_unread)
        if is_apart and _dataflow.sums_examples(op):
            self.statistics.add(id(op.equation))
        elif not is_after:
            return []
        return [(var, is_after) for var in op.equation.outvars]

    # -- the walk ---------------------------------------------------------------------------

    def run(self, scope: Scope, times: int = 1, outer: _checks.OpOccurrence | None = None) -> None:
        """Visits the equations of a jaxpr and of its sub-jaxprs.

        Args:
          scope: the jaxpr.
          times: number of its executions; 0 for a branch that is not counted.
          outer: the operation that contains it.
        """
        if outer is None:
            self.program, self._uses = scope, _programs.uses(scope.jaxpr)
        for var in scope.jaxpr.constvars:
            if _checks.dtype_of(var) in _checks.FLOATS and var.aval.size == 1:
                value = scope.value(var)
                number = None if value is None else float(value.reshape(()))
                self.flow.mark(var, _dataflow.Scalar(number, value is None))
        self.known, body = scope, scope.body
        above = _programs.Location() if outer is None else outer.location
        used = _programs.without_unused(scope.jaxpr)
        self._unused |= {*map(id, _programs.equations(scope.jaxpr, inside=False))}
        self._unused -= {*map(id, _programs.equations(used, inside=False))}
        for equation in _programs.equations(scope.jaxpr, inside=False):
            location = self.locations.of(equation, above)
            self._visit(_checks.OpOccurrence(equation, location, times, body, self.findings, outer))

    def _visit(self, op: _checks.OpOccurrence) -> None:
        self.equations += 1
        self.has_backward |= not op.is_forward
        name, result = op.name, next(iter(op.equation.outvars), None)
        if name in _programs.MATMULS:
            self._visit_matmul(op)
        if name in _ENTERED:
            self._enter(op)
        else:
            if name in _KERNELS or name.startswith(_FUSED_ATTENTION):
                self._count_kernel(op)
            elif _programs.is_unknown(op.equation):
                self.notes[f"the operations inside of {name} at {op.where} {NOT_INSPECTED}"] = None
            self.flow.step(op)
        if name == "dot_general" and op.is_forward:
            self.flow.mark(result, Logits(op))
        for label in self._labels_of_checks(op):
            if label is not None:
                self.flow.mark(result, label)

    def _labels_of_checks(self, op: _checks.OpOccurrence) -> Iterator[Any]:
        """Runs the checks of an operation, and yields the labels that they return."""
        for function in _checks.ON.get((op.name, op.location.phase), ()):
            yield function(op)
        # The operations that the op table requires in FP32.
        is_sensitive = self.context.ops.category(op.name) == "fp32"
        dtype = _checks.half_of(op.operands) if is_sensitive else None
        # Derivatives leave equations whose results nothing reads. Compilers remove them.
        if dtype is not None and any(var in op.body.consumers for var in op.equation.outvars):
            for function in _checks.ON[_checks.HALF]:
                yield function(op, dtype)

    def _enter(self, op: _checks.OpOccurrence) -> None:
        equation, form = op.equation, _programs.form_of(op.equation)
        self.flow.step(op, is_call=True)
        inside = _programs.inners(equation)
        rows, largest = zip(inside, self.known.inside(equation), strict=True), None
        if form is _programs.Form.BRANCH:
            taken = _programs.cond_of(equation).taken_on(self.context.target)
            rows = itertools.compress(rows, taken)
            largest = self._largest([*itertools.compress(inside, taken)])
        if form is _programs.Form.WHILE:
            loop = f"the while loop at {op.where} has an unknown number of iterations"
            self.notes[f"{loop}; one is counted"] = None
        scope = self.known
        for inner, inner_scope in rows:
            times = op.times * inner.times * (largest is None or inner is largest)
            self.flow.enter(inner)
            self.run(inner_scope, times, op)
            self.flow.copy(inner.jaxpr.outvars, inner.results)
        self.known = scope

    @staticmethod
    def _largest(branches: list[_programs.Inner]) -> _programs.Inner:
        """Returns the branch with the most FLOPs, or without any, the longest."""
        flops = lambda branch: _programs.count_flops(branch.jaxpr).total()
        length = lambda branch: sum(1 for _ in _programs.equations(branch.jaxpr))
        return max(branches, key=lambda branch: (flops(branch), length(branch)))

    # -- matmuls ----------------------------------------------------------------------------

    def _visit_matmul(self, op: _checks.OpOccurrence) -> None:
        """Counts and checks a matmul or convolution."""
        matmul = _programs.matmul_of(op.equation)
        if op.outer is not None and op.caller == _core.WIDENED_MATMUL:
            lhs, rhs = (_checks.dtype_of(var) for var in op.outer.equation.invars[:2])
            matmul = matmul._replace(lhs=lhs, rhs=rhs)
        elif op.name == "conv_general_dilated" and op.is_backward:
            lhs, rhs = (_checks.dtype_of(_before_cast(var, op)) for var in op.operands)
            matmul = matmul._replace(lhs=lhs, rhs=rhs)
        dtypes = matmul.lhs, matmul.rhs
        if matmul.is_integer:
            self._count(op, matmul._replace(flops=0))
            text = f"the {matmul.lhs.name} x {matmul.rhs.name} matmul at {op.where}"
            self.notes[f"{text} has no floating-point operations"] = None
            return
        flops = self._count(op, matmul)
        if results := self.updates_by(op):
            self.of_updates[op.where].append((results, flops))
        self._record_fp8(op, matmul)
        is_float = matmul.lhs in _checks.FLOATS | {matmul.rhs}
        call = _programs.call_site(op.equation)
        # The gradients of an outer product multiply matrices by vectors, which have no widths.
        is_gradient = op.is_backward and not matmul.widths and self.matmul_calls.get(call, False)
        contracts = matmul.contracts and not is_gradient
        # A gradient alone does not need all matmuls of its forward pass, which show their fix.
        is_run = op.location.differentiated or id(op.equation) not in self._unused
        is_checked = is_run and contracts and is_float
        if is_checked and not _programs.is_inner_product(op.equation):
            self.matmul_bytes += _checks.bytes_of_matmul(op)
            for function in _checks.ON[_checks.MATMUL]:
                function(op, matmul, flops)
        if op.is_forward and _core.FLOAT16 in dtypes:
            self.flow.has_float16 = True
        if not op.is_backward:
            self.matmul_calls[call] = not matmul.contracts or self.matmul_calls.get(call, False)
        elif op.is_differentiated_again and call in self.matmul_calls:
            self.matmul_calls[call] |= not matmul.contracts
        is_outer = op.is_backward and not op.is_differentiated_again
        if is_outer and _core.FLOAT16 in dtypes:
            rows = [_dataflow.powers_of(self.flow.of(var)).items() for var in op.operands[:2]]
            scales = {number for row in rows for number, power in row if power and power > 0}
            self.float16_backward.append((op, scales))

    def _record_fp8(self, op: _checks.OpOccurrence, matmul: _programs.Matmul) -> None:
        names = [dtype.name for dtype in (matmul.lhs, matmul.rhs) if _core.is_fp8(dtype)]
        labels = self.flow.labels(WasFp8, *op.operands[:2])
        names += sorted(label.name for label in labels)
        if names:
            self.fp8[op.location.names, op.location.phase, op.line] = names[0]

    def _count(self, op: _checks.OpOccurrence, matmul: _programs.Matmul) -> int:
        """Counts a matmul, and returns the FLOPs of all its executions."""
        flops = matmul.flops * op.times
        key = (op.location.names, op.location.phase, matmul.lhs.name, matmul.rhs.name)
        row = self.matmuls.setdefault(key, [0, 0])
        row[0] += flops
        row[1] += 1
        return flops

    def _count_kernel(self, op: _checks.OpOccurrence) -> None:
        """Counts the matmuls of a kernel if they are known; checks do not apply to them."""
        matmuls = _programs.kernel_matmuls(op.equation)
        for matmul in matmuls or ():
            self._count(op, matmul)
        if matmuls is None:
            inside = " and the operations inside of it" if _programs.sub_jaxprs(op.equation) else ""
            self.notes[f"the FLOPs of {op.name} at {op.where}{inside} {NOT_COUNTED}"] = None
