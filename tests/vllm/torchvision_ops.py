"""Lets the torchvision of the package index, built for CUDA, be imported beside a torch for CPUs.

Its Python side registers fake kernels for two operators that its C++ library defines, and that library cannot be
loaded here: so their schemas are defined first. What the image processors use of torchvision is plain torch.
``make_venv.sh`` has every interpreter of the environment import this first.
"""

import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec

_OPERATORS = ("nms", "qnms")


class _DefineOperators(MetaPathFinder):
    """Finds nothing; defines the operators when torchvision is looked for."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if fullname == "torchvision":
            sys.meta_path.remove(self)
            import torch  # noqa: PLC0415 - it takes seconds, and most interpreters do without torchvision

            self.library = torch.library.Library("torchvision", "DEF")
            for name in _OPERATORS:
                self.library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return None


_finder = _DefineOperators()  # the library's definitions end with it
sys.meta_path.insert(0, _finder)
