"""Training steps with planted faults, and the diagnosis that is expected of each.

The table was written before the first run of `jaxmp.locate_nonfinite`. Since then, only the names
of arguments were changed to code, and the lines of three faults: JAX records the call of a
custom_vjp function as the line of the operations in its rules, and the line of an overflow by a
loss scale was left open. Two losses were made smaller, so that the gradients of the fixed programs
do not overflow float16, and the layers lost their biases, one of which had a poisoned moment. Five
faults are those of public issue threads, which their names cite. Each source defines `make`, which
returns a step and its arguments.
"""

from __future__ import annotations

import dataclasses
import textwrap

HEAD = """
import functools
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec as P

import jaxmp

f16, f32 = jnp.float16, jnp.float32
# Fewer parameters, as most time is the compilation of their updates.
Dense, Linear = (functools.partial(layer, use_bias=False) for layer in (nn.Dense, nnx.Linear))


def mesh(count=4):
    return jax.make_mesh((count,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))


def with_gradient(loss):
    return jax.jit(jax.value_and_grad(loss))


def make():
    return with_gradient(loss), *ARGUMENTS


def train(model, x, recipe="fp32", tx=optax.sgd(0.1), loss=lambda y: jnp.mean(y**2), **options):
    recipe = jaxmp.load_recipe(recipe)
    wrapped = recipe.wrap(model)
    params = wrapped.init(jax.random.key(0), x)
    state = jaxmp.TrainState.create(
        apply_fn=wrapped.apply, params=params, tx=recipe.optimizer(tx)
    )

    @jax.jit
    def step(state, batch):
        loss_fn = lambda params, batch: loss(wrapped.apply(params, batch["x"]).astype(f32))
        value, grads = state.value_and_grad(loss_fn, **options)(batch)
        return state.apply_gradients(grads=grads), value

    return step, state, {"x": x}


class Readout(nn.Module):
    @nn.compact
    def __call__(self, x):
        return Dense(4, name="readout")(x)


"""


@dataclasses.dataclass(frozen=True)
class Plant:
    """A planted fault.

    Attributes:
      name: the fault; with the number of a public issue where it was reported.
      source: code after `HEAD`, which defines `make`, or a `loss` and its `ARGUMENTS`. The line of
        a faulty operation ends with the comment `# fault`.
      cause: expected id of the cause.
      module: expected module path.
      phase: expected pass; "" for a fault of an argument.
      iteration: expected iterations of the enclosing loops, outermost first.
      device: expected device of a `shard_map`; None outside of one.
      argument: expected argument, and None for a fault of an operation.
      repair: how the printed fix is applied: "line" replaces the expression of the line, "recipe"
        or "tx" changes this argument of `make`, and "arguments" the arguments of the step. Another
        word is the denominator that the fix replaces.
    """

    name: str
    source: str
    cause: str
    module: str = ""
    phase: str = "forward"
    iteration: tuple[int, ...] = ()
    device: int | None = None
    argument: str = ""
    repair: str = "line"

    @property
    def program(self) -> str:
        return HEAD + textwrap.dedent(self.source)


def of_argument(name: str, source: str, cause: str, argument: str) -> Plant:
    """Returns a fault of an argument of the step."""
    return Plant(name, source, cause, phase="", argument=argument, repair="arguments")


