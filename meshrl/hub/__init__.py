"""Models and data of the Hugging Face hub, by name: what a name means now, its files, and how to push your own.

What is cached is read without a network. The library's settings apply: HF_HOME, HF_ENDPOINT, HF_HUB_OFFLINE, HF_TOKEN.
"""

from meshrl.hub.datasets import dataset_rows
from meshrl.hub.repository import HUB_ID, Kind, Repository, create, download, pinned

__all__ = ["HUB_ID", "Kind", "Repository", "create", "dataset_rows", "download", "pinned"]
