"""Read by each Python process whose path has this folder: torchvision without the operators of its builds for CUDA."""

import sys
import types

# It would raise: what it registers is not there beside a torch for CPUs.
sys.modules["torchvision._meta_registrations"] = types.ModuleType("torchvision._meta_registrations")
