"""docs/transformations.md: optimisers and models with containers, beside the same with arrays."""

import inspect
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from jax.sharding import PartitionSpec as P
from meshes import batch, cut, mesh_of, plain, quick_key

import gda

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", "jax.array_ref|jax.ArrayRef")  # of flax, on an old JAX
    import flax.linen as nn
    from flax import nnx
    from flax.training.train_state import TrainState

PAGE = Path(__file__).parents[1] / "docs" / "transformations.md"


class Case(NamedTuple):
    """A program in two parts: the state of parameters, and a step that gives other parameters."""

    start: Callable[[Any], Any]
    step: Callable[[Any, Any], Any]
    params: Callable[[], Any]


# Every transformation of optax. Values of the arguments, by their names.

ADAM, SGD = optax.adam(0.1), optax.sgd(0.1)


def is_matrix(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.ndim > 1, tree)


def kind(tree: Any) -> Any:
    return jax.tree.map(lambda x: "matrix" if x.ndim > 1 else "vector", tree)


ARGUMENTS: dict[str, Any] = {
    **dict.fromkeys(["learning_rate", "max_learning_rate", "step_size", "eta", "gamma"], 0.1),
    **dict.fromkeys(["clipping", "max_delta", "threshold", "max_norm", "l2_norm_clip"], 0.1),
    **dict.fromkeys(["decay", "slow_step_size", "noise_multiplier", "weight_decay"], 0.5),
    **dict.fromkeys(["k", "sync_period", "every_k_schedule", "max_consecutive_errors"], 2),
    **dict.fromkeys(["max_backtracking_steps", "max_linesearch_steps"], 3),
    **dict.fromkeys(["inner", "opt", "tx", "optimizer", "fast_optimizer", "base_optimizer"], ADAM),
    **dict.fromkeys(["mask", "weight_decay_mask", "trust_ratio_mask", "freeze_mask"], is_matrix),
    "adv_optimizer": SGD,
    "f": lambda updates, params: jax.tree.map(jnp.sin, updates),
    **dict.fromkeys(["key", "seed"], 0),
    "measure": optax.global_norm,
    "measure_name": "norm",
    "param_labels": kind,
    "should_transform_fn": lambda *_, **__: True,
    "step_size_fn": lambda count: 0.1,
    "transforms": {"matrix": ADAM, "vector": SGD},
}
MADE: dict[str, Callable[[Any], Any]] = {
    "chain": lambda f: f(optax.clip(0.1), ADAM),
    "inject_hyperparams": lambda f: f(optax.adam)(learning_rate=0.1),
    "inject_stateful_hyperparams": lambda f: f(optax.adam)(learning_rate=0.1),
    "named_chain": lambda f: f(("clip", optax.clip(0.1)), ("adam", ADAM)),
    "scale_by_muon": lambda f: f(weight_dimension_numbers=dimension_numbers),
    "snapshot": lambda f: f("norm", lambda updates, *_, **__: optax.global_norm(updates)),
    "stateless_with_tree_map": lambda f: f(lambda update, param: jnp.sin(update)),
}


def dimension_numbers(tree: Any) -> Any:
    return jax.tree.map(lambda x: optax.contrib.MuonDimensionNumbers(), tree)


def transformations() -> dict[str, Callable[..., Any]]:
    """Return everything in optax that makes a transformation, by its full name."""
    return {
        f"{module.__name__}.{name}": function
        for module in (optax, optax.contrib)
        for name, function in sorted(vars(module).items())
        if name == "MultiSteps"
        or (
            inspect.isfunction(function)
            and not name.startswith("_")
            and "GradientTransformation" in str(inspect.signature(function).return_annotation)
        )
    }


def made(name: str, function: Callable[..., Any]) -> Any:
    if name in MADE:
        return MADE[name](function)
    parameters = inspect.signature(function).parameters.items()
    return function(
        **{
            key: ARGUMENTS[key]
            for key, parameter in parameters
            if parameter.kind is not parameter.VAR_KEYWORD
            and (parameter.default is parameter.empty or ("mask" in key and key in ARGUMENTS))
        }
    )


def parameters() -> Any:
    mesh = mesh_of({"x": 4, "y": 2})
    return {
        "b": cut(batch(4) / 4 + 1, mesh, P("y")),
        "w": cut(np.cos(batch(8, 4)), mesh, P("x", "y")),
    }


def loss_of(params: Any) -> Any:
    return sum(jnp.sum(jnp.asarray(leaf) ** 2) for leaf in jax.tree.leaves(params))


def of_optax(full_name: str) -> Case:
    name = full_name.rpartition(".")[2]
    tx = made(name, transformations()[full_name])
    extra = {"obj_fn" if name == "sophia" else "value_fn": loss_of}

    def step(state: Any, params: Any) -> Any:
        trained = params.fast if name == "lookahead" else params
        value, grads = jax.value_and_grad(loss_of)(trained)
        if name in ("differentially_private_aggregate", "dpsgd"):  # they take a batch of them
            grads = jax.tree.map(lambda x: jnp.stack([x, x]), grads)
        if isinstance(tx, optax.GradientTransformationExtraArgs) and name != "sam":
            updates, state = tx.update(grads, state, params, value=value, grad=grads, **extra)
        else:
            updates, state = tx.update(grads, state, params)
        if name == "measure_with_ema":  # its updates are the measurements
            return params, (updates, state)
        return optax.apply_updates(params, updates), state

    if name == "lookahead":
        return Case(tx.init, step, lambda: optax.LookaheadParams(parameters(), parameters()))
    if name == "scale_by_muon":
        return Case(tx.init, step, lambda: {"w": parameters()["w"]})
    return Case(tx.init, step, parameters)


