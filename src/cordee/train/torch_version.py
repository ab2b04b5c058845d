"""The oldest torch that the SDK works with, and substitutes for what that one does not have yet.

Imported first, so that an older torch is refused with a clear message.
"""

from typing import Any

import torch
import torch.distributed as dist

from cordee.errors import MissingExtraError

TORCH_MIN = (2, 6)
_here = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
if _here < TORCH_MIN:
    wanted = ".".join(map(str, TORCH_MIN))
    raise MissingExtraError(
        f"the SDK needs torch {wanted} or newer, and this is {torch.__version__}", hint=f'pip install "torch>={wanted}"'
    )


def clone_of(store: Any) -> Any:
    """Return another client of the same store, since one that waits blocks all other calls of its client.

    Where torch has no `clone`, the client is without the prefixes around the store: use clones only, on all ranks.
    """
    if hasattr(store, "clone"):
        return store.clone()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return dist.TCPStore(store.host, store.port, is_master=False, wait_for_workers=False, timeout=store.timeout)
