"""NCCL without one of its processes: the rest gives the broadcast up, lives on, and makes new groups."""

import subprocess
import sys
from pathlib import Path

SENDER = """
import sys, time
from datetime import timedelta
import torch
import torch.distributed as dist
from meshrl_torch.wire import collective
from meshrl_torch.wire.collective import Groups, InFlightBuckets
from meshrl_torch.wire.plan import BroadcastPlan

collective.STUCK = timedelta(seconds=2)
me, file = int(sys.argv[1]), sys.argv[2]
device = torch.device("cuda", me)
torch.cuda.set_device(device)
store = dist.FileStore(file, 2)
groups, content = Groups(), torch.full((1024,), 7 * (1 - me), dtype=torch.uint8, device=device)


def broadcast(name):
    plan = BroadcastPlan(name, ["reader"], True, [[]], [])
    flight = InFlightBuckets()
    flight.begin(1024, device)
    flight.add(groups.get(store, plan, 0, ["0", "reader"][me], device).broadcast(content, 0))
    flight.end()


broadcast("first")
assert (content == 7).all()
if me:
    sys.exit()  # the reader is gone
try:
    broadcast("first")
except RuntimeError as error:
    print(error)
groups.drop("first")
time.sleep(8)  # torch's watchdog would have ended this process by now
print("alive")
"""


def test_a_sender_outlives_its_readers(tmp_path: Path) -> None:
    script, file = tmp_path / "sender.py", str(tmp_path / "store")
    script.write_text(SENDER)
    both = [
        subprocess.Popen([sys.executable, script, str(me), file], stdout=subprocess.PIPE, text=True) for me in (0, 1)
    ]
    told = [each.communicate(timeout=500)[0] for each in both]
    assert both[1].returncode == 0
    assert told[0].splitlines() == ["a broadcast by NCCL was stuck for 2 s: a process has ended", "alive"]
