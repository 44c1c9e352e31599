"""Which build of cuda-python suits which GPU driver, and what to do when they do not fit.

Decided here: the words. This file imports neither.
"""


def version_problem(driver_version: int, bindings: str) -> str:
    """Why this build of cuda-python cannot be used with this driver, with what to do; or nothing.

    Args:
        driver_version: 12040 means 12.4.
        bindings: version of the package.
    """
    speaks, needs = driver_version // 1000, int(bindings.partition(".")[0])
    if speaks >= needs:
        return ""
    return (
        f"the GPU driver speaks CUDA {speaks}.{driver_version % 1000 // 10}, but cuda-python "
        f"{bindings} needs CUDA {needs}: install trikv[cu{speaks}] instead of trikv[cu{needs}]"
    )
