"""Plans how the leaves of a checkpoint become the leaves of another state."""

from __future__ import annotations

import collections
import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any, TypeAlias

import jax.numpy as jnp
import numpy as np

from jaxmp import _core
from jaxmp.checkpoint._description import (
    FOREIGN,
    PYTHON_NUMBERS,
    Description,
    Leaf,
    Masters,
    Parameter,
    choose_parameters,
    is_below,
)
from jaxmp.checkpoint._settle import Declared, declare, place_parameters, settle
from jaxmp.errors import CheckpointError
from jaxmp.optim._roles import COUNTER, FP8, LOSS_SCALE, MASTER, PARAMETER, REMAINDER

# First values of new counters; all others start at 0.
_FIRST_VALUES = {"last_finite": True, "fits": True}
_NEW_COUNTER = "stats/zero_gradients"
_INDICES = ("overflow", "overflow_leaf", "nonfinite_leaf")


@dataclasses.dataclass(frozen=True)
class Action:
    """Origin of one leaf of the new state.

    Attributes:
      operation: "copy"; "cast"; "parameter", "master" and "remainder", from the FP32 value;
        "create".
      sources: paths in the checkpoint: the leaf; or the parameter and, if it has one, its master
        or remainder.
      value: fill value of a created leaf; None: its value in the given state.
      packed: two flags: the FP32 value is read from a packed master; it is written to one.
    """

    operation: str
    sources: tuple[str, ...] = ()
    value: Any = None
    packed: tuple[bool, bool] = (False, False)


@dataclasses.dataclass(frozen=True)
class Plan:
    """Actions for all leaves of a state, in order.

    Attributes:
      actions: an action for each leaf.
      lines: the plan as it is printed, without the leaves that are copied.
      losses: the lines about changes that lose information.
      drops_masters: masters are dropped with which nothing in the state is made.
    """

    actions: tuple[Action, ...]
    lines: tuple[str, ...] = ()
    losses: tuple[str, ...] = ()
    drops_masters: bool = False

    def __str__(self) -> str:
        copied = sum(action.operation == "copy" for action in self.actions)
        lines = [
            f"{line}  [loses information]" if line in self.losses else line for line in self.lines
        ]
        return "\n".join(f"  {line}" for line in [*lines, f"{copied} leaves: copied bit for bit"])


def plan_copy(source: Description, target: Description) -> Plan:
    """Returns the plan for a checkpoint of the same state."""
    stored = source.by_path
    return Plan(
        tuple(
            Action("copy", (leaf.path,)) if leaf.path in stored else Action("create", value=0)
            for leaf in target.leaves
        )
    )


def differences(source: Description, target: Description) -> list[str]:
    """Lists the leaves that differ: path, and dtype and shape on both sides.

    Counters that a former version of jaxmp did not have do not count as differences.
    """
    stored, wanted = source.by_path, target.by_path
    rows = []
    for path in dict.fromkeys([*wanted, *stored]):
        before, after = stored.get(path), wanted.get(path)
        if before is None and after and path.endswith(_NEW_COUNTER) and after.role == COUNTER:
            continue
        if (
            before is None
            or after is None
            or (before.dtype, before.shape) != (after.dtype, after.shape)
        ):
            rows.append(
                f"{path}: {before or 'absent'} in the checkpoint, {after or 'absent'} in the state"
            )
    return rows


def plan_migration(
    source: Description,
    target: Description,
    first_scale: Mapping[str, Any],
    params: Declared = None,
) -> Plan:
    """Plans a migration.

    Args:
      source: description of the checkpoint.
      target: description of the state to make.
      first_scale: initial values of the loss scale of the new recipe, by their names; for others,
        those of the given state are taken.
      params: declared paths of parameters, as in `declare`.

    Raises:
      CheckpointError: if a leaf of the new state cannot be made from the checkpoint.
    """
    if params is not None:
        source = declare(source, params) if source.masters else source
        target = declare(target, params) if target.masters else target
    return _Migration(*settle(source, target), first_scale).plan()


