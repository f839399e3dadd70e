"""Checkpointer: saves and restores training states without changing their precision."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, Self

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from jaxmp import _core
from jaxmp._core import PyTree
from jaxmp._policies import _load, _recipe, _resolve
from jaxmp.checkpoint import _foreign, _handler, _manifest, _writer
from jaxmp.checkpoint._description import Description, FlatState, finite_leaves, flatten_state
from jaxmp.checkpoint._manifest import CheckpointInfo, Manifest
from jaxmp.checkpoint._plan import Plan, differences, plan_copy, plan_migration, plan_parameters
from jaxmp.checkpoint._settle import Declared, declare
from jaxmp.errors import CheckpointError
from jaxmp.optim._assign import warn_of_replaced


def check_made_with(description: Description, recipe: _recipe.Recipe, name: str) -> None:
    """Checks that a recipe stores parameters as the state does.

    Raises:
      CheckpointError: with the first parameter that differs.
    """
    for masters in description.masters:
        for parameter in masters.parameters:
            names = tuple(parameter.name.split("/"))
            dtype = _resolve.storage_dtype(recipe.policies, names)
            form = "none"
            if _core.is_16bit(dtype):
                form = {"auto": "fp32"}.get(recipe.master, recipe.master)
            stored = masters.layout if parameter.master else "none"
            if _core.short_name(dtype) != parameter.storage or form != stored:
                raise CheckpointError(
                    f"{name} was not made with the recipe {recipe.name!r}: it stores "
                    f"{parameter.path!r} in {_core.canonical_dtype(parameter.storage).name} "
                    f"(master: {stored}), and the recipe in {np.dtype(dtype).name} (master: "
                    f"{form}). Pass the recipe whose optimizer made the state."
                )


def initial_scale(recipe: _recipe.Recipe | None) -> dict[str, Any]:
    """Returns field -> value of the initial loss scale of a recipe; empty if it has none."""
    leaves = [] if recipe is None else _core.leaves_with_path(recipe.loss_scale)
    return {names[-1]: np.asarray(leaf) for names, leaf in leaves}


# Rows that an error message lists.
_LISTED = 5

Migrate = bool | Literal["lossy"]


class _Options(NamedTuple):
    """Arguments of `Checkpointer.restore` that decide whether, and how, leaves are converted."""

    wanted: _recipe.Recipe | None
    migrate: Migrate
    params: Declared


class Checkpointer:
    """Saves and restores training states, in one directory, without changing their precision.

    A state is a `jaxmp.TrainState`, NNX modules and optimizers, or any pytree of arrays, PRNG keys
    and numbers; for NNX pass a tuple or a dict of them, such as `(model, optimizer)`. Orbax writes
    the arrays. A manifest beside them records the recipe, the checksum of each file, and for each
    leaf its path, dtype and shape. `restore` compares it with the given state before it reads any
    array.

    Every process of a distributed job makes one and calls the same methods. The first `save` locks
    the directory against other processes and jobs, until `close` or the end of the process;
    reading requires no lock. A save that runs when the program ends is finished first.

    Args:
      directory: directory of the run; each step has a subdirectory. It is created by `save`. Or a
        file to restore that `flax.serialization.to_bytes` wrote.
      keep: number of steps to keep, those that were saved last; others are deleted after a newer
        one is complete. Steps that jaxmp did not write are kept. None: all.

    Raises:
      CheckpointError: for an argument that is not allowed.

    Example:
      >>> params = {"w": jnp.ones(3)}
      >>> recipe = jaxmp.load_recipe("bf16_params")
      >>> tx = recipe.optimizer(optax.adam(1e-3))
      >>> state = jaxmp.TrainState.create(apply_fn=None, params=params, tx=tx)
      >>> with Checkpointer("checkpoints", keep=2) as checkpointer:
      ...     checkpointer.save(100, state, recipe=recipe, extra={"epoch": 3})
      ...     checkpointer.wait()
      ...     state = checkpointer.restore(state, recipe=recipe)
      ...     checkpointer.describe(100).extra
      {'epoch': 3}
    """

    def __init__(self, directory: str | epath.PathLike, *, keep: int | None = None) -> None:
        if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int) or keep < 1):
            raise CheckpointError(
                f"keep={keep!r} is not a number of steps. Give a positive integer, such as keep=3, "
                "or None to keep all steps."
            )
        try:
            path = epath.Path(directory).expanduser()
        except (TypeError, KeyError):  # KeyError: a scheme that etils does not know
            raise CheckpointError(
                f"directory={directory!r} is not a path. Name the directory of a run, such as "
                "Checkpointer('runs/first')."
            ) from None
        self._directory = path if path.is_absolute() else epath.Path(os.getcwd()) / path
        self._keep = keep
        self._writer: _writer.Writer | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def directory(self) -> str:
        """The directory of the run."""
        return str(self._directory)

    # ---------------------------------------------------------------- Saving

    def save(
        self,
        step: int,
        state: PyTree,
        *,
        recipe: _load.RecipeLike,
        metrics: Mapping[str, float] | None = None,
        extra: Any = None,
        params: Declared = None,
        allow_nonfinite: bool = False,
    ) -> None:
        """Writes a state; returns as soon as its arrays are copied, and writes in the background.

        The arrays may be donated or changed afterwards. An error of the background work is raised
        by the next call of any method, or printed when the program ends.

        Args:
          step: number of the step, 0 or more. A lower number than that of the last save is a
            rollback of the run, and a warning.
          state: the state.
          recipe: the recipe under which it was trained, as in `jaxmp.load_recipe`.
          metrics: names and numbers, such as `{"loss": 2.5}`.
          extra: any other data that JSON can represent, such as the position in the data.
          params: path of the parameters in the state, such as "model"; with several optimizers, a
            dict from the path of each to that of its parameters. None: those of a train state or
            of the model of a `jaxmp.nnx.Optimizer`, or the leaves to which the masters round. If
            an average fits as well, the state is saved, but cannot be migrated without `params`.
          allow_nonfinite: save parameters, masters, averages and moments also if they contain NaN
            or infinity, and list them in the manifest. False: such a step stays incomplete.

        Warns:
          RecipeWarning: if a parameter is not its rounded FP32 master.

        Raises:
          CheckpointError: if the step exists, another process saves into the directory, the state
            was not made with this recipe, or it cannot be written.
        """
        recipe = _recipe.load_recipe(recipe)
        if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(state)):
            raise CheckpointError(
                "save received an abstract state, whose leaves have shapes but no values."
            )
        flat = flatten_state(state, by_values=True)
        check_made_with(flat.description, recipe, "The state")
        description = declare(flat.description, params)
        step = _manifest.as_step(step)
        metrics, extra = _manifest.as_metrics(metrics), _manifest.as_json(extra)
        writer = self._open_for_writing(step)
        if step in self.all_steps():
            raise CheckpointError(
                f"Step {step} exists in {self._directory}. Checkpoints are never overwritten; save "
                f"under another step, or delete it: shutil.rmtree({str(self._path(step))!r})."
            )
        leaves = description.leaves
        values = {leaf.path: value for leaf, value in zip(leaves, flat.values, strict=True)}
        trained = [p for row in description.masters for p in row.parameters]
        warn_of_replaced(
            (p.path, values[p.leaf], values[p.master]) for p in trained if p.leaf and p.master
        )
        stored = {leaf: _handler.to_stored(leaf, values[leaf.path]) for leaf in leaves}
        tested = finite_leaves(description)
        tests = {x.path: _handler.start_test(v) for x, v in stored.items() if x.path in tested}
        manifest = Manifest(
            step=step,
            recipe_toml=recipe.to_toml(),
            description=description,
            metrics=metrics,
            extra=extra,
        )
        args = _handler.SaveState(
            leaves={x.names: value for x, value in stored.items() if _handler.is_written(x)},
            manifest=manifest,
            tests=tests,
            allow_nonfinite=allow_nonfinite,
        )
        if not args.leaves:
            raise CheckpointError("The state contains no array.")
        if jax.process_count() > 1:
            # Processes must agree on them here: only the first of them writes the manifest.
            args.finish()
        writer.write(step, args)

    def wait(self) -> None:
        """Waits until everything that was saved is on disk."""
        if self._writer is not None:
            self._writer.wait_until_finished()

    def close(self) -> None:
        """Waits until everything is on disk and releases all resources."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    # ---------------------------------------------------------------- Restoring

    def restore(
        self,
        state_like: PyTree,
        *,
        step: int | None = None,
        recipe: _load.RecipeLike | None = None,
        migrate: Migrate = False,
        verify: bool = True,
        params: Declared = None,
        only: Literal["params"] | None = None,
    ) -> PyTree:
        """Reads a state.

        Args:
          state_like: a state of the same structure: the first state of a run, or its shapes
            (`jax.eval_shape`, `jax.ShapeDtypeStruct`). Each leaf is placed with the sharding that
            its leaf here has. NNX objects are updated in place.
          step: the step; None: that which was saved last.
          recipe: the recipe of `state_like`. If the checkpoint was written under another one, a
            migration is necessary.
          migrate: True: convert a checkpoint of another recipe, or one that jaxmp did not write,
            and print the plan first. "lossy": also if that loses information, such as masters.
          verify: compare the checksums of all data files. False reads faster, but does not detect
            damage.
          params: as in `save`, for the migration of a state in which averages or copies have the
            paths and dtypes of the parameters.
          only: "params": `state_like` consists of the parameters alone, such as `state.params` or
            an NNX model. FP32 parameters are read from the masters, whatever the recipe of the
            checkpoint is; other dtypes are those of `state_like`. `params` is their path in the
            checkpoint, which may also be that of an average. The checkpoint may be that of another
            program.

        Returns:
          A state like `state_like`; the same objects for NNX.

        Raises:
          CheckpointError: naming the first leaf or file that is missing, damaged or different.

        Example:
          `state = checkpointer.restore(state, recipe="bf16_params")`
        """
        if migrate not in (False, True, "lossy"):
            raise CheckpointError(f"migrate={migrate!r}. Allowed: False, True and 'lossy'.")
        if only not in (None, "params") or (only and migrate):
            raise CheckpointError(f"only={only!r}. Allowed: None, and 'params' without migrate.")
        wanted = None if recipe is None else _recipe.load_recipe(recipe)
        options, flat = _Options(wanted, migrate, params), flatten_state(state_like)
        if wanted is not None:
            check_made_with(flat.description, wanted, "state_like")
        step, directory = self._find(step)
        if not _manifest.has_manifest(directory):
            return self._restore_foreign(flat, step, options, only)
        manifest = _manifest.read_manifest(directory)
        if verify:
            self._verify_files(directory, manifest)
        if only:
            plan = plan_parameters(manifest.description, flat.description, params)
        else:
            plan = self._plan(flat.description, manifest, options)
        read = functools.partial(_read_leaves, directory)
        return flat.rebuild(_handler.make_leaves(plan, manifest.description, flat, read))

    def verify(self, step: int | None = None) -> CheckpointInfo:
        """Reads all files of a checkpoint and compares their checksums.

        Args:
          step: the step; None: that which was saved last.

        Returns:
          What `describe` returns.

        Raises:
          CheckpointError: naming the first file that is missing or damaged.
        """
        directory, manifest = self._manifest(step)
        _manifest.check_files(directory, manifest)
        return _manifest.describe_manifest(directory.parent, manifest)

    def describe(self, step: int | None = None) -> CheckpointInfo:
        """Returns what a checkpoint contains, without reading its arrays.

        Args:
          step: the step; None: that which was saved last.

        Raises:
          CheckpointError: if there is no such step, or jaxmp did not write it.
        """
        directory, manifest = self._manifest(step)
        return _manifest.describe_manifest(directory.parent, manifest)

    # ---------------------------------------------------------------- Steps

    def all_steps(self) -> list[int]:
        """Returns the complete steps in ascending order; waits for a step that is being saved."""
        self.wait()
        return _writer.complete_steps(self._directory)

    def latest_step(self) -> int | None:
        """Returns the complete step that was saved last; None: there is none."""
        return next(reversed(_writer.saved_order(self._directory, self.all_steps())), None)

    # ---------------------------------------------------------------- Details

    def _find(self, step: int | None) -> tuple[int | None, epath.Path]:
        """Returns a step, or None for a checkpoint that has none, and the directory of its data."""
        steps = self.all_steps()
        step = self.latest_step() if step is None else _manifest.as_step(step)
        if step not in steps and _foreign.find_checkpoint(self._directory, step) is None:
            listed = f"the steps {', '.join(map(str, steps))}" if steps else "no step"
            missing = "a checkpoint" if step is None else f"step {step}"
            raise CheckpointError(f"{self._directory} does not contain {missing}. It has {listed}.")
        directory = (self._directory if step is None else self._path(step)) / _handler.ITEM
        # Without a step, the directory of the run is that of a step, or of the data itself.
        return step, directory if directory.exists() or step is not None else self._directory

    def _path(self, step: int) -> epath.Path:
        return self._directory / str(step)

    def _manifest(self, step: int | None) -> tuple[epath.Path, Manifest]:
        step, directory = self._find(step)
        if not _manifest.has_manifest(directory):
            folder = self._directory if step is None else directory.parent
            raise CheckpointError(
                f"{folder} has no manifest, so jaxmp did not write it. Name the directory of a "
                "run. A checkpoint of another program is restored with restore(state, "
                "migrate=True); then, save it again."
            )
        return directory, _manifest.read_manifest(directory)

    def _open_for_writing(self, step: int) -> _writer.Writer:
        if self._writer is None:
            _writer.check_directory(self._directory)
            parts = (self._directory, self._directory / _handler.ITEM)
            if any(map(_manifest.has_manifest, parts)):
                raise CheckpointError(
                    f"{self._directory} is a step of a run, or its data. Save into the directory "
                    "of a run: Checkpointer('runs/first')."
                )
            with _writer.explain_errors(self._directory, step):
                self._writer = _writer.Writer(self._directory, self._keep)
        return self._writer

    def _verify_files(self, directory: epath.Path, manifest: Manifest) -> None:
        try:
            _manifest.check_files(directory, manifest)
        except CheckpointError as error:
            steps = _writer.saved_order(self._directory, {*self.all_steps(), manifest.step})
            earlier = steps[: steps.index(manifest.step)]
            hint = (
                f" Restore an earlier step: restore(state, step={earlier[-1]})." if earlier else ""
            )
            raise CheckpointError(f"{error}{hint}") from None

    def _plan(self, target: Description, manifest: Manifest, options: _Options) -> Plan:
        """Returns the plan of a restore, and prints the plan of a migration."""
        (wanted, migrate, params), source = options, manifest.description
        rows = differences(source, target)
        if not rows and manifest.is_of(wanted):
            return plan_copy(source, target)
        before = f"under the recipe {manifest.recipe.name!r}"
        after = f"the recipe {wanted.name!r}" if wanted is not None else "other leaves"
        head = f"Step {manifest.step} was written {before} (master layout: {source.layout})"
        tail = f"{after} (master layout: {target.layout})"
        try:
            plan = plan_migration(source, target, initial_scale(wanted), params)
            advice = "Convert it deliberately: restore(state, recipe=recipe, migrate=True)."
        except CheckpointError as refusal:
            if migrate:
                raise
            plan, advice = None, str(refusal)
        if plan is None or not migrate:
            lines = rows[:_LISTED]
            if len(rows) > _LISTED:
                lines.append(f"... and {len(rows) - _LISTED} more leaves")
            listed = "".join(f"\n  {line}" for line in lines) or " Their leaves are the same."
            raise CheckpointError(f"{head}, and the state to restore has {tail}.{listed}\n{advice}")
        _announce(f"{head}; migration to {tail}:", plan, migrate)
        return plan

    def _restore_foreign(
        self, flat: FlatState, step: int | None, options: _Options, only: str | None
    ) -> PyTree:
        wanted, migrate, params = options
        location = _foreign.find_checkpoint(self._directory, step)
        if location is None:
            raise CheckpointError(
                f"{self._path(step) if step is not None else self._directory} is not a "
                "checkpoint of jaxmp, orbax or Flax."
            )
        if not migrate and not only:
            raise CheckpointError(
                f"{location.path} has no manifest, so jaxmp did not write it: its recipe and its "
                "checksums are unknown. Check the plan of a migration: "
                "restore(state, migrate=True)."
            )
        target = flat.description
        if only:
            stored = _foreign.read(location, target)[0]
            plan = plan_parameters(stored.description, target, params)
        else:
            target = declare(target, params)
            stored, plan = _plan_foreign(location, target, initial_scale(wanted))
            layout = f"the given state (master layout: {target.layout})"
            _announce(f"{stored.origin}, without checksums; migration to {layout}:", plan, migrate)
        return flat.rebuild(_handler.make_leaves(plan, stored.description, flat, stored.read))


