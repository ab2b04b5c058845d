"""The value of a metric, read without making the loop wait for its device.

A number on a GPU is known when the work queued before it is done. So it is copied into pinned memory in the order of
that work, and read once the copy has arrived: a step later, or some.
"""

from typing import Any

from cordee.errors import InputError


class Reading:
    """One value that the script logged.

    Args:
        name: of its metric, for messages.
        value: a number, or a tensor with one element, which may change afterwards.

    Raises:
        InputError: it is neither.
    """

    __slots__ = ("_arrived", "_number", "_tensor")

    def __init__(self, name: str, value: Any) -> None:
        self._number: float | None = None
        self._tensor: Any = None
        self._arrived: Any = None
        if hasattr(value, "detach") and hasattr(value, "numel"):
            if value.numel() != 1:
                raise InputError(
                    f"the metric {name!r} has {value.numel()} values", hint="log one: its mean, for example"
                )
            self._take(value.detach())
            return
        try:
            self._number = float(value)
        except (TypeError, ValueError):
            raise InputError(f"the metric {name!r} is {value!r}, not a number", hint="log numbers only") from None

    def _take(self, tensor: Any) -> None:
        kind = tensor.device.type
        if kind == "cpu":
            self._number = float(tensor)
        elif kind == "cuda":
            import torch

            self._tensor = torch.empty((), dtype=tensor.dtype, pin_memory=True)
            self._tensor.copy_(tensor.reshape(()), non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record(torch.cuda.current_stream(tensor.device))
        else:
            self._tensor = tensor.clone()  # read when somebody asks for it, which may wait for the device

    def is_ready(self) -> bool:
        """Return whether `number` does not wait.

        Raises:
            RuntimeError: the device has failed.
        """
        return self._number is not None or (self._arrived is not None and bool(self._arrived.query()))

    def number(self) -> float:
        """Return the value; wait for its device if need be.

        Raises:
            RuntimeError: the device has failed.
        """
        if self._number is None:
            if self._arrived is not None:
                self._arrived.synchronize()
            self._number = float(self._tensor)
            self._tensor = self._arrived = None
        return self._number
