"""An inference engine in its own process, as a sampler: the common part of engine backends. It is not a backend.

On the rank's side: `options`, `memory` for its estimate, `group` for the GPUs of several ranks, `process` for the
engine's process, and `sampler` for the role. The folder `engine_side` runs in the engine's process.
"""

__all__: list[str] = []
