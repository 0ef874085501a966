"""The kernels' threads: in a forked process, where the system allows no more of them, and when
fewer of them are wanted than there are.

Each in a process of its own, whose threads are known. The bits of results are those of one thread.
"""

import subprocess
import sys

import pytest

from tests.support.paths import ROOT

BEGINNING = """
import os, resource, sys, time
import torch
from torch import nn
from model.devices.cpu.products import PackedLinear

linear = nn.Linear(768, 3072)
packed = PackedLinear(linear, torch.float32)
packed.allocate(torch.device("cpu"))
packed.set_rows(0, linear.weight.detach())
x = torch.randn(8, 768)
torch.set_num_threads(1)
expected = packed(x)
before = set(os.listdir("/proc/self/task"))

def computes(threads):
    torch.set_num_threads(threads)
    return all(torch.equal(packed(x), expected) for _ in range(200))

def started():
    return len(os.listdir("/proc/self/task")) - len(before)
"""

FORKED = """
assert computes(3)
time.sleep(0.01)  # The threads sleep, and have a lock or are waited for, or do not sleep yet.
child = os.fork()
if child == 0:
    before = set(os.listdir("/proc/self/task"))
    os._exit(0 if computes(3) and started() == 2 else 1)
assert os.waitpid(child, 0)[1] == 0 and computes(3)
"""

NO_MORE_THREADS = """
assert computes(2)
taken = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (taken + 40 * 2**20, resource.RLIM_INFINITY))
assert computes(64) and started() < 63
"""

FEWER_THREADS = """
def ticks():
    threads = {int(task): open(f"/proc/self/task/{task}/stat").read().rsplit(")", 1)[1].split() for task in os.listdir("/proc/self/task")}
    return sorted(int(fields[11]) + int(fields[12]) for task, fields in threads.items() if str(task) not in before)

assert computes(6) and started() == 5
time.sleep(0.05)
first, end = ticks(), time.monotonic() + 1
while time.monotonic() < end:
    assert computes(2)
grown = sorted(now - then for now, then in zip(ticks(), first))
assert 3 * grown[-2] < grown[-1], grown  # One works; the others may have waited a little for work.
"""  # noqa: E501


@pytest.mark.parametrize(
    "script",
    [FORKED, NO_MORE_THREADS, FEWER_THREADS],
    ids=["forked", "no more threads", "fewer threads"],
)
@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted in /proc")
def test_threads(script: str) -> None:
    subprocess.run([sys.executable, "-c", BEGINNING + script], cwd=ROOT, check=True, timeout=100)
