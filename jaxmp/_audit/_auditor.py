"""One walk over a program: each equation is placed, counted and judged."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp

from jaxmp._attention import MARK, choice_of, implementation_of
from jaxmp._audit._check_masks import Masks
from jaxmp._audit._check_ops import (
    check_carry,
    check_half,
    check_promotion,
    check_root,
    check_terms,
)
from jaxmp._audit._checks import ERROR, WARNING
from jaxmp._audit._context import (
    Body,
    OpOccurrence,
    PendingFindings,
    PolicyContext,
    dtype_of,
    half_of,
    named,
)
from jaxmp._audit._dataflow import GRADIENT
from jaxmp._audit._labels import (
    REDUCES,
    WAS_HALF,
    ConditionalFinding,
    Flow,
    ForwardUse,
    HalfReduce,
    Logits,
    Promotion,
    RoundedInput,
    WasFp8,
    attention_logits,
    attention_words,
    logits_bytes,
    why_unfused,
)
from jaxmp._audit._sections import bytes_words
from jaxmp._core._compat import scan_counts
from jaxmp._core._dtypes import CASTABLE, FLOAT16, FLOAT32, FLOAT64, is_16bit, is_fp8
from jaxmp._core._jaxprs import (
    BACKWARD,
    FORWARD,
    Path,
    inners,
    is_literal,
    module_paths_of,
    sub_jaxprs,
)
from jaxmp._core._locations import FULL_PRECISION, Location, Locations, call_site
from jaxmp._core._matmuls import (
    MATMULS,
    MULTIPLES,
    Matmul,
    is_inner_product,
    kernel_matmuls,
    matmul_of,
    multiple_of,
    padded,
)
from jaxmp.fp8._eligible import explain_exclusion

# Equations whose jaxprs are part of the program, and no kernel or element-wise combiner.
_ENTERED = named(
    "jit pjit call closed_call core_call scan while cond remat2 checkpoint shard_map"
    " custom_jvp_call custom_vjp_call custom_vjp_call_jaxpr custom_vmap_call linear_call"
    " custom_lin run_state xla_metadata_call compute_on composite eval_jaxpr"
)
_KERNELS = named(
    "pallas_call mpmd_map tpu_custom_call mosaic_gpu_p ffi_call pure_callback cudnn_fusion"
    " scaled_dot scaled_matmul"
)
_FLOATS = CASTABLE | {FLOAT64}
_PERIODIC = named("sin cos tan")
_MOVED = named("reshape broadcast_in_dim squeeze expand_dims transpose mul div")
_FUSED = "dot_product_attention_"
_REDUCES_OVER_DEVICES = named("psum psum_invariant psum2 reduce_scatter")


class Auditor:
    """Findings and counts of one program."""

    def __init__(self, context: PolicyContext) -> None:
        self.context, self.findings, self.locations = context, PendingFindings(), Locations()
        self.flow = Flow(context.ops)
        self.equations = 0
        self.has_backward = False
        # A matmul of a backward pass that reads float16.
        self.float16_backward: OpOccurrence | None = None
        self._reduces: list[HalfReduce] = []
        # (names, line) of a matmul -> the fix of the promotion that makes it wide.
        self._causes: dict[tuple[Path, tuple[str, int]], str] = {}
        # (names, phase, lhs, rhs) -> [FLOPs, count].
        self.matmuls: dict[tuple[Path, str, str, str], list[int]] = {}
        # (names, phase, source, target) -> [bytes, count].
        self.casts: dict[tuple[Path, str, str, str], list[int]] = {}
        # (names, phase, line) -> the FP8 dtype that an operand has, or had before a cast.
        self.fp8: dict[tuple[Path, str, tuple[str, int]], str] = {}
        self.aligned: Counter[int] = Counter()
        self.notes: dict[str, None] = {}
        self._flops: dict[int, tuple[Any, int]] = {}
        self.masks = Masks()

    def run(self, jaxpr: Any, outer: Location, times: int, enclosing: tuple[Any, ...] = ()) -> None:
        """Walks one jaxpr, and all inside of it.

        Args:
          jaxpr: without constants.
          outer: the place of the equation that holds it.
          times: how often it runs in all; 0 for a branch that is not counted.
          enclosing: the equations that hold it, the innermost first.
        """
        body = Body(jaxpr)
        for equation in jaxpr.eqns:
            self.equations += 1
            location = self.locations.of(equation, outer)
            self.has_backward |= location.phase != "forward"
            op = OpOccurrence(equation, location, times, body, enclosing)
            name = equation.primitive.name
            if name in _ENTERED:
                self.flow.call(op)
                self._enter(op)
                continue
            special = _CHECKS.get(name)
            if special is not None:
                special(self, op)
            elif name in _KERNELS or name.startswith(_FUSED):
                self._kernel(op)
            conditional = None
            if name not in _PERIODIC or not self._check_rounded(op):
                conditional = check_half(op, self.context, self.findings)
            if name in REDUCES and location.phase == FORWARD:
                self._report(ForwardUse, equation.invars, "")
            self.flow.step(op)
            self.masks.known.step(equation)
            if conditional is not None:
                self.flow.mark(equation.outvars[0], conditional)
            if name == "dot_general" and location.phase == "forward":
                self.flow.mark(equation.outvars[0], Logits(op))
            elif name in ("add", "add_any"):
                check_terms(op, self.findings, self.flow)
            elif name in _REDUCES_OVER_DEVICES:
                self._mark_reduces(op)
            elif name == "convert_element_type":
                check_promotion(op, self.context, self.findings, self.flow)

    def finish(self, jaxpr: Any) -> None:
        """Judges the results of the program, after the walk.

        Args:
          jaxpr: the whole program.
        """
        self._report(Promotion, jaxpr.outvars, ", and the program returns the wider value")
        self._report(ForwardUse, jaxpr.outvars, "")
        self._name_remedies()
        for reduce in self._reduces:
            reduce.report(self.findings, is_asked=self.context.wants_wide_reduces)

    def _report(self, cls: type[ConditionalFinding], variables: Iterable[Any], harm: str) -> None:
        for label in {label for var in variables for label in self.flow.of(var)}:
            if isinstance(label, cls):
                label.report(harm, self.findings)

    def _name_remedies(self) -> None:
        """Suggests autocast where a model is wrapped, and wrapping does not reach a matmul."""
        rows = self.matmuls
        if any(names and is_16bit(jnp.dtype(lhs)) for names, _, lhs, _ in rows):
            for finding in self.findings:
                if finding.check not in ("fp32_matmul", "off_policy_matmul"):
                    continue
                finding.fix = finding.fix.replace(
                    self.context.wrap_code, self.context.autocast_code
                )

    def _mark_reduces(self, op: OpOccurrence) -> None:
        """Remembers a sum over devices in 16 bits."""
        for operand, result in zip(op.equation.invars, op.equation.outvars, strict=True):
            if is_16bit(dtype_of(operand)) and operand.aval.size > 1:
                label = HalfReduce(op, GRADIENT in self.flow.of(operand))
                self._reduces.append(label)
                self.flow.mark(result, label)

    # -- jaxprs inside ----------------------------------------------------------------------

    def _enter(self, op: OpOccurrence) -> None:
        equation, name = op.equation, op.name
        inside = inners(equation)
        if op.location.phase == FORWARD:
            self.masks.take(op, _is_attention(equation))
        if _is_attention(equation) and op.location.phase == FORWARD:
            self._note_attention(op, sum(self._flops_of(inner.jaxpr) for inner in inside))
        largest = self._largest(inside) if name == "cond" else None
        if name == "while":
            self.notes[f"the loop at {self._where(op)} ends by a test: it is counted once"] = None
        for inner in inside:
            times = op.times * inner.times * (largest is None or inner is largest)
            self.flow.enter(inner)
            self.masks.known.enter(equation, inner)
            self.run(inner.jaxpr, op.location, times, (equation, *op.enclosing))
            self.flow.leave(inner)
            self.masks.known.leave(equation, inner)
        if _is_attention(equation):
            # Masks that attention makes for its own derivative are not the model's.
            self.masks.known.forget(equation.outvars)
        if name == "scan":
            consts, carried = scan_counts(equation.params)
            self._check_loop(op, inside[0].jaxpr, consts, carried)
        elif name == "while":
            consts = equation.params["body_nconsts"]
            self._check_loop(op, inside[1].jaxpr, consts, len(equation.outvars))

    def _largest(self, branches: list[Any]) -> Any:
        """The branch of the most FLOPs; of those that have none, the longest."""
        return max(branches, key=lambda b: (self._flops_of(b.jaxpr), len(b.jaxpr.eqns)))

    def _flops_of(self, jaxpr: Any) -> int:
        found = self._flops.get(id(jaxpr))
        if found is None:
            # The jaxpr is kept beside its FLOPs, so that its id stays its own.
            found = self._flops[id(jaxpr)] = jaxpr, sum(map(self._flops_in, jaxpr.eqns))
        return found[1]

    def _flops_in(self, equation: Any) -> int:
        name = equation.primitive.name
        if name in MATMULS:
            return matmul_of(equation).flops
        if name not in _ENTERED:
            return sum(one.flops for one in kernel_matmuls(equation) or ())
        counts = [inner.times * self._flops_of(inner.jaxpr) for inner in inners(equation)]
        return max(counts, default=0) if name == "cond" else sum(counts)

    def _check_loop(self, op: OpOccurrence, loop: Any, consts: int, carried: int) -> None:
        incoming = loop.invars[consts : consts + carried]
        pairs = list(zip(incoming, loop.outvars[:carried], strict=True))
        if any(is_16bit(dtype_of(var)) for var in incoming if dtype_of(var) in _FLOATS):
            check_carry(op, Body(loop), pairs, self.findings, self.flow)

    # -- products ---------------------------------------------------------------------------

    def product(self, op: OpOccurrence) -> None:
        """A matmul or convolution."""
        found = matmul_of(op.equation)
        if found.is_integer:
            self._note_integers(op, found)
            return
        flops = self._count(op, found)
        self._note_fp8(op, found)
        if (
            found.contracts
            and found.lhs in _FLOATS | {found.rhs}
            and not is_inner_product(op.equation)
        ):
            if not self._is_attentions_own(op, found):
                self._check_dtypes(op, found, flops)
            self._check_sizes(op, found, flops)
            self._check_fp8(op, flops)
        if op.location.phase == FORWARD and FLOAT16 in (found.lhs, found.rhs):
            self.flow.has_float16 = True
        if op.location.phase == BACKWARD:
            if FLOAT16 in (found.lhs, found.rhs) and self.float16_backward is None:
                self.float16_backward = op
            for label in {x for var in op.equation.invars[:2] for x in self.flow.of(var)}:
                if isinstance(label, HalfReduce):
                    label.is_activation = True
        logits = attention_logits(op, self.flow)
        if logits is not None and not any(map(_is_attention, op.enclosing)):
            self._check_attention(logits, flops)

    def _note_integers(self, op: OpOccurrence, found: Matmul) -> None:
        """Counts a matmul of integers or bools, which takes no floating-point operations."""
        key = (op.location.names, op.location.phase, found.lhs.name, found.rhs.name)
        self.matmuls.setdefault(key, [0, 0])[1] += 1
        pair = f"{found.lhs.name} x {found.rhs.name}"
        text = f"the {pair} matmul at {self._where(op)} takes no floating-point operations"
        self.notes[text] = None

    def _note_fp8(self, op: OpOccurrence, found: Matmul) -> None:
        names = [dtype.name for dtype in (found.lhs, found.rhs) if is_fp8(dtype)]
        labels = (label for var in op.equation.invars[:2] for label in self.flow.of(var))
        names += [label.name for label in labels if isinstance(label, WasFp8)]
        if names:
            key = op.location.names, op.location.phase, self.findings.line_of(op)
            self.fp8[key] = names[0]

    def _is_attentions_own(self, op: OpOccurrence, found: Matmul) -> bool:
        """Returns True for products that jaxmp's attention takes in FP32 from 16-bit operands.

        On devices without Tensor Cores it multiplies the gradient of the logits in FP32.
        """
        calls = [equation for equation in op.enclosing if _is_attention(equation)]
        return FLOAT32 in (found.lhs, found.rhs) and any(
            half_of(equation.invars) is not None for equation in calls
        )

    def _check_dtypes(self, op: OpOccurrence, found: Matmul, flops: int) -> None:
        lhs, rhs = found.lhs, found.rhs
        if {FLOAT32, FLOAT64} & {lhs, rhs} and op.location.phase == FORWARD:
            self._report_cause(op, flops)
        if lhs != rhs:
            if lhs in _FLOATS or rhs in _FLOATS:
                message = f"{op.name} of {lhs.name} and {rhs.name} runs in {_wider(lhs, rhs)}."
                narrow = min((lhs, rhs), key=lambda dtype: dtype.itemsize).name
                fix = f"Cast the wider operand:\n    y = y.astype(jnp.{narrow})"
                if op.location.phase != FORWARD:
                    # The cotangent of a product with a wider preferred_element_type is wide.
                    fix = "In place of preferred_element_type:\n    (x @ w).astype(jnp.float32)"
                fix = self._cause(op) or fix
                self.findings.add("mixed_operands", op, message, fix, flops=flops)
            return
        wanted = self.context.wanted(op.location)
        if lhs in wanted or lhs not in CASTABLE:
            return
        if not wanted:
            self._check_unasked(op, flops)
        elif lhs == FLOAT32:
            self._check_fp32(op, min(dtype.name for dtype in wanted), flops)
        else:
            names = " or ".join(sorted(dtype.name for dtype in wanted))
            message = f"{op.name} of {lhs.name} where the policies say {names}."
            fix = f"Remove casts by hand, and apply the policies:\n    {self._policy_code(op)}"
            self.findings.add("off_policy_matmul", op, message, fix, flops=flops)

    def _report_cause(self, op: OpOccurrence, flops: int) -> None:
        """Reports the promotions that make a matmul wide; their fix is the matmul's, too."""
        harm = f", and {op.name} at {self._where(op)} reads it"
        labels = {x for var in op.equation.invars[:2] for x in self.flow.of(var)}
        for label in labels:
            if isinstance(label, Promotion):
                label.report(harm, self.findings, flops)
                key = op.location.names, self.findings.line_of(op)
                self._causes.setdefault(key, f"{label.fix}\nat {self._where(label.op)}.")

    def _cause(self, op: OpOccurrence) -> str:
        """The fix of the promotion that makes a matmul wide, or its gradient; "" if none."""
        return self._causes.get((op.location.names, self.findings.line_of(op)), "")

    def _check_fp8(self, op: OpOccurrence, flops: int) -> None:
        """A linear layer that the policies want in FP8 and that is not."""
        operands = op.equation.invars[:2]
        if op.name != "dot_general" or op.location.phase != FORWARD:
            return
        (_, contracted), (_, batch) = op.equation.params["dimension_numbers"]
        # Batched products are attention's own, or of many kernels at once: no linear layer's.
        if batch or not all(is_16bit(dtype_of(operand)) for operand in operands):
            return
        if not self.context.wants_fp8(op.location):
            return
        assert self.context.policies is not None
        shape = operands[1].aval.shape
        inputs = math.prod(shape[axis] for axis in contracted)
        sizes = inputs, math.prod(shape) // max(inputs, 1)
        why = (
            explain_exclusion(*sizes, self.context.policies.fp8, self.context.target)
            if all(sizes)
            else ""
        )
        dtype = dtype_of(operands[0]).name
        message = f"{op.name} of {dtype} where the policies say FP8: "
        message += why or "no layer of Flax makes it, or its author chose its product"
        narrow = "narrow" in why or "min_width" in why
        module = "/".join(op.location.names[-1:]) or "module"
        fix = f"say so: Rule('**/{module}', 'matmul=default')"
        fix = f"min_width = 0 under [fp8], or {fix}" if narrow else fix
        self.findings.add("not_fp8", op, f"{message}.", fix, severity=WARNING, flops=flops)

    def _check_fp32(self, op: OpOccurrence, wanted: str, flops: int) -> None:
        highest = "HIGHEST" in str(op.equation.params.get("precision"))
        asked = "; its author asks for precision=HIGHEST" if highest else ""
        message = f"{op.name} of float32 where the policies say {wanted}{asked}."
        fix = self._cause(op) or self._remove_cast(op)
        if op.location.names and not self._cause(op):
            module = op.location.names[-1].partition(".")[0]
            fix = fix or f"Apply the policies:\n    {self._policy_code(op)}"
            fix += f"\nor keep it in FP32 by a rule:\n    jaxmp.Rule('**/{module}', 'c=f32')"
        fix = fix or self._policy_code(op)
        self.findings.add(
            "fp32_matmul", op, message, fix, severity=WARNING if highest else ERROR, flops=flops
        )

    def _policy_code(self, op: OpOccurrence) -> str:
        """Code that makes a matmul follow the policies.

        If no matmul of a module is in low precision, the model is not wrapped. Otherwise this layer
        casts its operands itself, or its matmul is no layer's, and only autocast reaches it.
        """
        return self.context.wrap_code if op.location.names else self.context.autocast_code

    def _remove_cast(self, op: OpOccurrence) -> str:
        """The user's own cast to FP32 that an operand of a matmul comes from; "" if none."""
        for var in op.equation.invars[:2]:
            maker = op.body.maker(var)
            while maker is not None and maker.primitive.name in _MOVED:
                maker = op.body.maker(maker.invars[0])
            if maker is None or maker.primitive.name != "convert_element_type":
                continue
            source = dtype_of(maker.invars[0])
            if not is_16bit(source) or not self.findings.is_own_call(maker):
                continue
            if call_site(maker) == call_site(op.equation):
                return f"Cast the other operand:\n    w = w.astype(jnp.{source.name})"
            return f"Remove .astype(jnp.float32) at {self._where(op._replace(equation=maker))}"
        return ""

    def _check_unasked(self, op: OpOccurrence, flops: int) -> None:
        operands = op.equation.invars[:2]
        if dtype_of(operands[0]) != FLOAT32 or FULL_PRECISION in op.location.names:
            return
        if any(WAS_HALF in self.flow.of(var) for var in operands):
            message = f"{op.name} of float32 whose operand was 16 bits before."
            fix = self._cause(op) or self._remove_cast(op) or self._policy_code(op)
            self.findings.add("fp32_matmul", op, message, fix, flops=flops)

    def _check_sizes(self, op: OpOccurrence, found: Matmul, flops: int) -> None:
        multiple = multiple_of(found.lhs) if found.lhs != FLOAT64 else 1
        odd = {role: size for role, size in found.widths.items() if size % multiple}
        if not odd:
            return
        pads = {role: padded(size, multiple) for role, size in odd.items()}
        words = ", ".join(f"{role} = {size} -> {pads[role]}" for role, size in odd.items())
        cost = max(pads[role] / size for role, size in odd.items()) - 1
        worth = any(pads[role] <= 1.25 * size for role, size in odd.items())
        message = f"no multiple of {multiple}: {words}; padding costs {cost:.1%}."
        fix = f"make the width {', '.join(map(str, sorted(set(pads.values()))))}"
        severity = ERROR if worth else WARNING
        self.findings.add("misaligned_matmul", op, message, fix, severity=severity, flops=flops)

    def _check_attention(self, logits: OpOccurrence, flops: int) -> None:
        shape = logits.equation.outvars[0].aval.shape
        message = (
            f"{why_unfused(logits)}; its logits {list(shape)} are "
            f"{bytes_words(logits_bytes(logits))} in memory."
        )
        fix = "jax.nn.dot_product_attention(query, key, value, implementation='cudnn')"
        self.findings.add(
            "unfused_attention", logits, message, fix, severity=WARNING, flops=2 * flops
        )

    def _note_attention(self, op: OpOccurrence, flops: int) -> None:
        """jaxmp's own attention, where it is not cuDNN's kernel."""
        name = op.equation.params["name"]
        implementation, argument = implementation_of(name)
        if implementation == "cudnn":
            return
        choice = choice_of(name, [var.aval for var in op.equation.invars])
        message, fix = attention_words(implementation, argument, choice)
        flops *= op.times
        self.findings.add("unfused_attention", op, message, fix, severity=WARNING, flops=flops)

    # -- inputs ------------------------------------------------------------------------------

    def _check_rounded(self, op: OpOccurrence) -> bool:
        """Whether a sine or cosine is taken of an argument that was rounded on its way."""
        labels = self.flow.of(op.equation.invars[0])
        rounded = [label for label in labels if isinstance(label, RoundedInput)]
        for source, dtype in rounded if op.location.phase == FORWARD else ():
            step = "257 becomes 256" if dtype == "bfloat16" else "2049 becomes 2048"
            way = f"on its way into {op.name}: {step}."
            message = f"argument {source.location} is rounded to {dtype} {way}"
            self.findings.add("rounded_input", op, message, _keeping(source.name, dtype, op))
        return bool(rounded)

    # -- the rest ---------------------------------------------------------------------------

    def cast(self, op: OpOccurrence) -> None:
        """A change of dtype."""
        (operand,), (result,) = op.equation.invars, op.equation.outvars
        source, target = dtype_of(operand), dtype_of(result)
        if source == target or not {source, target} <= _FLOATS or is_literal(operand):
            return
        key = (op.location.names, op.location.phase, source.name, target.name)
        row = self.casts.setdefault(key, [0, 0])
        row[0] += result.aval.size * (source.itemsize + target.itemsize) * op.times
        row[1] += 1

    def root(self, op: OpOccurrence) -> None:
        """A square root."""
        check_root(op, self.context, self.findings)

    def _kernel(self, op: OpOccurrence) -> None:
        """A kernel whose products are counted where they are known; nothing in it is judged."""
        products = kernel_matmuls(op.equation)
        if products is None:
            self._note_kernel(op)
        for product in products or ():
            self._count(op, product)

    def _count(self, op: OpOccurrence, product: Matmul) -> int:
        """Counts a product, and returns the FLOPs of all its runs."""
        flops = product.flops * op.times
        phase = op.location.phase
        row = self.matmuls.setdefault(
            (op.location.names, phase, product.lhs.name, product.rhs.name), [0, 0]
        )
        row[0] += flops
        row[1] += 1
        for multiple in MULTIPLES:
            if all(size % multiple == 0 for size in product.widths.values()):
                self.aligned[multiple] += flops
        return flops

    def _note_kernel(self, op: OpOccurrence) -> None:
        inside = "" if not sub_jaxprs(op.equation) else ", as is all inside of it"
        self.notes[f"FLOPs of {op.name} at {self._where(op)} are not counted{inside}"] = None

    def _where(self, op: OpOccurrence) -> str:
        file, line = self.findings.line_of(op)
        return f"{file.rpartition('/')[2]}:{line}" if file else "an unknown line"


def _is_attention(equation: Any) -> bool:
    """Whether an equation is jaxmp's own attention, whichever its implementation."""
    return str(equation.params.get("name", "")).startswith(f"{MARK}_")


def _keeping(name: str, dtype: str, op: OpOccurrence) -> str:
    """The rules that leave an argument in FP32 where a module takes the sine of it."""
    kept = f"Rule('', keep_inputs=[{name!r}]), with the name of the model's own argument"
    path = module_paths_of(op.location.names)[0]
    return f"{kept}; or Rule({path!r}, 'c=f32,o={dtype}') for this module" if path else kept


def _wider(lhs: Any, rhs: Any) -> str:
    return max((lhs, rhs), key=lambda dtype: dtype.itemsize).name


_CHECKS: dict[str, Any] = {
    **dict.fromkeys(MATMULS, Auditor.product),
    "convert_element_type": Auditor.cast,
    "sqrt": Auditor.root,
}
