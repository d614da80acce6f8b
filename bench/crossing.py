"""What a step crosses: functions and files of meshrl that run in all processes during one call.

    python bench/crossing.py --json F [--rounds N] [--peer FOLDER] [--list]

One `anext` of a stream, one `update` and one `publish`, on the engine `processes` with FSDP on 2 ranks and a sampler on
one, after two steps that are not counted. A profile function notes each function of the product once a call, in each
thread of the controller and the ranks. Those that ran in each round count, so timers that happened to fire do not.
`--peer`: a checkout of another commit with its environment, `make setup`, to compare with. `--list` prints the
functions, by file. The figures do not depend on the machine's speed.
"""

import os
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Final

from bench.harness import ROOT, arguments, figure, report, within

CALLS: Final = ("anext", "update", "publish")
TARGET: Final = 2 / 3
"""Of the peer's."""
_PROFILE: Final = """
import mmap, os, sys, threading

_now = mmap.mmap(os.open(os.environ["CROSSING"] + "/call", os.O_RDONLY), 1, prot=mmap.PROT_READ)
_seen, _file = set(), None

def note(frame, event, _):
    global _file
    code, call = frame.f_code, _now[0]
    if not call or event != "call" or (call, code) in _seen or "/meshrl" not in code.co_filename:
        return
    _seen.add((call, code))
    if _file is None or _file[0] != os.getpid():
        _file = os.getpid(), os.open(f"{os.environ['CROSSING']}/{os.getpid()}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(_file[1], f"{call}\\t{code.co_filename}\\t{code.co_qualname}\\n".encode())

threading.setprofile(note)
sys.setprofile(note)
"""
"""What each process runs when it starts."""
_SCRIPT: Final = """
import asyncio, mmap, os
import meshrl as rl

now = mmap.mmap(os.open(os.environ["CROSSING"] + "/call", os.O_RDWR), 1)

async def counted(number, work):
    now[0] = number
    try:
        return await work
    finally:
        now[0] = 0

async def main():
    rows = [{"question": f"{number}+1=", "answer": str(number + 1)} for number in range(64)]
    task = rl.Task.of(rows, held_out=0)
    model = {"characters": "0123456789+=", "layers": 1, "hidden_size": 32, "heads": 2, "ffn_size": 32, "max_tokens": 16}
    meshes = {"policy": {"ranks": 2}, "main": {"ranks": 1}}
    async with rl.Run(rl.RunConfig(name="crossing", engine="processes", meshes=meshes)) as run:
        table = {"model": model, "seed": 0}
        policy = await run.spawn(rl.Policy, rl.PolicyConfig(backend="fsdp", mesh="policy", **table))
        sampler = await run.spawn(rl.Sampler, rl.SamplerConfig(**table))
        reward = await run.spawn(rl.Reward, rl.RewardConfig(function="exact_match"))
        await rl.publish(policy, sampler)
        sampling = rl.Sampling(n=4, max_tokens=4)
        async with rl.rollouts(sampler, task.batches(4, 0), sampling, score=reward.score) as stream:
            for last in (False, False, True):
                call = counted if last else lambda _, work: work
                batch = await call(1, anext(stream))
                batch = await batch.load("rewards", "groups", "loss_mask")
                batch = batch.assign(advantages=rl.group_advantages(batch.rewards, batch.groups))
                await call(2, policy.update(batch, rl.ClippedLoss(clip=0.2)))
                await call(3, rl.publish(policy, stream))

if __name__ == "__main__":
    asyncio.run(main())
"""


def crossed(source: Path, rounds: int) -> dict[str, set[tuple[str, str]]]:
    """Return the functions that run in each call of each round, by file and name."""
    first, *others = [_crossed_once(source.resolve()) for _ in range(rounds)]
    return {call: found.intersection(*(other[call] for other in others)) for call, found in first.items()}


def _crossed_once(source: Path) -> dict[str, set[tuple[str, str]]]:
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        (place / "sitecustomize.py").write_text(_PROFILE)
        (place / "script.py").write_text(_SCRIPT)
        (place / "call").write_bytes(b"\0")
        (place / "runs").mkdir()
        environment = {**os.environ, "PYTHONPATH": folder, "CROSSING": folder}
        subprocess.run([source / ".venv/bin/python", place / "script.py"], cwd=folder, env=environment, check=True)
        found: dict[str, set[tuple[str, str]]] = {call: set() for call in CALLS}
        for call, file, name in _noted(place):
            path = Path(file)
            if path.is_relative_to(source) and "<" not in name.rpartition(".")[2]:
                found[CALLS[call - 1]].add((str(path.relative_to(source)), name))
        return found


def _noted(place: Path) -> Iterator[tuple[int, str, str]]:
    for file in place.glob("[0-9]*"):
        for line in file.read_text().splitlines():
            call, path, name = line.split("\t")
            yield int(call), path, name


def counts(found: Mapping[str, set[tuple[str, str]]]) -> dict[str, int]:
    """Count the functions and the files of each call."""
    return {
        f"{call}: {what}": len(parts if what == "functions" else {file for file, _ in parts})
        for call, parts in found.items()
        for what in ("functions", "files")
    }


def main() -> None:
    parser = arguments(__doc__, rounds=3)
    parser.add_argument("--peer", type=Path, help="a checkout to compare with")
    parser.add_argument("--list", action="store_true", help="print the functions of each call, by file")
    told = parser.parse_args()
    found = crossed(ROOT, told.rounds)
    if told.list:
        for call, parts in found.items():
            for file, names in groupby(sorted(parts), key=itemgetter(0)):
                print(f"{call}  {file}: {', '.join(name for _, name in names)}")
    own, peer = counts(found), counts(crossed(told.peer, told.rounds)) if told.peer else {}
    figures = [
        within(name, count, "", peer[name], TARGET) if peer else figure(name, count, "") for name, count in own.items()
    ]
    report("crossing", figures, told.json)


if __name__ == "__main__":
    main()
