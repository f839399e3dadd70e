"""Recipe: policies, loss scale and masters of a training run, and the methods that apply them."""

from __future__ import annotations

import bisect
import dataclasses
import importlib
import operator
import re
from collections.abc import Iterable
from types import ModuleType
from typing import Self, TypeVar, Unpack, cast, final

import jax
import optax

from jaxmp import _core
from jaxmp._core import AxisNames, PyTree
from jaxmp._gradients._loss_scale import LossScale
from jaxmp._policies import _load
from jaxmp._policies._load import PolicyMap, RecipeData, RecipeLike
from jaxmp._policies._patterns import compile_pattern
from jaxmp._policies._replace import RecipeChanges, recipe_text, replace_settings
from jaxmp._policies._rules import Rule
from jaxmp._policies._toml import recipe_names
from jaxmp.errors import JaxmpError, RecipeError
from jaxmp.fp8._scaling import Scaling
from jaxmp.optim._master import cast_params, master_params
from jaxmp.optim._moments import moment_dtype
from jaxmp.optim._skip import GradientSettings, skip_nonfinite

M = TypeVar("M")

# Module that defines a framework's base class -> the adapter for its modules.
ADAPTERS = {
    "flax.linen.module": "jaxmp._flax._linen_model",
    "flax.nnx.module": "jaxmp._flax._nnx_model",
}


