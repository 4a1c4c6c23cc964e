"""Modules in the place of torch and transformers, with which the package for Python is imported for its docstrings and types
where neither is installed and the library is not built. Used by conf.py."""

import importlib.abc
import importlib.machinery
import os
import sys
import types

CLASSES = {"dtype", "device"}


class Anything(types.ModuleType):
    """A module whose names are classes, if they are written as such, and otherwise modules like this one."""

    __path__: list = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        if name[0].isupper() or name in CLASSES:
            made = type(name, (), {"__module__": self.__name__})
        else:
            made = sys.modules.setdefault(self.__name__ + "." + name, Anything(self.__name__ + "." + name))
        setattr(self, name, made)
        return made

    def __call__(self, *args, **given):
        return self

    def __contains__(self, item):
        return True


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports any module of these packages as a stand-in."""

    def find_spec(self, name, path=None, target=None):
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name.split(".")[0] in ("torch", "transformers") else None

    def create_module(self, spec):
        return Anything(spec.name)

    def exec_module(self, module):
        module.__version__ = {"torch": "2.11.0", "transformers": "5.0.0"}.get(module.__name__)


def install():
    sys.meta_path.insert(0, Finder())
    # The library counts as loaded (Anything contains it), so only a file has to exist.
    os.environ["ANNULUS_TORCH_LIBRARY"] = os.path.abspath(__file__)
