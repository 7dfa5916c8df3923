"""Stand-in for torchvision, which vLLM imports for models with images, but a text-only engine never calls."""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import NoReturn

_MODULES = (
    "torchvision",
    "torchvision.io",
    "torchvision.ops",
    "torchvision.ops.boxes",
    "torchvision.transforms",
    "torchvision.transforms.functional",
    "torchvision.transforms.v2",
    "torchvision.transforms.v2.functional",
)
_MESSAGE = (
    "an image reached torchvision, which is not installed: llmrl starts engines for text alone and trains on text. "
    "Remove the image from the messages."
)


def _make_name(_: object, name: str) -> type:
    if name.startswith("__"):
        raise AttributeError(name)
    return _Absent(name, (), {})


class _Absent(type):
    """Type of the stand-in's names, which can be imported, compared and subclassed; calling them raises ImportError."""

    __getattr__ = _make_name

    def __call__(cls, *args: object, **kwargs: object) -> NoReturn:
        raise ImportError(_MESSAGE)


class _StandIn(ModuleType):
    __version__ = "0"
    __getattr__ = _make_name


def stand_in_for_torchvision() -> bool:
    """Make `import torchvision` succeed where it is not installed; return whether the stand-in is used.

    transformers still reports torchvision as missing, and uses processors that do not need it. May be called again.
    """
    if "torchvision" in sys.modules:
        return isinstance(sys.modules["torchvision"], _StandIn)
    if importlib.util.find_spec("torchvision") is not None:
        return False
    from transformers.utils import import_utils

    # These functions cache their first result, so they must run before the stand-in is there.
    import_utils.is_torchvision_available()
    import_utils.is_torchvision_v2_available()
    for name in _MODULES:
        module = sys.modules[name] = _StandIn(name)
        module.__spec__ = ModuleSpec(name, None, is_package=True)
        module.__path__ = []
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
    return True
