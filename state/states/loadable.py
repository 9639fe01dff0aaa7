"""Check that `load_state` could rebuild what is about to be saved; the first save makes it.

It refuses a state that no load could rebuild before anything is listed; otherwise only the first
restart would notice. Building the model takes a second or more: that part runs in the background.
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
"""Model class -> config and settings -> whether a load could build it, when that was last tried."""


def refuse_unloadable(
    state: Any, described: ModelDescription, tree: Any
) -> Callable[[], None] | None:
    """Raise if `load_state` would always refuse a checkpoint of this state, as far as a look tells.

    What a look can't tell, building the model without arrays does, as a load builds it; once per
    process for each class, config and settings. A TrainState loads modules without a config. A
    model may have other leaves than its config gives it: then the log says that a load needs more
    than the checkpoint. It may have other attributes, such as a dropout's rate: then the log says
    what a load will make of them.

    Args:
        state: an `EasyDeLState`.
        described: what is stored of its model.
        tree: its variables, or their leaves by path.

    Returns:
        A function that builds the model, and raises ConfigError if that fails. It holds no array,
        and any thread may call it, once. None if the model was built before, or is built here: an
        earlier failure may have been for lack of memory, and context such as a mesh may belong to
        one thread.

    Raises:
        ConfigError: no load could build the model, or it has variables that are no arrays of JAX,
            and can't become one.
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
    abstract = [_abstract(leaf) for leaf in leaves]
    del leaves

    def build() -> None:
        try:
            built = abstract_model(model_class, loaded, settings)
        except Exception as exc:  # of the model's own constructor, whatever it raises
            checked[key] = False
            raise _unloadable(model_class, exc) from exc
        checked[key] = True
        _warn_of_other(built, nnx.merge(graphdef, *jax.tree.unflatten(structure, abstract)))

    if key in checked or not _is_alike_elsewhere():
        build()
        return None
    return functools.partial(copy_context().run, build)


def _is_alike_elsewhere() -> bool:
    """Return whether JAX traces alike in another thread; if not, it traces again there.

    A mesh, or x64, may be set for one thread alone, and JAX does not list all such settings.
    """
    traced: list[None] = []
    probe = jax.jit(lambda: traced.append(None))
    jax.eval_shape(probe)
    other = threading.Thread(target=jax.eval_shape, args=(probe,))
    other.start()
    other.join()
    return len(traced) == 1


def _abstract(leaf: Any) -> Any:
    if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    return leaf


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
    """Warn where the model that a load builds differs from the one that is saved.

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
    """Refuse a config whose `model_type` a load resolves to another class, losing its methods.

    A family's `model_type` belongs to the family's own class; for a subclass of that the log warns.
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
    """Refuse Python and NumPy numbers whose dtypes JAX would change: no load could fit."""
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
