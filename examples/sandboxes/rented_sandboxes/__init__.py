"""Sandboxes of services that rent machines: a file for each service, on what they share in `shell.py`."""
