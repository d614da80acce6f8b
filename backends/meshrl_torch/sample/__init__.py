"""Sampling on one rank: continuous batching over a cache of slots."""
