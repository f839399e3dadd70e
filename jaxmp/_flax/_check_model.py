"""Check of the models to which policies are applied, common to Linen and NNX."""

from __future__ import annotations

from jaxmp.errors import CompositionError

_ARGUMENTS = {"linen": "...", "nnx": "..., rngs=nnx.Rngs(0)"}


def check_model(model: object, base: type) -> None:
    """Raises a `CompositionError` if an object is not a module.

    Args:
      model: the object.
      base: `flax.linen.Module` or `flax.nnx.Module`.
    """
    if isinstance(model, base):
        return
    framework = base.__module__.split(".")[1]
    if isinstance(model, type) and issubclass(model, base):
        raise CompositionError(
            f"This is the class {model.__name__} instead of a model. Pass an instance: "
            f"recipe.wrap({model.__name__}({_ARGUMENTS[framework]}))."
        )
    cls = model if isinstance(model, type) else type(model)
    fix = f"Pass a flax.{framework}.Module"
    if any(each.__module__.startswith(("flax.linen", "flax.nnx")) for each in cls.__mro__):
        fix = "Use recipe.wrap(model)"
    elif callable(model):
        fix = "For a plain JAX function use jaxmp.autocast(fn, recipe)"
    raise CompositionError(
        f"{cls.__module__}.{cls.__qualname__} is not a flax.{framework}.Module. {fix}."
    )
