"""Check, at the first save, that `load_state` will be able to rebuild the state.

A state that no load could rebuild is refused before its step is listed; otherwise only the first
restart would notice. The check builds the model, which takes a second or more, in the background.
"""

import functools
import json
import logging
import threading
from collections.abc import Callable
from contextvars import copy_context
from typing import Any, Final
from weakref import WeakKeyDictionary

import jax
from flax import nnx

from cairn.interop.config.auto import AutoEasyDeLConfig
from cairn.interop.config.decoder import DecoderConfig
from cairn.interop.errors import ConfigError
from cairn.state import model_classes
from cairn.state.adapters.models import abstract_model
from cairn.state.paths import too_wide, tree_problems
from cairn.state.states.description import ModelDescription

__all__ = ["refuse_unloadable"]

logger = logging.getLogger("cairn.save")

_SHOWN: Final = 5
_CHECKED: WeakKeyDictionary[type[Any], dict[str, bool]] = WeakKeyDictionary()
"""Model class -> (config and settings, as JSON) -> whether the last attempt to build it worked."""


def refuse_unloadable(
    state: Any, described: ModelDescription, tree: Any
) -> Callable[[], None] | None:
    """Check that `load_state` will be able to load a checkpoint of this state.

    Quick checks are made at once. The rest is to build the model without arrays, as a load does;
    that is done once per process for each class, config and settings. A module without a config is
    not checked: a TrainState can load it. If a model has other leaves or attributes (such as a
    dropout's rate) than its config gives, a warning says what a load will need or change.

    Args:
        state: an `EasyDeLState`.
        described: description of its model.
        tree: the model's variables, or their leaves by path.

    Returns:
        A function for another thread, which builds the model, and raises ConfigError if that fails.
        It refers to no arrays; call it once. None if nothing is left to do: the model was built
        before, or now in this thread, because an earlier attempt failed, or because settings such
        as a mesh hold for this thread only.

    Raises:
        ConfigError: no load could build the model, or it has variables that JAX would load with
            another dtype.
    """
    model_class, own, meta = described
    config, settings = meta["config"], meta["module"]
    if config is None:
        return None
    _refuse_too_wide(model_class, tree)
    checked = _CHECKED.setdefault(model_class, {})
    key = json.dumps([_name(type(own)), config, settings], sort_keys=True, default=str)
    if checked.get(key):
        return None
    try:
        loaded = AutoEasyDeLConfig.from_dict(config)
    except ConfigError as exc:
        raise _unloadable(model_class, exc) from exc
    _refuse_other_class(model_class, type(own), type(loaded))
    graphdef = state.graphdef
    leaves, structure = jax.tree.flatten((state.graphstate, state.graphother))
    abstract = [
        jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
        if hasattr(leaf, "shape") and hasattr(leaf, "dtype")
        else leaf
        for leaf in leaves
    ]
    del leaves

    def build() -> None:
        try:
            built = abstract_model(model_class, loaded, settings)
        except Exception as exc:  # the model's constructor may raise anything
            checked[key] = False
            raise _unloadable(model_class, exc) from exc
        checked[key] = True
        _warn_of_other(built, nnx.merge(graphdef, *jax.tree.unflatten(structure, abstract)))

    if key in checked or not _is_alike_elsewhere():
        build()
        return None
    return functools.partial(copy_context().run, build)


def _is_alike_elsewhere() -> bool:
    """Return whether JAX's settings are the same in a new thread.

    Settings such as a mesh or x64 may hold for one thread only, and JAX does not list them. If they
    differ, JAX traces a function again in the other thread.
    """
    traced: list[None] = []
    probe = jax.jit(lambda: traced.append(None))
    jax.eval_shape(probe)
    other = threading.Thread(target=jax.eval_shape, args=(probe,))
    other.start()
    other.join()
    return len(traced) == 1


def _unloadable(model_class: type[Any], cause: Exception) -> ConfigError:
    return ConfigError(
        "load_state could not load this checkpoint",
        path=f"save_state: {model_class.__name__}",
        expected="a model that can be built from the config, dtypes and adapters it is stored with",
        found=f"{type(cause).__name__}: {cause}",
        next_step="set the model_type of the config's own class, and let the model's __init__ "
        "take config, dtype, param_dtype, precision and rngs alone",
    )


def _warn_of_other(built: Any, own: Any) -> None:
    """Log warnings if the model that a load builds differs from the one that is saved.

    Args:
        built: the model as a load builds it, without arrays.
        own: the model that is saved, without arrays.
    """
    if model_classes.is_hidden(type(own)):
        logger.warning(
            "load_state will make another %s: a class that was defined later has its module and "
            "name; give it another name, or pass model_class= to load_state",
            _name(type(own)),
        )
    before, after = _attributes(own), _attributes(built)
    changed = [
        f"{path}: {before[path]!r}, and {after[path]!r} after a load"
        for path in sorted(before.keys() & after.keys())
        if before[path] != after[path]
    ]
    if changed:
        logger.warning(
            "the model has attributes that its config does not give it, and that are not saved; "
            "load_state will build it anew: make them options of the config, or set them again "
            "after a load (%s)",
            "; ".join(changed),
        )
    problems = tree_problems(nnx.state(built), nnx.state(own))
    if problems:
        more = f" and {len(problems) - _SHOWN} more" * (len(problems) > _SHOWN)
        logger.warning(
            "the model is not what its config builds: load_state will need config_kwargs= or "
            "model_class= (%s%s)",
            "; ".join(problems[:_SHOWN]),
            more,
        )


def _refuse_other_class(model_class: type[Any], own: type[Any], loaded: type[Any]) -> None:
    """Check that a load finds the config's class by its `model_type`.

    If it finds the class of a family, of which the config's is a subclass, there is only a warning.

    Raises:
        ConfigError: a load would find another class, whose methods may differ.
    """
    names = _name(own), _name(loaded)
    # By name: a notebook may have defined the class again.
    if names[0] == names[1]:
        return
    if issubclass(loaded, DecoderConfig):
        logger.warning(
            "load_state will make a %s of the config, which is a %s: methods that it defines anew "
            "are lost (partition rules can be given as partition_rules=)",
            names[1],
            names[0],
        )
        return
    raise ConfigError(
        "load_state could not load this checkpoint",
        path=f"save_state: {model_class.__name__}",
        expected=f"a config class that is found again by its model_type; it finds {names[1]}",
        found=names[0],
        next_step="give the class a model_type of its own",
    )


def _name(kind: type[Any]) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _refuse_too_wide(model_class: type[Any], tree: Any) -> None:
    """Raise ConfigError if variables are Python or NumPy numbers whose dtypes JAX would change."""
    problems = too_wide(tree)
    if problems:
        raise ConfigError(
            "load_state could not load this checkpoint",
            path=f"save_state: {model_class.__name__}",
            expected="variables that are arrays of JAX, as a load builds them",
            found=f"{len(problems)} numbers or NumPy arrays that JAX holds in another dtype",
            next_step="make them arrays in the model, such as nnx.Variable(jnp.asarray(0))",
            problems=problems,
        )


def _attributes(model: Any) -> dict[str, Any]:
    """Return the plain attribute values of a model's modules, by path."""
    return {
        "/".join(map(str, (*path, name))): value
        for path, node in nnx.iter_graph(model)
        if isinstance(node, nnx.Module)
        for name, value in vars(node).items()
        if not name.startswith("_") and type(value) in (bool, int, float, str, type(None))
    }
