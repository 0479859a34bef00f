"""cerberus without the search for its own version, which costs `eagle3 check` more than all of its rules.

cerberus 1.3.8 calls importlib.metadata.version("Cerberus") when it is imported: that loads email, zipfile, socket and
others and lists the installed packages, some 20 of the 100 ms that a check takes. Nothing reads `cerberus.__version__`.
"""

from __future__ import annotations

import sys
from types import ModuleType

NAME = "importlib.metadata"


def _import_cerberus() -> ModuleType:
    """The module, with a stand-in for importlib.metadata while it is loaded, unless the real one is there already."""
    if NAME in sys.modules or "cerberus" in sys.modules:
        import cerberus

        return cerberus
    stand_in = ModuleType(NAME)
    stand_in.version = lambda _: "not looked up"  # type: ignore[attr-defined]
    stand_in.PackageNotFoundError = ImportError  # type: ignore[attr-defined]
    sys.modules[NAME] = stand_in
    try:
        import cerberus
    finally:
        del sys.modules[NAME]
    return cerberus


_cerberus = _import_cerberus()
TypeDefinition = _cerberus.TypeDefinition
Validator = _cerberus.Validator
