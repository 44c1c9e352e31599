"""Stands for a package that the processor cannot run."""

import os
import signal

if __name__ == "__main__":
    os.kill(os.getpid(), signal.SIGILL)
