"""Every decision of the daemon, pure: no I/O, no tasks, no clock."""

import numpy.ma  # noqa: F401  # np.unique loads it when first used: 50 ms in the midst of a copy
