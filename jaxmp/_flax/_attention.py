"""The attention function of Flax's layers under a policy."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from jaxmp._attention._declared import Declaration
from jaxmp._attention._layer import Stated
from jaxmp._core._dtypes import is_16bit
from jaxmp._policies._policy import Policy


def policied_function(
    own: Any, flax: Any, make: Callable[[Stated], Any], policy: Policy, path: tuple[str, ...]
) -> Any:
    """What stands for a layer's attention function under a policy; an author's own stays.

    Args:
      own: the layer's.
      flax: the default one of the framework.
      make: makes one of jaxmp's.
      policy: the layer's.
      path: the layer's.
    """
    stated = getattr(own, "jaxmp_stated", None)
    is_asked = policy.implementation != "auto" or policy.mask != "array"
    if own is flax and (is_asked or is_16bit(policy.compute_dtype)):
        stated = Stated()
    if stated is None:
        return own
    if stated.implementation == "auto":
        stated = dataclasses.replace(stated, implementation=policy.implementation)
    if policy.mask != "array":
        declared = Declaration(policy.mask, policy.window, "/".join(path))
        stated = dataclasses.replace(stated, declared=declared)
    return make(stated)
