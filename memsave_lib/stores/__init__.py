"""Where offloaded activations live: in the host's memory, or in a file.

A store takes a tensor's bytes and hands out a *deposit*, which alone can bring them back, and which gives the space
back when it is closed. Copies run beside the computation; a deposit says when the source may be let go, and waits where
it must. A store holds none of its deposits and needs no closing: it ends when the last of them and its user are gone.
"""

from memsave_lib.stores.base import Deposit, NullStore, Store, Trip
from memsave_lib.stores.disk import DiskStore
from memsave_lib.stores.host import HostStore

__all__ = ["Deposit", "DiskStore", "HostStore", "NullStore", "Store", "Trip", "open_store"]


def open_store(store: str | Store) -> Store:
    """The store that a strategy names."""
    if isinstance(store, Store):
        return store
    return {"host": HostStore, "disk": DiskStore}[store]()
