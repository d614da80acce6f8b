"""Engines: where ranks run."""
