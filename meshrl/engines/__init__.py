"""Where ranks run: threads of this process (`local`), processes of a cluster (`ray`). One protocol: `mesh.Engine`.

Import the engine that is meant: `meshrl.engines.local` or `meshrl.engines.ray`; this package itself loads neither.
"""

__all__: list[str] = []
