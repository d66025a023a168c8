"""Lets the package index's torchvision be imported beside a CPU torch; its folder is on the path.

That build is one for CUDA, so its compiled operators cannot be loaded. It copes, but for one module
that registers them with torch. Transforms, all that processors of media use, are plain Python.
"""

from __future__ import annotations

import sys
import types

NAME = "torchvision._meta_registrations"

sys.modules[NAME] = types.ModuleType(NAME)