@final
@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, repr=False, init=False)
class Recipe(RecipeData):
    """Precision settings of a training run, and the functions that apply them.

    `load_recipe` makes recipes, and `replace` changes them. A recipe is frozen, hashable, equal by
    content and static under `jax.jit`: it contains strings, plain numbers and a `PolicyMap`, but no
    arrays.

    Attributes:
      name: that of the file or its `name` key, or the policy string.
      summary: description in one line.
      policies: the default policy and the rules.
      loss_scale_data: the loss scale, as strings and numbers.
      master: form of the FP32 masters of 16-bit parameters: see `jaxmp.optim.master_params`.
      skip: form in which non-finite steps are skipped: "auto", "select", "cond" or "none".
      moment_dtype: name of the dtype of the optimizer's moments: see `jaxmp.optim.moment_dtype`.
      accumulate_dtype: name of the dtype in which gradients are summed over microbatches.
      reduce_dtype: name of the dtype in which gradients are summed over devices.
      regather: True if split weights are gathered again in the backward pass, instead of kept.
      widen_params: True if matmuls compute the gradients of 16-bit parameters in FP32.
      ops: categories of operations in `autocast`: the default table with this recipe's edits.
      phases: keys that change at later steps; see `phase`.
      whole: for a phase, the recipe that it belongs to; otherwise None.

    Example:
      >>> recipe = load_recipe("bf16").replace(master="none")
      >>> recipe, recipe.policies.resolve("dense").compute_dtype, recipe.master
      (Recipe('bf16'), dtype(bfloat16), 'none')
    """

    def __new__(cls, *args: object, **settings: object) -> Self:
        """Refuses what is not how recipes are made, such as `Recipe("bf16")`."""
        if args:
            raise RecipeError(
                f"Recipe({args[0]!r}) is not how recipes are made. Load it, then change it:\n"
                f"    load_recipe({args[0]!r}).replace(master='fp32')"
            )
        return super().__new__(cls)

    @property
    def loss_scale(self) -> LossScale:
        """Initial loss scale, with new arrays at each access."""
        return self.loss_scale_data.build()

    @property
    def fp8(self) -> Scaling | None:
        """Scaling of modules with `matmul = "fp8"`; None: `jaxmp.fp8.CurrentScaling()`."""
        return self.policies.fp8

    # ------------------------------------------------------------------ Methods

    def wrap(self, model: M, *, shardings: PyTree = None) -> M:
        """Returns a model that computes under this recipe's policies; `model` is not modified.

        Elements of its batch statistics that are not finite keep their old values, because a loop
        may store them where a skipped step cannot restore them.

        Args:
          model: an instance of a Flax Linen or NNX module.
          shardings: a `NamedSharding` for each parameter, in a tree like the parameters. Weights
            that are split over the axes of the batch are then gathered in the compute dtype. None:
            the metadata of Flax, if the model has any.

        Returns:
          A model of the same class with the same parameter tree. If `model` was wrapped already,
          this recipe replaces the other one. A statement that drops the result causes a warning.

        Raises:
          JaxmpError: if `model` is not such an instance, or if `shardings` has another structure
            than its parameters (in Linen, from `apply`).
          RuleError: if a required rule matches nothing in an NNX model. In Linen, `init` of the
            returned model raises it, and the first `apply` warns.
          RecipeError: if this recipe has phases: `recipe.phase(step).wrap(model)`.

        Example:
          >>> model = load_recipe("bf16").wrap(nn.Dense(2))
          >>> model.apply(model.init(jax.random.key(0), x), x).dtype
          dtype('float32')
        """
        policies = _load.as_policy_map(self)
        wrapped = _load_adapter(model).apply_policy(model, policies, shardings=shardings)
        return _core.warn_if_dropped(wrapped, "model = recipe.wrap(model)")

    def optimizer(
        self, inner: optax.GradientTransformation, axis_name: AxisNames = None
    ) -> optax.GradientTransformationExtraArgs:
        """Adds this recipe's masters, loss scale and skipped steps to an optimizer.

        Args:
          inner: any optax transformation, with clipping and schedules.
          axis_name: mapped axis of `pmap`, `vmap` or `shard_map`. The `value_and_grad` of a train
            state averages loss and gradients over it, and all devices along it skip the same steps.
            None if `jax.jit` shards the batch.

        Returns:
          An optax transformation. Everything that depends on the raw gradient belongs inside:
          clipping, weight decay, schedules, `optax.MultiSteps`. `update` receives unscaled
          gradients, as `jaxmp.value_and_grad` returns them.

        Raises:
          CompositionError: if `inner` does not work with masters or skipped steps.

        Example:
          >>> tx = load_recipe("bf16").optimizer(optax.adamw(3e-4))
        """
        dtype = self.policies.default.compute_dtype
        moments = moment_dtype(inner, self.moment_dtype)
        return skip_nonfinite(
            master_params(moments, recipe=self.policies, master=self.master),
            loss_scale=self.loss_scale,
            skip=self.skip,
            axis_name=axis_name,
            gradients=GradientSettings(
                self.accumulate_dtype, self.reduce_dtype, self.regather, self.widen_params
            ),
            dtype=dtype if _core.is_16bit(dtype) else None,
        )

    def cast_params(self, params: PyTree) -> PyTree:
        """Casts each floating-point parameter to the dtype in which it is stored, by its path.

        In a plain optax loop, call it after `tx.init(params)`, which makes the masters from the
        uncast values.

        Args:
          params: a tree of parameters, or a dict of Flax collections, of which only `params` is
            cast.

        Returns:
          A tree of the same structure.

        Example:
          >>> load_recipe("bf16_params").cast_params({"kernel": jnp.ones(2)})["kernel"].dtype
          dtype(bfloat16)
        """
        master = "packed" if self.master == "packed" else "fp32"
        stored = cast_params(params, self.policies, master)
        return _core.warn_if_dropped(stored, "params = recipe.cast_params(params)")

    def phase(self, step: int) -> Recipe:
        """Returns the recipe of a step; this recipe itself if it has no phases.

        All phases have the same train state, which the whole recipe makes. Call this method on the
        host, and pass the result to the compiled step: it is static, so that a step is compiled
        once for each phase, and no program contains a branch. After steps in which a layer does
        not run in FP8, delayed scaling takes its first scale from the tensor itself.

        Args:
          step: number of the step, counted from 0, such as `int(state.step)`.

        Returns:
          A recipe without phases; its name ends in the first step of the phase, such as "mine@900".

        Raises:
          RecipeError: if `step` is not an integer, such as inside of `jax.jit`, or is negative.

        Example:
          >>> phases = [{"from_step": 900, "matmul": "default"}]
          >>> recipe = load_recipe("fp8").replace(phases=phases)
          >>> recipe.phase(899), recipe.phase(900)
          (Recipe('fp8@0'), Recipe('fp8@900'))
        """
        whole = self if self.whole is None else cast(Recipe, self.whole)
        try:
            number = operator.index(step)
        except TypeError:
            number = -1
        if number < 0:
            raise RecipeError(
                f"phase({step!r}): the step must be a nonnegative integer on the host. Choose the "
                "phase in front of the compiled step:\n"
                "    state, loss = train_step(recipe.phase(int(state.step)), state, batch)"
            )
        if not whole.phases:
            return whole
        return _load.phase_data(whole, bisect.bisect_right(_load.first_steps(whole), number) - 1)

    def split_phases(self) -> list[Recipe]:
        """Returns the recipe of each phase; `[self]` for a recipe without phases.

        Example:
          >>> phases = [{"from_step": 900, "matmul": "default"}]
          >>> load_recipe("fp8").replace(phases=phases).split_phases()
          [Recipe('fp8@0'), Recipe('fp8@900')]
        """
        return [self.phase(step) for step in _load.first_steps(self)] if self.phases else [self]

    def replace(self, **changes: Unpack[RecipeChanges]) -> Recipe:
        """Returns this recipe with some settings replaced.

        Args:
          **changes: `policies` (anything that `load_recipe` accepts), `loss_scale` (a loss scale, a
            number, a dict with the keys of the [loss_scale] table, "auto" or "none"), `ops` (a
            dict, merged into the recipe's table, or an `OpTable` that replaces it), `fp8` (a
            scaling of `jaxmp.fp8`, or its name), `implementation`, `mask` and `window` (the keys of
            [attention]), `master`, `skip`, `moment_dtype`, `accumulate_dtype`, `reduce_dtype`,
            `regather`, `widen_params`, `phases` (a list of dicts with the keys of [[phases]]),
            `name`, `summary`.

        Returns:
          A new recipe. A loss scale that "auto" has chosen is chosen again for new policies.

        Raises:
          RecipeError: if a value is not allowed, or contradicts another.

        Example:
          >>> load_recipe("fp16").replace(loss_scale=128.0).loss_scale
          StaticLossScale(loss_scale=128.0)
        """
        return _core.warn_if_dropped(
            replace_settings(self, **changes), "recipe = recipe.replace(...)"
        )

    def to_toml(self) -> str:
        """Returns the text of a TOML file that loads as an equal recipe.

        The text of a phase is that of the whole recipe.

        Raises:
          RecipeError: if a string in the recipe cannot be written as UTF-8.

        Example:
          >>> recipe = load_recipe("bf16").replace(loss_scale=1024.0)
          >>> _ = Path("mine.toml").write_text(recipe.to_toml(), encoding="utf-8")
          >>> load_recipe("mine.toml") == recipe
          True
        """
        return recipe_text(self)

    def __repr__(self) -> str:
        return f"Recipe({self.name!r})"