PLANTS = [
    # -- plain functions ----------------------------------------------------------------------
    Plant(
        "log of zero",
        """
        def loss(w, p):
            with jax.named_scope("head"):
                p = p * w
                entropy = -jnp.log(p)  # fault
            return entropy.sum()

        ARGUMENTS = jnp.ones(3), jnp.array([0.5, 0.0, 0.2])
        """,
        "log_of_zero",
        module="head",
    ),
    Plant(
        "jax#26796: log of a negative number under shard_map",
        """
        def f(x):
            y = jnp.square(x)
            return jnp.log(y - 4.0)  # fault

        def make():
            part = jax.shard_map(f, mesh=mesh(), in_specs=P("data"), out_specs=P("data"))
            x = jnp.array([3.0, 3.0, 3.0, 3.0, 3.0, 1.0, 3.0, 3.0])
            return with_gradient(lambda x: part(x).sum()), x
        """,
        "log_of_negative",
        device=2,
    ),
    Plant(
        "jax#5798: gradient of the unused branch of a where",
        """
        def loss(x):
            y = jnp.where(x < 1.0, x, jnp.sqrt(x))  # fault
            return y.sum()

        ARGUMENTS = (jnp.array([2.0, 0.0, 0.5]),)
        """,
        "where_gradient",
        phase="backward",
    ),
    Plant(
        "jax#21723: gradient of a norm at zero",
        """
        def loss(x):
            with jax.named_scope("penalty"):
                length = jnp.linalg.norm(x)  # fault
            return length**2

        ARGUMENTS = (jnp.zeros(3),)
        """,
        "root_of_zero",
        module="penalty",
        phase="backward",
    ),
    Plant(
        "flax#982: attention in float16 with a mask of -1e10",
        """
        def loss(x, mask):
            with jax.named_scope("attention"):
                bias = jnp.where(mask, 0.0, -1e10).astype(f16)
                logits = x @ x.T + bias
                weights = jax.nn.softmax(logits, axis=-1)  # fault
            return (weights @ x).astype(f32).sum()

        def make():
            x = jnp.ones((4, 8), f16) / 4
            mask = jnp.arange(4)[None, :] < jnp.array([4, 2, 0, 1])[:, None]
            return with_gradient(loss), x, mask
        """,
        "masked_softmax",
        module="attention",
    ),
    Plant(
        "marin#7271: one leg of a weight gradient in MXFP8",
        """
        def quantized(x):
            blocks = x.reshape(-1, 4)
            amax = jnp.max(jnp.abs(blocks), axis=1, keepdims=True)
            scale = amax / 448.0
            rounded = (blocks / scale).astype(jnp.float8_e4m3fn).astype(f32)
            return (rounded * scale).reshape(x.shape)

        @jax.custom_vjp
        def matmul(x, w):
            return x @ w

        def backward(residuals, g):
            x, w = residuals
            return g @ w.T, x.T @ quantized(g)

        matmul.defvjp(lambda x, w: (x @ w, (x, w)), backward)

        def loss(params, x):
            with jax.named_scope("w_up"):
                h = jax.nn.relu(x @ params["up"])
            with jax.named_scope("w_down"):
                y = matmul(h, params["down"])  # fault
            return jnp.mean(y[:, :4] ** 2)

        def make():
            params = {"up": jnp.ones((4, 8)), "down": jnp.ones((8, 8))}
            return with_gradient(loss), params, jnp.ones((2, 4))
        """,
        "division_by_zero",
        module="w_down",
        phase="backward",
        repair="scale",
    ),
    Plant(
        "exponential in a scan",
        """
        def loss(w, x):
            def body(h, row):
                h = jnp.exp(h * w) + row  # fault
                return h, h
            h, _ = lax.scan(body, x[0], x)
            return h.sum()

        ARGUMENTS = jnp.float32(1.0), jnp.full((6, 2), 1.0)
        """,
        "exp_overflow",
        iteration=(3,),
    ),
    Plant(
        "quotient in a while loop",
        """
        def f(x):
            def body(carry):
                n, y = carry
                return n + 1, y * (n / (x - n.astype(f32)))  # fault
            n, y = lax.while_loop(lambda carry: carry[0] < 7, body, (jnp.int32(0), x * 0 + 1.0))
            return y

        def make():
            return jax.jit(lambda x: f(x).sum()), jnp.array([9.5, 4.0])
        """,
        "division_by_zero",
        iteration=(4,),
    ),
    Plant(
        "root of a negative number in a branch",
        """
        def root(x):
            return jnp.sqrt(x - 1.0)  # fault

        def loss(x):
            return lax.cond(x.sum() > 0, root, jnp.sin, x).sum()

        ARGUMENTS = (jnp.array([2.0, 0.5]),)
        """,
        "root_of_negative",
    ),
    Plant(
        "backward rule of a custom_vjp",
        """
        @jax.custom_vjp
        def normalized(x):
            return x / (jnp.abs(x).max() + 1.0)

        def backward(x, g):
            size = jnp.abs(x).sum(axis=-1, keepdims=True)
            return (g / size,)

        normalized.defvjp(lambda x: (normalized(x), x), backward)

        def loss(x):
            with jax.named_scope("norm"):
                y = normalized(x)  # fault
            return (y**2 + y).sum()

        ARGUMENTS = (jnp.array([[1.0, 2.0], [0.0, 0.0]]),)
        """,
        "division_by_zero",
        module="norm",
        phase="backward",
        repair="size",
    ),
    Plant(
        "normalized examples under vmap",
        """
        def example_loss(w, x):
            with jax.named_scope("normalize"):
                y = w * x
                y = y * lax.rsqrt(jnp.sum(y * y))  # fault
            return y.sum()

        def loss(w, batch):
            return jax.vmap(example_loss, (None, 0))(w, batch).mean()

        def make():
            batch = jnp.array([[1.0, 2.0], [3.0, 1.0], [0.0, 0.0]])
            return with_gradient(loss), jnp.ones(2), batch
        """,
        "root_of_zero",
        module="normalize",
    ),
    Plant(
        "range of float16 on one device of a shard_map",
        """
        def loss(w, x):
            def part(w, x):
                with jax.named_scope("dense"):
                    y = x.astype(f16) @ w.astype(f16)  # fault
                return lax.pmean(jnp.mean(y.astype(f32)), "data")
            specs = (P(), P("data"))
            return jax.shard_map(part, mesh=mesh(), in_specs=specs, out_specs=P())(w, x)

        def make():
            x = jnp.ones((4, 16)).at[3].set(2000.0)
            return with_gradient(loss), jnp.full((16, 2), 4.0), x
        """,
        "float16_range",
        module="dense",
        device=3,
    ),
    Plant(
        "unused branch of a where in a rematerialized function",
        """
        @jax.checkpoint
        def block(w, x):
            y = x * w
            return jnp.where(y > 0, jnp.log(y), 0.0)  # fault

        def loss(w, x):
            return block(w, x).sum()

        ARGUMENTS = jnp.ones(3), jnp.array([1.0, 0.0, 2.0])
        """,
        "where_gradient",
        phase="backward",
    ),
    Plant(
        "softmax of a masked row in FP32",
        """
        def loss(x, mask):
            with jax.named_scope("attention"):
                logits = jnp.where(mask, x @ x.T, -jnp.inf)
                weights = jax.nn.softmax(logits)  # fault
            return (weights @ x).sum()

        def make():
            mask = jnp.array([[True, False], [False, False]])
            return with_gradient(loss), jnp.ones((2, 3)), mask
        """,
        "masked_softmax",
        module="attention",
    ),
    Plant(
        "power of a negative number",
        """
        def loss(w, x):
            y = x * w
            return jnp.sum(y**0.3)  # fault

        ARGUMENTS = jnp.float32(1.0), jnp.array([1.0, -0.5])
        """,
        "root_of_negative",
    ),
    Plant(
        "empty group in a batch that jit shards",
        """
        def loss(w, x, weights):
            with jax.named_scope("pool"):
                total = weights.sum(axis=1)
                mean = (x * weights).sum(axis=1) / total  # fault
            return jnp.mean(mean * w)

        def make():
            place = lambda x, spec: jax.device_put(x, NamedSharding(mesh(), spec))
            x = place(jnp.ones((8, 3)), P("data"))
            weights = place(jnp.ones((8, 3)).at[5].set(0.0), P("data"))
            return with_gradient(loss), place(jnp.float32(1.0), P()), x, weights
        """,
        "division_by_zero",
        module="pool",
    ),
    Plant(
        "range of float16 in one microbatch",
        """
        def loss(w, x):
            with jax.named_scope("dense"):
                y = x.astype(f16) * w.astype(f16)  # fault
            return jnp.mean(y.astype(f32))

        @jax.jit
        def step(w, x):
            return jaxmp.value_and_grad(loss, microbatches=4)(w, x)

        def make():
            return step, jnp.full(2, 300.0), jnp.ones((8, 2)).at[5, 1].set(300.0)
        """,
        "float16_range",
        module="dense",
        iteration=(2,),
    ),
    # -- Linen --------------------------------------------------------------------------------
    Plant(
        "Linen: range of float16 in one layer",
        """
        class Net(nn.Module):
            @nn.compact
            def __call__(self, x):
                x = Dense(16, name="hidden", kernel_init=nn.initializers.ones)(x)
                x = Dense(32, name="readout", kernel_init=nn.initializers.ones)(x)  # fault
                return Dense(16, name="last")(x)

        def make(recipe="fp16"):
            loss = lambda y: jnp.mean(y) * 1e-9
            return train(Net(), jnp.full((2, 16), 400.0), recipe, loss=loss)
        """,
        "float16_range",
        module="readout",
        repair="recipe",
    ),
    Plant(
        "Linen: third layer of an nn.scan",
        """
        class Block(nn.Module):
            @nn.compact
            def __call__(self, x, shift):
                x = Dense(4, name="up")(x)
                with jax.named_scope("gate"):
                    x = x / (shift - 2.0)  # fault
                return x, None

        class Net(nn.Module):
            @nn.compact
            def __call__(self, x):
                axes, rngs = {"params": 0}, {"params": True}
                layers = nn.scan(Block, variable_axes=axes, split_rngs=rngs, length=4)
                return layers(name="layers")(x, jnp.arange(4.0))[0]

        def make():
            return train(Net(), jnp.ones((2, 4)))
        """,
        "division_by_zero",
        module="layers/gate",
        iteration=(2,),
    ),
    Plant(
        "Linen: exponential in float16 in an nn.remat",
        """
        class Block(nn.Module):
            @nn.compact
            def __call__(self, x):
                x = Dense(16, name="up", kernel_init=nn.initializers.ones)(x)
                return jnp.exp(x)  # fault

        class Net(nn.Module):
            @nn.compact
            def __call__(self, x):
                return Dense(16, name="readout")(nn.remat(Block)(name="block")(x))

        def make():
            loss = lambda y: jnp.mean(y) * 1e-9
            return train(Net(), jnp.ones((2, 16)), "fp16", loss=loss)
        """,
        "exp_overflow",
        module="block",
    ),
    Plant(
        "Linen: loss scale too high",
        """
        class Net(nn.Module):
            @nn.compact
            def __call__(self, x):
                x = Dense(16, name="hidden")(x)
                return Dense(16, name="readout")(x)  # fault

        def make(recipe=None):
            scale = jaxmp.DynamicLossScale(2.0**24)
            recipe = recipe or jaxmp.load_recipe("fp16").replace(loss_scale=scale)
            x = jax.random.normal(jax.random.key(1), (4, 16))
            return train(Net(), x, recipe, loss=lambda y: jnp.sum(y**2))
        """,
        "loss_scale",
        module="readout",
        phase="backward",
        repair="recipe",
    ),
    of_argument(
        "Linen: bad row of a batch with microbatches",
        """
        def make():
            x = jnp.ones((8, 4)).at[5, 2].set(jnp.nan)
            return train(Readout(), x, microbatches=2)
        """,
        "bad_input",
        "batch['x']",
    ),
    of_argument(
        "Linen: poisoned parameter",
        """
        def make():
            step, state, batch = train(Readout(), jnp.ones((2, 4)))
            params = jax.tree.map(jnp.array, state.params)
            params["params"]["readout"]["kernel"] = jnp.ones((4, 4)).at[1, 2].set(jnp.nan)
            return step, state.replace(params=params, step=jnp.int32(1)), batch
        """,
        "poisoned_parameter",
        "state.params['params']['readout']['kernel']",
    ),
    of_argument(
        "Linen: poisoned second moment",
        """
        def make():
            model, x = Readout(), jnp.ones((2, 4))
            params = model.init(jax.random.key(0), x)
            tx = optax.adam(0.1)
            opt_state = tx.init(params)
            nu = jax.tree.map(jnp.array, opt_state[0].nu)
            nu["params"]["readout"]["kernel"] = jnp.zeros((4, 4)).at[0, 3].set(jnp.inf)
            opt_state = (opt_state[0]._replace(nu=nu, count=jnp.int32(1)), *opt_state[1:])

            @jax.jit
            def step(params, opt_state, x):
                grads = jax.grad(lambda p: jnp.mean(model.apply(p, x) ** 2))(params)
                updates, opt_state = tx.update(grads, opt_state, params)
                return optax.apply_updates(params, updates), opt_state

            return step, params, opt_state, x
        """,
        "poisoned_moment",
        "opt_state[0].nu['params']['readout']['kernel']",
    ),
    of_argument(
        "Linen: FP8 scale that is not finite",
        """
        class Net(nn.Module):
            @nn.compact
            def __call__(self, x):
                return Dense(32, name="up")(x)

        def make():
            scaling = jaxmp.fp8.DelayedScaling(amax_history_len=4, min_width=1, emulate=True)
            recipe = jaxmp.load_recipe("fp8_delayed").replace(fp8=scaling)
            step, state, batch = train(Net(), jnp.ones((16, 16)), recipe)
            bad = lambda path, x: x * jnp.nan if "kernel" in str(path) else x
            name = "_overwrite_with_gradient"
            fp8 = jax.tree_util.tree_map_with_path(bad, state.params[name])
            return step, state.replace(params={**state.params, name: fp8}, step=jnp.int32(1)), batch
        """,
        "fp8_scale",
        "_overwrite_with_gradient",
    ),
    # -- NNX ----------------------------------------------------------------------------------
    Plant(
        "NNX: root in an nnx.scan",
        """
        class Block(nnx.Module):
            def __init__(self, rngs):
                self.up = Linear(4, 4, rngs=rngs)

            def __call__(self, x):
                x = self.up(x)
                with jax.named_scope("root"):
                    x = jnp.sqrt(x - x.mean())  # fault
                return x

        class Net(nnx.Module):
            def __init__(self, rngs):
                self.blocks = nnx.split_rngs(splits=2)(nnx.vmap(Block))(rngs)

            def __call__(self, x):
                run = lambda x, block: block(x)
                return nnx.scan(run, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.blocks)

        @nnx.jit
        def step(model, x):
            return nnx.value_and_grad(lambda model: model(x).mean())(model)

        def make():
            return step, Net(nnx.Rngs(0)), jnp.ones((2, 4))
        """,
        "root_of_negative",
        module="root",
        iteration=(0,),
    ),
    Plant(
        "NNX: logarithm of a saturated sigmoid in 16 bits",
        """
        class Net(nnx.Module):
            def __init__(self, rngs):
                self.head = Linear(4, 32, kernel_init=nnx.initializers.ones, rngs=rngs)

            def __call__(self, x):
                return jnp.log(jax.nn.sigmoid(self.head(x)))  # fault

        @nnx.jit
        def step(model, optimizer, x):
            loss_fn = lambda model: -model(x).astype(f32).mean()
            loss, grads = optimizer.value_and_grad(loss_fn)(model)
            optimizer.update(model, grads)
            return loss

        def make():
            recipe = jaxmp.load_recipe("fp16")
            model = recipe.wrap(Net(nnx.Rngs(0)))
            optimizer = jaxmp.nnx.Optimizer(model, recipe.optimizer(optax.sgd(0.1)))
            return step, model, optimizer, jnp.full((2, 4), -5.0)
        """,
        "log_of_zero",
    ),
    Plant(
        "NNX: epsilon of the optimizer",
        """
        class Net(nnx.Module):
            def __init__(self, rngs):
                self.head = Linear(4, 4, rngs=rngs)
                self.unused = nnx.Param(jnp.ones(3))

            def __call__(self, x):
                return self.head(x)

        @nnx.jit
        def step(model, optimizer, x):
            grads = nnx.grad(lambda model: (model(x) ** 2).mean())(model)
            optimizer.update(model, grads)  # fault

        def make(tx=optax.adam(0.1, eps=0.0)):
            model = Net(nnx.Rngs(0))
            optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
            return step, model, optimizer, jnp.ones((2, 4))
        """,
        "optimizer_epsilon",
        repair="tx",
    ),
    Plant(
        "NNX: quotient in an nnx.remat",
        """
        class Block(nnx.Module):
            def __init__(self, rngs):
                self.up = Linear(4, 4, rngs=rngs)

            def __call__(self, x):
                x = nnx.relu(self.up(x))
                with jax.named_scope("normalize"):
                    x = x / (x.max(axis=-1, keepdims=True) - x.max(axis=-1, keepdims=True))  # fault
                return x

        @nnx.jit
        def step(model, x):
            run = nnx.remat(lambda model, x: model(x))
            return nnx.value_and_grad(lambda model: run(model, x).mean())(model)

        def make():
            return step, Block(nnx.Rngs(0)), jnp.ones((2, 4))
        """,
        "division_by_zero",
        module="normalize",
    ),
]
