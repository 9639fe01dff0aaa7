"""The trees of errors that are drawn in docstrings are those of the classes: who catches a base
class, or a built-in one, catches what is drawn below it."""

import builtins
import inspect
import re

import pytest

import cairn.interop.errors
import cairn.service.errors
import cairn.service.jobs.errors
import cairn.state.errors
import cairn.storage.errors

MODULES = {
    module.__name__: module
    for module in (
        cairn.storage.errors,
        cairn.interop.errors,
        cairn.state.errors,
        cairn.service.errors,
        cairn.service.jobs.errors,
    )
}
CLASSES = {
    name: kind
    for module in MODULES.values()
    for name, kind in inspect.getmembers(module, inspect.isclass)
    if issubclass(kind, Exception)
}
LINE = re.compile(r"^(?P<branches>[│├└─ ]*)(?P<name>[A-Z]\w+)(?: +\((?P<beside>[^)]*)\))?")


def drawn(module):
    """The name, the parent and the words in parentheses of each line of a module's tree."""
    path = []
    for line in module.__doc__.splitlines():
        if (match := LINE.match(line)) and match["name"].endswith("Error"):
            depth = len(match["branches"]) // 4
            path[depth:] = [match["name"]]
            yield match["name"], path[depth - 1] if depth else None, match["beside"] or ""


@pytest.mark.parametrize("name", MODULES)
def test_classes_derive_as_the_tree_is_drawn(name):
    lines = list(drawn(MODULES[name]))
    assert len(lines) > 4
    wrong = []
    for kind, parent, beside in lines:
        bases = [CLASSES[parent]] if parent else []
        bases += [getattr(builtins, word) for word in re.findall(r"\b[A-Z]\w+Error\b", beside)
                  if hasattr(builtins, word)]  # fmt: skip
        wrong += [(kind, base.__name__) for base in bases if not issubclass(CLASSES[kind], base)]
    assert wrong == []


@pytest.mark.parametrize("name", MODULES)
def test_every_class_is_drawn_once(name):
    own = {kind for kind, value in CLASSES.items() if value.__module__ == name}
    lines = [kind for kind, _, _ in drawn(MODULES[name])]
    assert own <= set(lines)
    assert len(lines) == len(set(lines))
