"""Settings of all tests.

Test fixtures form layers. Each of these modules names its layer, and uses only the layers before it.

  Ledger without consensus   tests/ledger/world.py decides a test's contents; tests/ledger/snapshots.py adds blocks,
                             certificates and snapshots; tests/peer/chain.py adds real keys and a disk
  Consensus                  tests/consensus/bench.py and company.py have one replica, network.py several; they agree on
                             tests/consensus/counter.py, and journal.py stores it
  Nodes on virtual time      tests/peer/nodes.py is driven by a test, tests/sim by a plan of faults
  Daemons in one process     tests/peer/network.py
  Daemons in processes       tests/peer/processes.py; scenarios/network.py for scenarios
"""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Generator

import pytest
from hypothesis import settings

from tests import rings
from tests.waiting import ended_in_patience

# Tests run in parallel, one process for each core, and so do the peers of one test. If each had a thread for each core, torch and
# numpy would mostly wait for one another. Tests about threads set their number.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # waiting threads yield the CPU to other processes

# Examples have no deadline, because their time depends on the load of the machine. They are the same each time, so that a new
# failure has its cause in the change; `make fuzz` draws others.
settings.register_profile("same", deadline=None, derandomize=True)
settings.register_profile("others", deadline=None)
settings.load_profile("same")

# Collection creates no garbage, and searching for it takes a third of the time.
gc.disable()


@pytest.hookimpl(tryfirst=True, wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, bool, bool]:
    with rings.enforced(item):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    yield
    if rings.broken():
        pytest.fail(f"the code under test survived {', '.join(rings.broken())}, which its ring forbids")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(call: pytest.CallInfo[None]) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if call.excinfo is not None:
        report.user_properties.append(("patience", ended_in_patience(call.excinfo.value)))
    return report


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Write each failure as a line for `tests/run.py`, in the process that has all reports."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ and (path := os.environ.get("TEST_OUTCOMES")):
        with open(path, "a") as file:
            print(json.dumps({"test": report.nodeid, "patience": dict(report.user_properties).get("patience", False)}), file=file)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    rings.mark(items)


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)  # as in a running peer: `tune_garbage_collector`
    gc.enable()