def plan_parameters(source: Description, target: Description, params: Declared = None) -> Plan:
    """Plans how parameters alone are read: from FP32 masters where their dtype is FP32.

    Args:
      source: description of the checkpoint.
      target: description of the parameters, without the path at which the checkpoint has them.
      params: that path; None: that of the parameters of the optimizer.

    Raises:
      CheckpointError: if a parameter is missing, or it is not known which leaves they are.
    """
    root, target = place_parameters(source, target, params)
    rows = [
        choose_parameters(row, root, source) if root in row.candidates else row
        for row in source.masters
    ]
    return _Migration(dataclasses.replace(source, masters=tuple(rows)), target, {}).plan()


# Master layout and parameter of a checkpoint.
_Entry: TypeAlias = tuple[str, Parameter]


class _Migration:
    """Builds the plan of one migration."""

    def __init__(
        self, source: Description, target: Description, first_scale: Mapping[str, Any]
    ) -> None:
        self._source, self._target, self._first_scale = source, target, first_scale
        self._stored = source.by_path
        self._index: dict[tuple[str, ...], list[str]] = collections.defaultdict(list)
        for leaf in source.leaves:
            self._index[self._canonical(leaf.path, source)].append(leaf.path)
        rows = [(row.layout, p) for row in source.masters for p in row.parameters if p.leaf]
        self._parameters: dict[str, _Entry] = {entry[1].leaf: entry for entry in rows}
        self._by_name: dict[str, list[_Entry]] = collections.defaultdict(list)
        for entry in rows:
            self._by_name[entry[1].path].append(entry)
        self._used: set[str | None] = set()
        self._lines: collections.Counter[str] = collections.Counter()
        self._losses: set[str] = set()
        self._scales = self._pair_scales()
        self._fp8 = self._has_all_fp8()

    def plan(self) -> Plan:
        """Returns the plan."""
        owners = {
            path: (masters, parameter)
            for masters in self._target.masters
            for parameter in masters.parameters
            for path in (parameter.leaf, parameter.master)
            if path
        }
        actions = [
            self._from_fp32(leaf, *owners[leaf.path]) if leaf.path in owners else self._action(leaf)
            for leaf in self._target.leaves
        ]
        self._note_dropped()
        texts = {line: f"{n} x {line}" if n > 1 else line for line, n in self._lines.items()}
        losses = tuple(text for line, text in texts.items() if line in self._losses)
        drops = any(
            leaf.role in (MASTER, REMAINDER) and leaf.path not in self._used
            for leaf in self._source.leaves
        )
        return Plan(tuple(actions), tuple(texts.values()), losses, drops)

    def _note(self, line: str, *, loses: bool = False) -> None:
        self._lines[line] += 1
        if loses:
            self._losses.add(line)

    # ---------------------------------------------------------------- Parameters and masters

    def _from_fp32(
        self, leaf: Leaf, masters: Masters, parameter: Parameter, entry: _Entry | None = None
    ) -> Action:
        """Makes a parameter or its master from the FP32 value in the checkpoint."""
        layout, stored = entry or self._parameter_entry(leaf, parameter)
        before = self._stored[stored.leaf]
        if before.shape != leaf.shape:
            raise self._refusal(leaf, f"the checkpoint has {before} at {stored.leaf!r}")
        sources = tuple(path for path in (stored.leaf, stored.master) if path)
        self._used.update(sources)
        packed = (layout == "packed" and bool(stored.master), masters.layout == "packed")
        operation = {MASTER: "master", REMAINDER: "remainder"}.get(leaf.role, "parameter")
        if operation == "parameter":
            same_rounding = bool(stored.master) == bool(parameter.master) and packed[0] == packed[1]
            if before.dtype == leaf.dtype and same_rounding:
                return Action("copy", (stored.leaf,))
            self._note_parameter(before, stored, leaf, parameter, packed)
        is_same_form = packed[0] if operation == "remainder" else not packed[0]
        if operation != "parameter" and stored.master and is_same_form:
            return Action("copy", (stored.master,))
        return Action(operation, sources, packed=packed)

    def _note_parameter(
        self,
        before: Leaf,
        stored: Parameter,
        leaf: Leaf,
        parameter: Parameter,
        packed: tuple[bool, bool],
    ) -> None:
        name = lambda leaf, master, is_packed: (
            f"{leaf.dtype} + {'packed' if is_packed else 'FP32'} master" if master else leaf.dtype
        )
        change = (
            f"parameter: {name(before, stored.master, packed[0])} -> "
            f"{name(leaf, parameter.master, packed[1])}"
        )
        was_16bit = _core.is_16bit(_numpy_dtype(before.dtype))
        if _core.is_16bit(_numpy_dtype(leaf.dtype)) and not parameter.master:
            if stored.master:
                self._note(f"{change}: rounded, and the master is dropped", loses=True)
            elif before.dtype != leaf.dtype:
                self._note(f"{change}: rounded", loses=True)
        elif was_16bit and not stored.master:
            self._note(f"{change}: from the 16-bit parameter, the only value there is")
        else:
            self._note(f"{change}: FP32 value preserved bit for bit")

    def _parameter_entry(self, leaf: Leaf, parameter: Parameter) -> _Entry:
        """Finds a parameter in the checkpoint by its path; by its name if the path is another."""
        path = self._find(parameter.leaf) if parameter.leaf else None
        if path in self._parameters:
            return self._parameters[path]
        if path is None:
            if len(self._by_name[parameter.path]) == 1:
                return self._by_name[parameter.path][0]
            raise self._refusal(leaf, f"the checkpoint has no parameter {parameter.path!r}")
        return "no", dataclasses.replace(parameter, leaf=path, master="")

    # ---------------------------------------------------------------- Other leaves

    def _action(self, leaf: Leaf) -> Action:
        if leaf.role == LOSS_SCALE:
            return self._loss_scale(leaf)
        if leaf.role == FP8 and not self._fp8:
            self._note("leaf of FP8 scaling: created, calibrated in the first step")
            return Action("create", value=int(leaf.path.endswith("_scale")))
        name = leaf.path.rpartition("/")[2]
        if leaf.role == COUNTER and name in _INDICES:
            self._used.add(self._find(leaf.path))
            return Action("create", value=-1)
        path = self._find(leaf.path)
        if path is None and leaf.role == COUNTER:
            self._note("counter of steps: created")
            return Action("create", value=_FIRST_VALUES.get(name, 0))
        if path is None:
            raise self._refusal(leaf, "the checkpoint has no such leaf")
        before = self._stored[path]
        if before.shape != leaf.shape:
            raise self._refusal(leaf, f"the checkpoint has {before} at {path!r}")
        self._used.add(path)
        if before.dtype == leaf.dtype:
            return Action("copy", (path,))
        entry = self._parameters.get(path)
        if entry and entry[1].master and _kind(_numpy_dtype(leaf.dtype)) == "float":
            # The new state lacks an optimizer, but its parameters are still read from the masters.
            parameter = Parameter(leaf.path, leaf.path, leaf.dtype, leaf.path)
            return self._from_fp32(leaf, Masters("", "no", ()), parameter, entry)
        exact = _is_exact_cast(before.dtype, leaf.dtype)
        if exact is None:
            raise self._refusal(leaf, f"the checkpoint has {before} at {path!r}")
        self._note(f"leaf: {before.dtype} -> {leaf.dtype}", loses=not exact)
        return Action("cast", (path,))

    def _loss_scale(self, leaf: Leaf) -> Action:
        source = self._scales.get(leaf.path)
        if source is not None:
            self._used.add(source)
            is_same = self._stored[source].dtype == leaf.dtype
            return Action("copy" if is_same else "cast", (source,))
        name = leaf.path.rpartition("/")[2]
        value = self._first_scale.get(name)
        if name == "scale_value":
            at = "" if value is None else f" at {float(value):g}"
            self._note(f"loss scale: created{at}")
        return Action("create", value=value)

    def _pair_scales(self) -> dict[str, str]:
        """Pairs the leaves of loss scales that have the same leaves on both sides."""
        before, after = _scales(self._source), _scales(self._target)
        foreign = {scale.path for scale in self._source.scales if scale.kind == FOREIGN}
        others = {path: path for path in after}
        if len(before) == len(after) == 1:
            others = dict(zip(after, before, strict=True))
        return {
            f"{path}/{name}": f"{others[path]}/{name}"
            for path, names in after.items()
            for name in before.get(others[path], ())
            if before[others[path]] == names
            or (others[path] in foreign and name in names and "good_steps" in names)
        }

    def _has_all_fp8(self) -> bool:
        leaves = [leaf for leaf in self._target.leaves if leaf.role == FP8]
        paths = [(leaf, self._find(leaf.path)) for leaf in leaves]
        return all(
            path is not None and self._stored[path].shape == leaf.shape for leaf, path in paths
        )

    def _note_dropped(self) -> None:
        for leaf in self._source.leaves:
            if leaf.path in self._used:
                continue
            if leaf.role == LOSS_SCALE:
                if leaf.path.endswith("scale_value"):
                    self._note("loss scale: dropped; the new recipe creates its own or has none")
            elif leaf.role == FP8:
                self._note("leaf of FP8 scaling: dropped")
            elif leaf.role != COUNTER:
                self._note(f"{leaf.path} ({leaf}): dropped", loses=True)

    # ---------------------------------------------------------------- Paths

    def _find(self, path: str) -> str | None:
        """Finds the leaf of the checkpoint that has the role of a leaf of the new state."""
        if path in self._stored:
            return path
        matches = self._index.get(self._canonical(path, self._target), [])
        return matches[0] if len(matches) == 1 else None

    def _canonical(self, path: str, side: Description) -> tuple[str, ...]:
        """Returns a path without the collection "params" and without the wrappers of jaxmp.

        The optimizer state of an optax transformation is at `opt_state` in a plain run, and at
        `opt_state/inner_state/inner_state` under `recipe.optimizer`.
        """
        roots = [f"{masters.path}/inner_state".lstrip("/") for masters in side.masters]
        others = self._source if side is self._target else self._target
        if len(roots) == 1 and is_below(path, roots[0]):
            path = f"<optimizer>/{path[len(roots[0]) :].lstrip('/')}"
        elif not roots and len(others.optimizers) == 1 and is_below(path, others.optimizers[0]):
            path = f"<optimizer>/{path[len(others.optimizers[0]) :].lstrip('/')}"
        return tuple(name for name in path.split("/") if name != "params")

    def _refusal(self, leaf: Leaf, reason: str) -> CheckpointError:
        return CheckpointError(
            f"The checkpoint cannot be migrated: the state requires {leaf.path!r} ({leaf}), and "
            f"{reason}. A migration converts between precisions; build the state with the model "
            f"and the optimizer of the run that wrote the checkpoint{self._other_fix(leaf)}."
        )

    def _other_fix(self, leaf: Leaf) -> str:
        """Returns how to read a parameter by its name in the checkpoint; "" for foreign ones."""
        names = [x.path for x in self._source.leaves if x.role == PARAMETER]
        similar = difflib.get_close_matches(leaf.path, names, n=1, cutoff=0)
        if not similar:
            return ""
        parameter = self._parameters[similar[0]][1]
        tree: Any = f"jnp.zeros({self._stored[similar[0]].shape})"
        for name in reversed(parameter.path.replace(":", "/").lstrip("/").split("/")):
            tree = f"{{{name!r}: {tree}}}"
        return (
            ", or read parameters by their names in the checkpoint, such as "
            f"restore({tree}, only='params')"
        )


