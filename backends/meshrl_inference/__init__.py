"""An inference engine in its own process, as a sampler: the common part of engine backends. It is not a backend.

On the rank's side: `options`, `group` for the GPUs of several ranks, `process` for the engine's process, `sampler` for
the role, and `rows` for results. On the engine's side, which may be in another environment and imports only this
package, its backend's, and `meshrl_torch.wire`, which reads a broadcast: `worker` is the loop, `engine` is the
interface for a backend, and `arrival`, `assembly`, `mapped`, `naming` and `tensors` handle new weights. `messages` are
exchanged between the two sides.
"""

__all__: list[str] = []
