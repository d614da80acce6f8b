"""An inference engine in a process of its own, as a sampler: what the backends of such engines share. It is no backend.

On the side of the rank: `options`, `group` for the GPUs of several ranks, `process` for the engine's process, `sampler`
for the role, `rows` for what comes back. On the side of the engine, which may be in another environment and imports
nothing of meshrl but this package and its backend's: `worker`, the loop; `engine`, what a backend has to write for it;
`arrival`, `mapped`, `naming` and `tensors` for new weights. `messages` is what the two sides say to each other.
"""

__all__: list[str] = []
