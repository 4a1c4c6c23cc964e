"""Modules in the place of torch and transformers, with which the package for Python is imported for its docstrings and types
where neither is installed and the library is not built. Used by conf.py."""

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
            made = Anything(self.__name__ + "." + name)
            sys.modules[made.__name__] = made
        setattr(self, name, made)
        return made

    def __call__(self, *args, **given):
        return self

    def __contains__(self, item):
        return True


def install():
    for name in ("torch", "torch.distributed", "torch.distributed.device_mesh", "torch.utils", "torch.overrides", "torch.nn",
                 "torch.nn.functional", "transformers", "transformers.masking_utils", "transformers.integrations"):
        module = sys.modules[name] = Anything(name)
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], last, module)
    sys.modules["torch"].__version__ = "2.11.0"
    sys.modules["transformers"].__version__ = "5.0.0"
    # The library counts as loaded (Anything contains it), so only a file has to exist.
    os.environ["ANNULUS_TORCH_LIBRARY"] = os.path.abspath(__file__)
