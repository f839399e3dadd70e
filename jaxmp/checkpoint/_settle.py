"""Decides which leaves are the parameters of an optimizer where averages of them fit as well."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from jaxmp.checkpoint import _description
from jaxmp.checkpoint._description import Description, Masters
from jaxmp.errors import CheckpointError
from jaxmp.optim._roles import FP8, OPTIMIZER_FIELDS

# Path of the parameters; or path of each optimizer -> path of its parameters; None: not declared.
Declared = str | Mapping[str, str] | None


def declare(description: Description, params: Declared) -> Description:
    """Returns a description with declared parameters.

    Raises:
      CheckpointError: if the leaves at a declared path do not fit the optimizer, or if there is no
        such optimizer.
    """
    by_optimizer = {"": params} if isinstance(params, str) else dict(params or {})
    unused = set(by_optimizer)
    rows = []
    for row in description.masters:
        key = next((path for path in by_optimizer if _description.is_below(row.path, path)), None)
        if key is not None:
            unused.discard(key)
            root = by_optimizer[key]
            if root not in row.candidates:
                raise CheckpointError(
                    f"params={params!r}: the leaves at {root!r} are not the parameters of the "
                    f"optimizer at {row.path!r}, by their paths, dtypes or values. Those at "
                    f"{_listed(row.candidates)} are."
                )
            row = _description.choose_parameters(row, root)
        rows.append(row)
    if unused:
        raise CheckpointError(
            f"params={params!r}: there is no optimizer of jaxmp at {unused.pop()!r}. There are "
            f"optimizers at {_listed([row.path for row in description.masters])}."
        )
    return dataclasses.replace(description, masters=tuple(rows))


def settle(source: Description, target: Description) -> tuple[Description, Description]:
    """Decides ties on one side by the other side, where the same optimizer has the same path.

    Raises:
      CheckpointError: naming the candidates of an optimizer with masters, if several fit both.
    """
    sides = list(source.masters), list(target.masters)
    partners = [_partner(row, sides[0], len(sides[1])) for row in sides[1]]
    # The sides and indices of the masters of each optimizer, which may be on one side alone.
    groups = [
        [(1, n), *([] if other is None else [(0, other)])] for n, other in enumerate(partners)
    ]
    groups += [[(0, n)] for n in range(len(sides[0])) if n not in partners]
    for group in groups:
        rows = [sides[side][n] for side, n in group]
        ties = [row for row in rows if len(row.candidates) > 1]
        common = set.intersection(*(set(row.candidates) for row in rows))
        if ties and len(common) == 1:
            for side, n in group:
                sides[side][n] = _description.choose_parameters(sides[side][n], *common)
        elif ties and any(row.layout != "no" for row in rows):
            path, candidates = ties[0].path, ties[0].candidates
            raise CheckpointError(
                "The checkpoint cannot be migrated: it is not known which of the leaves at "
                f"{_listed(candidates)} are the parameters of the optimizer at {path!r}, because "
                "their paths and dtypes are the same. The others are averages or copies of them. "
                f"Declare the parameters, such as params={candidates[0]!r}, or if there are "
                f"several optimizers params={{{path!r}: {candidates[0]!r}}}, as an argument of "
                "restore or, for the next checkpoints, of save."
            )
    before, after = map(tuple, sides)
    return dataclasses.replace(source, masters=before), dataclasses.replace(target, masters=after)


def place_parameters(
    source: Description, target: Description, params: Declared
) -> tuple[str, Description]:
    """Returns the path of parameters in a checkpoint, and their description with their full paths.

    Raises:
      CheckpointError: if several leaves have the names of the parameters and an optimizer trains
        none or several of them.
    """
    names = [leaf.path for leaf in target.leaves if leaf.role != FP8]
    if target.optimizers or not names:
        raise CheckpointError(
            "only='params' takes the parameters alone, as arrays or shapes. Pass them, such as "
            "state.params, or the NNX model without its optimizer."
        )
    stored = set(_description.outside_of(source.optimizers, source.by_path))
    trained = {root for row in source.masters for root in row.candidates}
    first = f"/{names[0]}"
    paths = [f"/{path}" for path in stored if f"/{path}".endswith(first)]
    roots = {path.removesuffix(first).lstrip("/") for path in paths}
    # Moments of an optimizer that is not of jaxmp have the names of the parameters, too.
    roots = {root for root in roots if OPTIMIZER_FIELDS.isdisjoint(root.split("/"))} or roots
    fits = {root for root in roots if all(_below(root, name) in stored for name in names)}
    best = fits & trained or fits or trained or roots or {""}
    chosen = sorted({params} if isinstance(params, str) else best)
    if len(chosen) != 1:
        raise CheckpointError(
            f"The leaves at {_listed(chosen)} of the checkpoint have names such as {names[0]!r}. "
            "Declare those to read: restore(params, only='params', params='PATH')."
        )
    leaves = [dataclasses.replace(x, path=_below(chosen[0], x.path)) for x in target.leaves]
    return chosen[0], dataclasses.replace(target, leaves=tuple(leaves))


def _below(root: str, name: str) -> str:
    return f"{root}/{name}".lstrip("/")


def _partner(row: Masters, others: list[Masters], count: int) -> int | None:
    """Returns the index of the masters of the same optimizer in the other description."""
    same = [i for i, other in enumerate(others) if _location(other) == _location(row)]
    if not same and count == len(others) == 1:
        return 0
    return same[0] if len(same) == 1 else None


def _location(row: Masters) -> tuple[str, ...]:
    """Returns the path of an optimizer without the wrappers of jaxmp."""
    return tuple(name for name in row.path.split("/") if name != "inner_state")


def _listed(paths: list[str] | tuple[str, ...]) -> str:
    return " and ".join(repr(path) for path in paths) or "no path"
