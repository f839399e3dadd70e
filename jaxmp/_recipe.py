"""Recipe: the facade over policies, loss scale, masters and the framework adapters."""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any, TypeVar, final

import jax
import optax

from jaxmp import optim
from jaxmp._loss_scale import LossScale
from jaxmp._policies._op_table import OpTable
from jaxmp._policies._rules import PolicyMap
from jaxmp._recipe_files._dump import recipe_text
from jaxmp._recipe_files._load import RecipeData, changed, recipe_data, recipe_names
from jaxmp.errors import JaxmpError

M = TypeVar("M")

# Module that defines a framework's base class -> the adapter for its modules.
_ADAPTERS = {"flax.linen.module": "jaxmp.linen", "flax.nnx.module": "jaxmp.nnx"}


@final
@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, init=False, repr=False)
class Recipe:
    """All that a training run needs to know about precision.

    Frozen, hashable, equal by content, static under `jax.jit`: it holds strings, plain numbers and
    a `PolicyMap`, and no array.

    Args:
      recipe: a recipe's name, a path that ends in `.toml`, a policy string such as
        `"p=f32,c=bf16,o=f32"`, another recipe, a `PolicyMap`, or anything that `get_policy` takes.
        What is no recipe gets a dynamic loss scale if any of its dtypes is float16, and masters
        for every parameter that is stored in 16 bits.
      **changes: see `replace`.

    Raises:
      RecipeError: if a file or name cannot be loaded, or settings contradict each other.
      PolicyError: if a policy string or a dtype cannot be understood.

    Example:
      >>> recipe = Recipe("bf16", master="none")
      >>> recipe, recipe.policies.resolve("dense"), recipe.master
      (Recipe('bf16'), Policy('p=f32,c=bf16,o=f32'), 'none')
    """

    data: RecipeData

    def __init__(self, recipe: Any, **changes: Any) -> None:
        data = recipe_data(recipe)
        object.__setattr__(self, "data", changed(data, **changes) if changes else data)

    # ------------------------------------------------------------------ What it says

    @property
    def name(self) -> str:
        """The shipped name, the file's `name` or stem, or the policy string."""
        return self.data.name

    @property
    def summary(self) -> str:
        """One line for a person who chooses among recipes."""
        return self.data.summary

    @property
    def policies(self) -> PolicyMap:
        """The default policy and the rules."""
        return self.data.policies

    @property
    def loss_scale(self) -> LossScale:
        """A loss scale at its start, in fresh arrays at each access."""
        return self.data.loss_scale.build()

    @property
    def master(self) -> str:
        """Where the FP32 truth of 16-bit parameters is kept: see `jaxmp.optim.master_params`."""
        return self.data.master

    @property
    def skip(self) -> str:
        """How a step that is not finite is left out: see `jaxmp.optim.skip_nonfinite`."""
        return self.data.skip

    @property
    def accumulate_dtype(self) -> str:
        """Name of the dtype in which gradients are added up over microbatches."""
        return self.data.accumulate_dtype

    @property
    def reduce_dtype(self) -> str:
        """Name of the dtype in which gradients are added up over the devices of an `axis_name`."""
        return self.data.reduce_dtype

    @property
    def ops(self) -> OpTable:
        """What `autocast` does with each operation: the default table, and this recipe's edits."""
        return self.data.ops

    @property
    def fp8(self) -> Any:
        """How modules with `matmul = "fp8"` are scaled; None: by `jaxmp.fp8.CurrentScaling()`."""
        return self.policies.fp8

    # ------------------------------------------------------------------ What it does

    def wrap(self, model: M) -> M:
        """The model under this recipe's policies; the given one is untouched.

        Args:
          model: an instance of a Flax Linen or NNX module.

        Returns:
          A model of the same class with the same parameter tree.

        Raises:
          JaxmpError: if it is no such model.

        Example:
          >>> model = load_recipe("bf16").wrap(nn.Dense(2))
          >>> model.apply(model.init(jax.random.key(0), x), x).dtype
          dtype('float32')
        """
        return _adapter(model).apply_policy(model, self.policies)

    def optimizer(
        self, inner: optax.GradientTransformation, axis_name: Any = None
    ) -> optax.GradientTransformationExtraArgs:
        """`inner` with this recipe's masters, loss scale and skipped steps.

        Args:
          inner: any optax transformation; clipping and schedules belong inside.
          axis_name: mapped axis of `pmap`, `vmap` or `shard_map`. The `value_and_grad` of a train
            state averages loss and gradients over it, and all devices along it agree to skip. Leave
            it out where `jax.jit` shards the batch.

        Returns:
          The transformation that `jaxmp.optim.mixed_precision` makes.

        Raises:
          CompositionError: if masters or skips cannot work as the recipe asks.

        Example:
          >>> tx = load_recipe("bf16").optimizer(optax.adamw(3e-4))
        """
        return optim.mixed_precision(
            inner,
            policies=self.policies,
            loss_scale=self.loss_scale,
            master=self.master,
            skip=self.skip,
            accumulate_dtype=self.accumulate_dtype,
            reduce_dtype=self.reduce_dtype,
            axis_name=axis_name,
        )

    def cast_params(self, params: Any) -> Any:
        """Casts each floating parameter to the dtype in which it is stored, by its path.

        In a plain optax loop call it after `tx.init(params)`, which takes masters from the values
        before the cast.

        Args:
          params: a tree of parameters, or a dict of Flax collections, of which `params` alone is
            cast.

        Returns:
          A tree of the same structure.

        Example:
          >>> load_recipe("bf16_params").cast_params({"kernel": jnp.ones(2)})["kernel"].dtype
          dtype(bfloat16)
        """
        master = "packed" if self.master == "packed" else "fp32"
        return optim.cast_params(params, self.policies, master)

    def replace(self, **changes: Any) -> Recipe:
        """The same recipe with something changed.

        Args:
          **changes: `policies` (anything that names policies), `loss_scale` (a loss scale, a
            number, a dict with the keys of the [loss_scale] table, "auto" or "none"), `ops` (a
            dict, laid over the recipe's own table, or an `OpTable` in its place), `fp8` (a scaling
            of `jaxmp.fp8`, or its name), `implementation`, `mask` and `window` (the keys of
            [attention]), `master`, `skip`, `accumulate_dtype`, `reduce_dtype`, `name`, `summary`.

        Returns:
          A new recipe. A loss scale that was automatic is decided anew for other policies.

        Raises:
          RecipeError: if a value is not allowed, or contradicts another.

        Example:
          >>> load_recipe("fp16").replace(loss_scale=128.0).loss_scale
          StaticLossScale(loss_scale=128.0)
        """
        return Recipe(self, **changes)

    def to_toml(self) -> str:
        """The recipe as the text of a TOML file that loads as an equal recipe.

        Raises:
          RecipeError: if a text in it cannot be written as UTF-8.

        Example:
          >>> recipe = load_recipe("bf16").replace(loss_scale=1024.0)
          >>> _ = Path("mine.toml").write_text(recipe.to_toml(), encoding="utf-8")
          >>> load_recipe("mine.toml") == recipe
          True
        """
        return recipe_text(self.data)

    def __repr__(self) -> str:
        return f"Recipe({self.name!r})"


