"""Types of arrays, and of formulas that take numbers of one layout or arrays with one element for each of many."""

from typing import cast

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]
Size = int | Ints
Real = float | Floats


def only_where(condition: bool | Mask, amount: Real) -> Real:
    """Return the amount where the condition holds, and 0 elsewhere.

    >>> only_where(False, 3.0), only_where(np.array([True, False]), 3.0).tolist()
    (0.0, [3.0, 0.0])
    """
    return cast(Real, condition * amount)
