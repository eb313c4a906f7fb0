"""Lets vLLM's CPU wheel run what it cannot by itself, for tests alone: nothing of this is in the package.

Python imports this module at the start of every process that has this folder on its path. The environment variable
``ECOTONE_TEST_PATCHES`` names the modules of this folder to apply, e.g. ``v2_runner,ray_on_cpu``. Each of them has
``AFTER_IMPORT``: name of a module -> what is done with it as soon as it has been imported.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

Patch = Callable[[Any], None]


class _PatchingLoader(Loader):
    """Another loader, and what comes after it."""

    def __init__(self, loader: Any, patches: Sequence[Patch]) -> None:
        self._loader = loader
        self._patches = patches

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        for patch in self._patches:
            patch(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


class _Finder(MetaPathFinder):
    """Finds the patched modules with the finders behind it."""

    def __init__(self) -> None:
        self.patches: dict[str, list[Patch]] = {}

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        patches = self.patches.pop(fullname, None)
        if patches is None:
            return None
        spec = find_spec(fullname)
        if spec is not None:
            spec.loader = _PatchingLoader(spec.loader, patches)
        return spec


_names = [name for name in os.environ.get("ECOTONE_TEST_PATCHES", "").split(",") if name]
if _names:
    _finder = _Finder()
    for _name in _names:
        for _module, _patch in import_module(_name).AFTER_IMPORT.items():
            _finder.patches.setdefault(_module, []).append(_patch)
    sys.meta_path.insert(0, _finder)
