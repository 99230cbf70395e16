"""Where models live on this machine (docs/spec/clients.md 1.9)."""

from mlxcel.store.hub_name import HubName
from mlxcel.store.lock import FileLock
from mlxcel.store.record import StoredFile, StoredModel
from mlxcel.store.root import store_root
from mlxcel.store.store import ModelStore

__all__ = ["FileLock", "HubName", "ModelStore", "StoredFile", "StoredModel", "store_root"]
