"""The oldest torch that the SDK works with. Imported before what would fail on an older one in words of its own."""

import torch

from cordee.errors import MissingExtraError

TORCH_MIN = (2, 6)
_here = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
if _here < TORCH_MIN:
    wanted = ".".join(map(str, TORCH_MIN))
    raise MissingExtraError(
        f"the SDK needs torch {wanted} or newer, and this is {torch.__version__}", hint=f'pip install "torch>={wanted}"'
    )
