"""Checks of the models that the functions of `jaxmp.linen` and `jaxmp.nnx` receive."""

from __future__ import annotations

from jaxmp.errors import CompositionError

# The arguments of each function in both frameworks.
_CALLS = {
    "apply_policy": {"linen": "model, policies", "nnx": "model, policies"},
    "explain": {"linen": "model, policies, *args", "nnx": "model, policies"},
    "module_paths": {"linen": "model, *args", "nnx": "model"},
}
_INSTANCES = {"linen": "{}(...)", "nnx": "{}(..., rngs=nnx.Rngs(0))"}


def check_model(model: object, function: str, framework: str, base: type) -> None:
    """Checks that a model is an instance of a module class.

    Args:
      model: the argument of the user.
      function: name of the public function.
      framework: "linen" or "nnx".
      base: the class of all modules of the framework.

    Raises:
      CompositionError: with the call that is right.
    """
    if isinstance(model, base):
        return
    calls, other = _CALLS[function], "nnx" if framework == "linen" else "linen"
    if isinstance(model, type) and issubclass(model, base):
        instance = _INSTANCES[framework].format(model.__name__)
        raise CompositionError(
            f"{function} received the class {model.__name__} instead of a model. Pass an instance: "
            f"{function}({calls[framework].replace('model', instance)})."
        )
    cls = model if isinstance(model, type) else type(model)
    fix = f"Pass a flax.{framework}.Module"
    if any(each.__module__.startswith(f"flax.{other}") for each in cls.__mro__):
        fix = f"Use jaxmp.{other}.{function}({calls[other]})"
    elif callable(model) and function == "apply_policy":
        fix = "For a plain JAX function use jaxmp.autocast(fn, policies)"
    raise CompositionError(
        f"{function} received a {cls.__module__}.{cls.__qualname__}, which is not a "
        f"flax.{framework}.Module. {fix}."
    )