def _scales(side: Description) -> dict[str, tuple[str, ...]]:
    """Returns path -> names of the leaves of each loss scale that has leaves."""
    rows = {
        scale.path: tuple(
            leaf.path[len(scale.path) :].lstrip("/")
            for leaf in side.leaves
            if leaf.role == LOSS_SCALE and is_below(leaf.path, scale.path)
        )
        for scale in side.scales
    }
    return {path: names for path, names in rows.items() if names}


def _is_exact_cast(before: str, after: str) -> bool | None:
    """Returns whether a cast is exact; None if the dtypes are unrelated."""
    if "key<" in before + after:
        return None
    first, second = _numpy_dtype(before), _numpy_dtype(after)
    kinds = {_kind(first), _kind(second)}
    if len(kinds) > 1:
        return None
    if kinds == {"float"}:
        return _core.bits(first) <= _core.bits(second) and {first.name, second.name} != {
            "bfloat16",
            "float16",
        }
    # Counts: the values are checked when they are cast.
    return True


def _numpy_dtype(name: str) -> np.dtype:
    return np.dtype(PYTHON_NUMBERS[name]) if name in PYTHON_NUMBERS else jnp.dtype(name)


def _kind(dtype: np.dtype) -> str:
    return {"i": "integer", "u": "integer", "b": "bool", "c": "complex"}.get(dtype.kind, "float")