def load_recipe(recipe: Any) -> Recipe:
    """Loads a recipe.

    Args:
      recipe: a shipped recipe's name (see `list_recipes`); a path that ends in `.toml`; a policy
        string such as `"p=f32,c=bf16,o=f32"`; a `Recipe`, `PolicyMap`, `Policy`, `jmp.Policy`,
        dtype or dict.

    Returns:
      The recipe.

    Raises:
      RecipeError: with file, line, column and key, what is allowed, and the fix as code.
      PolicyError: if a policy string or a dtype cannot be understood.

    Example:
      >>> load_recipe("fp16").policies.resolve("dense")
      Policy('p=f32,c=f16,o=f32')
    """
    return recipe if isinstance(recipe, Recipe) else Recipe(recipe)


def list_recipes() -> list[str]:
    """The names of the shipped recipes, sorted.

    Example:
      >>> list_recipes()[4:]
      ['fp32', 'fp8', 'fp8_delayed', 'fp8_rowwise', 'tf32']
    """
    return recipe_names()


def _adapter(model: Any) -> Any:
    found = _adapter_name(model)
    attributes = vars(model) if found is None and hasattr(model, "__dict__") else {}
    inner = next((name for name in attributes if _adapter_name(attributes[name])), None)
    if inner is not None and not isinstance(model, type):
        kind = type(model)
        raise JaxmpError(
            f"wrap was given a {kind.__module__}.{kind.__qualname__}, which holds a Flax module in "
            f"{inner!r} and is none itself. Wrap that module in its place: "
            f"model.{inner} = recipe.wrap(model.{inner})."
        )
    if found is None:
        hint = f" Make an instance: {model.__name__}(...)." if isinstance(model, type) else ""
        raise JaxmpError(
            f"wrap({model!r}): {type(model).__name__} is not a Flax module.{hint} Give an instance "
            "of a flax.linen.Module or a flax.nnx.Module; for example recipe.wrap(nn.Dense(8))."
        )
    return importlib.import_module(found)


def _adapter_name(model: Any) -> str | None:
    """The adapter for a Flax module; None for anything else."""
    bases = {cls.__module__ for cls in type(model).__mro__ if cls.__name__ == "Module"}
    return next((found for base, found in _ADAPTERS.items() if base in bases), None)
