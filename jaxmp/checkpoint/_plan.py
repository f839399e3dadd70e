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
      packs: the FP32 value is written to a packed master.
    """

    operation: str
    sources: tuple[str, ...] = ()
    value: Any = None
    packs: bool = False


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
        if str(before) != str(after):  # dtype and shape
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
    source, target = (declare(x, params) if x.masters else x for x in (source, target))
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
        choose_parameters(row, root) if root in row.candidates else row for row in source.masters
    ]
    return _Migration(dataclasses.replace(source, masters=tuple(rows)), target, {}).plan()


# Form of the master, "FP32", "packed" or "" for none, and the parameter.
_Entry: TypeAlias = tuple[str, Parameter]


def _entries(side: Description) -> list[_Entry]:
    forms = {"fp32": "FP32", "packed": "packed"}
    return [
        (forms[row.layout] if parameter.master else "", parameter)
        for row in side.masters
        for parameter in row.parameters
    ]


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
        rows = [entry for entry in _entries(source) if entry[1].leaf]
        self._parameters: dict[str, _Entry] = {entry[1].leaf: entry for entry in rows}
        self._used: set[str | None] = set()
        self._lines: collections.Counter[str] = collections.Counter()
        self._losses: set[str] = set()
        self._scales = self._pair_scales()
        self._fp8 = self._has_all_fp8()

    def plan(self) -> Plan:
        """Returns the plan."""
        owners = {
            path: (form, parameter)
            for form, parameter in _entries(self._target)
            for path in (parameter.leaf, parameter.master)
            if path
        }
        actions = [
            self._from_fp32(leaf, owners[leaf.path]) if leaf.path in owners else self._action(leaf)
            for leaf in self._target.leaves
        ]
        unused = [leaf for leaf in self._source.leaves if leaf.path not in self._used]
        self._note_dropped(unused)
        texts = {line: f"{n} x {line}" if n > 1 else line for line, n in self._lines.items()}
        losses = tuple(text for line, text in texts.items() if line in self._losses)
        drops = any(leaf.role in (MASTER, REMAINDER) for leaf in unused)
        return Plan(tuple(actions), tuple(texts.values()), losses, drops)

    def _note(self, line: str, *, loses: bool = False) -> None:
        self._lines[line] += 1
        if loses:
            self._losses.add(line)

    # ---------------------------------------------------------------- Parameters and masters

    def _from_fp32(self, leaf: Leaf, wanted: _Entry, entry: _Entry | None = None) -> Action:
        """Makes a parameter or its master from the FP32 value in the checkpoint."""
        form, stored = entry or self._parameter_entry(leaf, wanted[1])
        before = self._stored[stored.leaf]
        if before.shape != leaf.shape:
            raise self._refusal(leaf, f"the checkpoint has {before} at {stored.leaf!r}")
        sources = tuple(path for path in (stored.leaf, stored.master) if path)
        self._used.update(sources)
        operation = {MASTER: "master", REMAINDER: "remainder"}.get(leaf.role, "parameter")
        if form == wanted[0] and operation != "parameter":
            return Action("copy", (stored.master,))
        if operation == "parameter":
            if (before.dtype, form) == (leaf.dtype, wanted[0]):
                return Action("copy", (stored.leaf,))
            self._note_parameter(before, form, leaf, wanted[0])
        return Action(operation, sources, packs=wanted[0] == "packed")

    def _note_parameter(self, before: Leaf, form: str, leaf: Leaf, new_form: str) -> None:
        name = lambda leaf, form: f"{leaf.dtype} + {form} master" if form else leaf.dtype
        change = f"parameter: {name(before, form)} -> {name(leaf, new_form)}"
        if _core.is_16bit(_numpy_dtype(leaf.dtype)) and not new_form:
            dropped = ", and the master is dropped" if form else ""
            self._note(f"{change}: rounded{dropped}", loses=True)
        elif _core.is_16bit(_numpy_dtype(before.dtype)) and not form:
            self._note(f"{change}: from the 16-bit parameter, the only value there is")
        else:
            self._note(f"{change}: FP32 value preserved bit for bit")

    def _parameter_entry(self, leaf: Leaf, parameter: Parameter) -> _Entry:
        """Finds a parameter in the checkpoint by its path; by its name if the path is another."""
        path = self._find(parameter.leaf) if parameter.leaf else None
        if path in self._parameters:
            return self._parameters[path]
        if path is None:
            same = [each for each in self._parameters.values() if each[1].path == parameter.path]
            if len(same) == 1:
                return same[0]
            raise self._refusal(leaf, f"the checkpoint has no parameter {parameter.path!r}")
        return "", dataclasses.replace(parameter, leaf=path, master="")

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
        if entry and entry[0] and _kind(_numpy_dtype(leaf.dtype)) == "float":
            # The new state lacks an optimizer, but its parameters are still read from the masters.
            parameter = Parameter(leaf.path, leaf.path, leaf.dtype, leaf.path)
            return self._from_fp32(leaf, ("", parameter), entry)
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

    def _note_dropped(self, leaves: list[Leaf]) -> None:
        for leaf in leaves:
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
        other = self._source if side is self._target else self._target
        roots = roots or other.optimizers
        if len(roots) == 1 and is_below(path, roots[0]):
            path = f"<optimizer>/{path[len(roots[0]) :].lstrip('/')}"
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
        for name in reversed(parameter.name.split("/")):
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
    if _kind(first) != _kind(second):
        return None
    if _kind(first) != "float":
        return True  # Counts: the values are checked when they are cast.
    old, new = jnp.finfo(first), jnp.finfo(second)
    return old.nmant <= new.nmant and old.maxexp <= new.maxexp


def _numpy_dtype(name: str) -> np.dtype:
    return np.dtype(PYTHON_NUMBERS[name]) if name in PYTHON_NUMBERS else jnp.dtype(name)


def _kind(dtype: np.dtype) -> str:
    kinds = {"integer": np.integer, "bool": np.bool_, "complex": np.complexfloating}
    return next((name for name, kind in kinds.items() if jnp.issubdtype(dtype, kind)), "float")