# Models of other libraries.


def held(tree: Any) -> Any:
    """Return the tree with a container for every array."""
    mesh = mesh_of({"x": 4, "y": 2})
    replicated = jax.sharding.NamedSharding(mesh, P())
    return jax.tree.map(
        lambda x: (
            gda.GlobalArray.from_array(jax.device_put(x, replicated))
            if isinstance(x, jax.Array)
            else x
        ),
        tree,
    )


X = np.sin(batch(8, 4))


def of_train_state() -> Case:
    model = nn.Dense(4)

    def start(params: Any) -> Any:
        return TrainState.create(apply_fn=model.apply, params=params, tx=SGD)

    def step(state: Any, params: Any) -> Any:
        def loss(params: Any) -> Any:
            return (state.apply_fn(params, X) ** 2).sum()

        state = state.apply_gradients(grads=jax.grad(loss)(state.params))
        return state.params, (state.step, state.opt_state)

    return Case(start, step, lambda: held(model.init(quick_key(), X)))


class Net(nnx.Module):
    """A module with batch statistics, and a key for each call."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(4, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.dropout(self.norm(self.linear(x)))


def of_nnx() -> Case:
    graph, state = nnx.split(Net(nnx.Rngs(quick_key())))

    def step(_: Any, state: Any) -> Any:
        module = nnx.merge(graph, state)
        y = module(X)
        return nnx.state(module), y

    return Case(lambda state: (), step, lambda: held(state))


def mlp() -> Any:
    return eqx.nn.MLP(4, 4, 8, 1, activation=jnp.tanh, key=quick_key())


def of_filter_jit() -> Case:
    forward = eqx.filter_jit(lambda model: jax.vmap(model)(X))
    return Case(lambda model: (), lambda _, model: (model, forward(model)), lambda: held(mlp()))


def of_combine() -> Case:
    def step(_: Any, params: Any) -> Any:
        has_containers = isinstance(params.layers[0].weight, gda.GlobalArray)
        _, static = eqx.partition(held(mlp()) if has_containers else mlp(), eqx.is_array)

        def loss(params: Any) -> Any:
            return (jax.vmap(eqx.combine(params, static))(X) ** 2).sum()

        return eqx.apply_updates(params, eqx.filter_grad(loss)(params)), ()

    return Case(lambda params: (), step, lambda: held(eqx.filter(mlp(), eqx.is_array)))


MODELS: dict[str, Callable[[], Case]] = {
    "`TrainState.create` and `apply_gradients` of `flax.training`": of_train_state,
    "`nnx.merge` with `nnx.BatchNorm` and `nnx.Dropout`": of_nnx,
    "`eqx.filter_jit` of a forward pass": of_filter_jit,
    "`eqx.partition`, `eqx.combine` and `eqx.filter_grad`": of_combine,
}


# The checks.


def check(case: Case, steps: Iterable[Callable[[Any, Any], Any]]) -> None:
    """Run a case with arrays, and with containers by each way to take a step."""
    params = case.params()
    arrays = plain(params)
    wanted = case.step(case.start(arrays), arrays)
    state = case.start(params)
    assert layouts(state) == layouts(case.start(arrays))
    for step in steps:
        result = step(state, params)
        assert jax.tree.structure(result[0]) == jax.tree.structure(params)
        if step is case.step:
            assert layouts(result[0]) == layouts(params)
        # One compiled program computes in another order.
        tolerance = 0 if step is case.step else 1e-3
        for one, other in zip(numbers(result), numbers(wanted), strict=True):
            np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance)


def layouts(tree: Any) -> list[Any]:
    return [leaf.sharding for leaf in filter(eqx.is_array, jax.tree.leaves(tree))]


def numbers(tree: Any) -> list[np.ndarray]:
    leaves = map(jnp.asarray, filter(eqx.is_array_like, jax.tree.leaves(tree)))
    return [
        np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x)
        for x in leaves
    ]


pytestmark = [
    pytest.mark.filterwarnings(r"ignore::DeprecationWarning:optax\..*"),
    pytest.mark.filterwarnings("ignore:Specifying a key will be required:UserWarning"),
]

# It makes masks, labels and other nodes of the parameters.
SAMPLE = "optax.multi_transform"


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name == SAMPLE else pytest.mark.torture)
        for name in transformations()
    ],
)
def test_a_transformation_of_optax_gives_what_it_gives_for_arrays(name: str) -> None:
    case = of_optax(name)
    check(case, [case.step, gda.jit(case.step)])


@pytest.mark.parametrize("model", MODELS)
def test_a_model_of_the_page_gives_what_it_gives_for_arrays(model: str) -> None:
    case = MODELS[model]()
    (row,) = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if model in line]
    outside, jitted = (cell.strip() for cell in row.split("|")[2:4])
    ways = [(outside, case.step), (jitted, gda.jit(case.step))]
    check(case, [step for cell, step in ways if cell == "yes"])
