"""Runs exported programs so that they return the results of their operations."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax.core import ShapedArray
from jax.interpreters import mlir
from jaxlib.mlir import ir

from jaxmp._core._compat import load_private
from jaxmp._core._typing import Array

_FLOATS = {"f32": "float32", "f64": "float64", "bf16": "bfloat16", "f16": "float16"}

_PREPARING = ("broadcast_in_dim", "constant", "reshape", "transpose")


class ExportedRow(NamedTuple):
    """Floating-point result of an operation of StableHLO.

    Args:
      scopes: its name scopes.
      name: name of the JAX primitive that it implements.
      frames: (file, line) of the source, the innermost first.
      makers: for each operand, the index of the row that made it; -1 if there is none.
      value: the result.
    """

    scopes: tuple[str, ...]
    name: str
    frames: tuple[tuple[str, int], ...]
    makers: tuple[int, ...]
    value: Array


def values_of(
    exported: Any, args: Sequence[Array]
) -> tuple[list[ExportedRow], list[tuple[Array, int]]]:
    """Runs an exported program.

    Loops and branches have one row each. XLA rounds as the program does.

    Args:
      exported: a `jax.export.Exported`.
      args: its flat arguments.

    Returns:
      The rows, of which the first are the arguments that it uses, and (result, index of its row) of
      each result.
    """
    with mlir.make_ir_context():
        module = ir.Module.parse(exported.mlir_module())
        prefixes = _inline(module)
        main = _functions(module)["main"]
        block = main.regions[0].blocks[0]
        operations = [each.operation for each in block.operations]
        made = list(filter(_is_recorded, operations))
        rows = [((), "parameter", ())] * len(block.arguments)
        rows += [_location(op, prefixes) for op in made]
        number = {x: n for n, x in enumerate((*block.arguments, *(op.results[0] for op in made)))}
        makers = [tuple(number.get(x, -1) for x in op.operands) for op in made]
        finish = operations[-1]
        last = [number.get(x, -1) for x in finish.operands]
        values = [*finish.operands, *(op.results[0] for op in made)]
        with ir.InsertionPoint(finish), finish.location:
            ir.Operation.create(finish.name, operands=values)
        finish.erase()
        inputs = ir.FunctionType(ir.TypeAttr(main.attributes["function_type"]).value).inputs
        function = ir.FunctionType.get(inputs, [value.type for value in values])
        main.attributes["function_type"] = ir.TypeAttr.get(function)
        if "res_attrs" in main.attributes:
            del main.attributes["res_attrs"]
        avals = [*exported.out_avals, *(_aval(op.results[0].type) for op in made)]
        changed = _replaced(exported, module, avals)
    lowered = jax.jit(lambda *xs: changed.call(*xs)).lower(*args)
    flat = lowered.compile({"xla_allow_excess_precision": False})(*args)
    used = [args[n] for n in exported.module_kept_var_idx]
    makers = [*[()] * len(used), *makers]
    every = [*used, *flat[len(last) :]]
    records = [ExportedRow(*row, *each) for row, *each in zip(rows, makers, every, strict=True)]
    return records, list(zip(flat[: len(last)], last, strict=True))


def _functions(module: Any) -> dict[str, Any]:
    functions = (op.operation for op in module.body.operations)
    return {ir.StringAttr(op.attributes["sym_name"]).value: op for op in functions}


def _inline(module: Any) -> dict[Any, str]:
    """Replaces the calls of the main function, and returns operation -> scopes of its call."""
    functions, prefixes = _functions(module), {}
    block = functions["main"].regions[0].blocks[0]
    while True:
        call = next(
            (op.operation for op in block.operations if op.operation.name == "func.call"), None
        )
        if call is None:
            return prefixes
        name = ir.FlatSymbolRefAttr(call.attributes["callee"]).value
        prefix = "/".join(filter(None, (prefixes.get(call, ""), _text(call.location))))
        body = functions[name].regions[0].blocks[0]
        known, results = dict(zip(body.arguments, call.operands, strict=True)), []
        with ir.InsertionPoint(call):
            for each in body.operations:
                inner = each.operation
                if inner.name == "func.return":
                    results = [known[value] for value in inner.operands]
                    break
                copy = inner.clone()
                copy = copy.operation
                for n, value in enumerate(inner.operands):
                    copy.operands[n] = known[value]
                known |= zip(inner.results, copy.results, strict=True)
                prefixes[copy] = prefix
        for old, new in zip(call.results, results, strict=True):
            old.replace_all_uses_with(new)
        call.erase()


def _is_recorded(op: Any) -> bool:
    """Returns True for an operation with one result, an array of floats."""
    kind = op.results[0].type if len(op.results) == 1 else None
    return isinstance(kind, ir.RankedTensorType) and isinstance(kind.element_type, ir.FloatType)


def _text(location: Any) -> str:
    match = re.match(r'loc\("([^"]*)"', str(location))
    return match[1] if match else ""


def _location(op: Any, prefixes: dict[Any, str]) -> tuple[Any, ...]:
    """Returns the scopes of an operation, the name of its primitive, and its frames."""
    path = "/".join(filter(None, (prefixes.get(op, ""), _text(op.location))))
    *scopes, name = path.split("/")
    own = tuple(each for each in scopes if "(" not in each)
    frames = re.findall(r'"([^"]+)":(\d+)', str(op.location))
    # Other operations than the last one prepare the operands of a primitive.
    name = op.name.rpartition(".")[2] if op.name.endswith(_PREPARING) else name
    return own, name, tuple((file, int(line)) for file, line in frames)


def _aval(kind: Any) -> Any:
    """Returns the type of an array of floats."""
    tensor = ir.RankedTensorType(kind)
    name = str(tensor.element_type)
    name = _FLOATS.get(name, name.lower().replace("f8", "float8_"))
    return ShapedArray(tuple(tensor.shape), jax.numpy.dtype(name))


def _replaced(exported: Any, module: Any, avals: list[Any]) -> Any:
    """Returns an exported program with another module, whose results are more arrays."""
    flat = jax.tree.structure([0] * len(avals))
    inputs = jax.tree.structure((tuple(exported.in_avals), {}))
    changes: dict[str, Any] = {"in_tree": inputs, "out_tree": flat, "out_avals": tuple(avals)}
    for field in dataclasses.fields(exported):
        if field.name in ("_out_named_shardings", "out_shardings_hlo"):
            changes[field.name] = (None,) * len(avals)
    private = load_private("jax._src.export._export")
    module = private._module_to_bytecode(module)
    return dataclasses.replace(exported, mlir_module_serialized=module, _get_vjp=None, **changes)
