"""What holds for all tests.

What tests set up stands in layers; each of these modules says which it belongs to, and uses those before it.

  Ledger without consensus   tests/ledger/world.py decides what a test says; tests/ledger/snapshots.py adds blocks,
                             certificates and snapshots; tests/peer/chain.py adds real keys and a disk
  Consensus                  tests/consensus/bench.py and company.py have one replica, network.py several; what is agreed on is
                             tests/consensus/counter.py, and journal.py keeps it
  Nodes on virtual time      tests/peer/nodes.py is moved by a test, tests/sim by a plan of faults
  Daemons in one process     tests/peer/network.py
  Daemons in processes       tests/peer/processes.py; scenarios/network.py for scenarios
"""

from __future__ import annotations

import gc
import os

from hypothesis import settings

# Tests run side by side, a process for each core, and so do the peers of one test. With a thread for each core in each of them
# torch and numpy wait for one another most of the time. Tests that are about threads say how many.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# How long an example takes says how busy the machine is.
settings.register_profile("without deadlines", deadline=None)
settings.load_profile("without deadlines")

# Of what collecting makes nothing goes away before the end: looking for garbage meanwhile takes a third of its time.
gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()
