"""What runs in an engine's process, which may be in another environment and has no meshrl.

Its modules import only this package, the backend's, and `meshrl_torch.wire`, which reads a broadcast.
"""
