"""Types of the formulas: each takes numbers of one layout, or arrays with one element for each of many layouts."""

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]
Size = int | Ints
Real = float | Floats
