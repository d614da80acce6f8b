"""Ranks as processes of a Ray cluster."""

from meshrl.engines.ray.engine import RayEngine as RayEngine
