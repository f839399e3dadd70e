"""References to arrays, `jax.new_ref`, in traced programs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from jaxmp._core._compat import load_private

if TYPE_CHECKING:
    from jaxmp._core._compat import ClosedJaxpr


def are_made(effects: Iterable[object]) -> bool:
    """Returns True for the effects of a program or an equation that makes references."""
    return any(type(effect).__name__ == "InternalMutableArrayEffect" for effect in effects)


def are_received(effects: Iterable[object]) -> bool:
    """Returns True for the effects of a program that reads or writes references of its caller."""
    names = {type(effect).__name__ for effect in effects}
    return not names.isdisjoint({"ReadEffect", "WriteEffect", "AccumEffect"})


def discharged(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Returns a program of which the references are values that its loops and branches carry."""
    discharge = load_private("jax._src.state.discharge")
    return discharge.discharge_state(closed, should_discharge=False, lower=False)
