"""What holds for all tests."""

from __future__ import annotations

import os

# Tests run side by side, a process for each core, and so do the peers of one test. With a thread for each core in each of them
# torch and numpy wait for one another most of the time. Tests that are about threads say how many.
os.environ.setdefault("OMP_NUM_THREADS", "1")
