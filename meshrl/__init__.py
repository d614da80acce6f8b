"""meshrl: reinforcement learning of language models on typed actor meshes.

The names are those of `__init__.pyi`. Each is imported with its room when it is first used, so ranks and scripts load
only what they need.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