def _plan_foreign(
    location: _foreign.ForeignCheckpoint, target: Description, first_scale: dict[str, Any]
) -> tuple[_foreign.Stored, Plan]:
    """Plans the migration of the first state in a checkpoint from which `target` can be made."""
    refusals = []
    for stored in _foreign.read(location, target):
        try:
            return stored, plan_migration(stored.description, target, first_scale)
        except CheckpointError as error:
            refusals.append(str(error))
    parts = ", ".join(f"{item.name!r}: state.{item.name}" for item in location.items)
    hint = f" It has several items; restore those of a state by their names, such as {{{parts}}}."
    raise CheckpointError(f"{refusals[0]}{hint if refusals[1:] else ''}")


def _read_leaves(
    directory: epath.Path, targets: dict[_core.Path, jax.ShapeDtypeStruct]
) -> dict[_core.Path, Any]:
    item = ocp.tree.from_flat_dict(targets)
    restore_args = ocp.checkpoint_utils.construct_restore_args(item)
    args = ocp.args.PyTreeRestore(item, restore_args, partial_restore=True)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        try:
            return ocp.tree.to_flat_dict(checkpointer.restore(directory, args=args))
        except (ValueError, KeyError, OSError) as error:
            raise CheckpointError(f"Orbax cannot read {directory}: {error}") from error


def _announce(head: str, plan: Plan, migrate: Migrate) -> None:
    if jax.process_index() == 0:
        print(f"{head}\n{plan}", flush=True)
    if plan.losses and migrate != "lossy":
        advice = "If that is intended: restore(state, recipe=recipe, migrate='lossy')."
        if plan.drops_masters:
            advice = (
                "FP32 masters would be lost, because the state to restore has no optimizer or "
                "parameters that they belong to. Build it as in the run that wrote the checkpoint, "
                "such as state = {'params': params, 'opt_state': tx.init(params)}."
            )
        raise CheckpointError(
            f"This migration loses information: {'; '.join(plan.losses)}. {advice}"
        )