def load_recipe(recipe: RecipeLike) -> Recipe:
    """Loads a recipe.

    Args:
      recipe: the name of an installed recipe (see `list_recipes`); a path that ends in `.toml`; a
        policy string such as `"p=f32,c=bf16,o=f32"`; a `Recipe`, `PolicyMap`, `Policy`,
        `jmp.Policy`, dtype or dict. Policies that are not a recipe get FP32 masters for all
        parameters stored in 16 bits, and a dynamic loss scale if any of their dtypes is float16.

    Returns:
      The recipe; `recipe` itself if it is a `Recipe`.

    Raises:
      RecipeError: with file, line, column, key, the allowed values and the fix as code.
      PolicyError: if a policy or dtype is invalid.

    Example:
      >>> load_recipe("fp16").policies.resolve("dense").compute_dtype
      dtype('float16')
    """
    data = _load.as_recipe_data(recipe)
    return data if isinstance(data, Recipe) else Recipe(**vars(data))


def have_same_settings(first: Recipe, second: Recipe, leaves: Iterable[str]) -> bool:
    """Returns True if two recipes specify the same settings for a state.

    Rules that match nothing in the state are ignored: a later version of a recipe may add some.

    Args:
      first, second: the recipes; of a phase, the whole recipe is compared.
      leaves: paths of the leaves of the state.
    """
    # The paths of modules and parameters do not contain where the state stores the parameters.
    tails = {
        tuple(each[n:])
        for each in (re.split("[/:]", leaf) for leaf in leaves)
        for n in range(len(each))
    }
    parameters = {f"{'/'.join(tail[:-1])}:{tail[-1]}" for tail in tails}
    modules = {"/".join(tail[:n]) for tail in tails for n in range(len(tail))}

    def applies(rule: Rule) -> bool:
        paths = parameters if rule.addresses_parameter else modules
        return rule.path is None or any(map(compile_pattern(rule.path).fullmatch, paths))

    def applied(recipe: Recipe) -> Recipe:
        whole = load_recipe(recipe.whole or recipe)
        rules = filter(applies, whole.policies.rules)
        policies = PolicyMap(whole.policies.default, rules, whole.policies.fp8)
        return dataclasses.replace(whole, name="recipe", summary="", policies=policies)

    return applied(first) == applied(second)


def list_recipes() -> list[str]:
    """Returns the sorted names of the installed recipes.

    Example:
      >>> "bf16" in list_recipes()
      True
    """
    return recipe_names()


def _load_adapter(model: object) -> ModuleType:
    """Imports the adapter module for a Flax module.

    Raises:
      JaxmpError: if `model` is not an instance of a Flax module.
    """
    if (name := adapter_name(model)) is not None:
        return importlib.import_module(name)
    if isinstance(model, type):
        hint = f" Make an instance: {model.__name__}(...)."
    else:
        attributes = getattr(model, "__dict__", {})
        inner = next((key for key in attributes if adapter_name(attributes[key])), None)
        if inner is not None:
            kind = type(model)
            raise JaxmpError(
                f"wrap() received a {kind.__module__}.{kind.__qualname__}, which is not a Flax "
                f"module but contains one in {inner!r}. Wrap that module: "
                f"model.{inner} = recipe.wrap(model.{inner})."
            )
        hint = ""
    raise JaxmpError(
        f"wrap({model!r}): {type(model).__name__} is not a Flax module.{hint} Pass an instance of "
        "flax.linen.Module or flax.nnx.Module; for example recipe.wrap(nn.Dense(8)). For models of "
        "other packages, such as Equinox, cast operations: loss_fn = jaxmp.autocast(loss_fn, "
        "recipe)."
    )


def adapter_name(model: object) -> str | None:
    """Returns the name of the adapter for a Flax module; None for any other object."""
    bases = {cls.__module__ for cls in type(model).__mro__ if cls.__name__ == "Module"}
    return next((adapter for base, adapter in ADAPTERS.items() if base in bases), None)
