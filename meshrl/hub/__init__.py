"""Models and datasets of the Hugging Face hub: resolve names, download files, and upload models.

Cached files are read without a network. The library's settings apply: HF_HOME, HF_ENDPOINT, HF_HUB_OFFLINE, HF_TOKEN.
"""

from meshrl.hub.datasets import dataset_rows
from meshrl.hub.repository import HUB_ID, Kind, Repository, create, download, pinned

__all__ = ["HUB_ID", "Kind", "Repository", "create", "dataset_rows", "download", "pinned"]
