"""Read by each Python process with this folder on its path: torchvision without operators of its CUDA builds."""

import sys
import types

# It would raise, because torch for CPUs lacks what it registers.
sys.modules["torchvision._meta_registrations"] = types.ModuleType("torchvision._meta_registrations")
