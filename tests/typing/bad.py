"""Mistakes. Both checkers report each line marked `# E`, and no other."""

from meshrl import Actor, Batch, Gather, Mean, Mesh, Metrics, Shard, Sum, at, each, endpoint, ranks, stop

from .good import PlainTrainer, Trainer


class Faster(PlainTrainer):
    speed: float = 2.0


class Drifts(Trainer):
    async def update(self, batch: Batch, rate: str = "fast") -> Metrics:  # E
        return Metrics.of(loss=(len(rate), len(batch)))

    async def rows(self, batch: Batch) -> Metrics:  # E
        return Metrics.of(loss=(1.0, len(batch)))


class Marks(Actor):
    @endpoint
    async def number(self, count: Shard[int]) -> None: ...  # E

    @endpoint
    async def text(self, words: Shard[str]) -> None: ...  # E

    @endpoint
    async def undefined(self, batch: Shard[Batch, XP]) -> None: ...  # E

    @endpoint
    async def no_axis(self, batch: Shard[Batch, int]) -> None: ...  # E

    @endpoint
    async def join(self) -> Gather[int]:  # E
        return 1

    @endpoint
    async def average(self) -> Mean[str]:  # E
        return ""

    @endpoint
    async def total(self) -> Sum[object]:  # E
        return object()

    @endpoint
    async def wrong(self, batch: Shard[Batch]) -> Gather[Batch]:
        return len(batch)  # E


async def calls(trainer: Trainer, batch: Batch) -> None:
    await trainer.update("batch")  # E
    await trainer.update()  # E
    await trainer.update(batch, 1.0, 2.0)  # E
    await trainer.update(batch, ratio=2.0)  # E
    await trainer.update(batch, rate="2")  # E
    await trainer.updaet(batch)  # E
    trainer.update(batch)  # E
    metrics: Metrics = trainer.update(batch)  # E
    text: str = await trainer.update(batch)  # E
    (await trainer.update(batch)).no_such_thing  # E
    print(metrics, text)


async def constructors(mesh: Mesh) -> None:
    await mesh.spawn(PlainTrainer, "2.0")  # E
    await mesh.spawn(PlainTrainer)  # E
    await mesh.spawn(PlainTrainer, 2.0, nmae="x")  # E
    await mesh.spawn(PlainTrainer, 2.0, name=3)  # E
    other: Marks = await mesh.spawn(PlainTrainer, 2.0)  # E
    print(other)


async def roles(mesh: Mesh) -> None:
    trainer: Trainer = await mesh.spawn(Faster, 2.0)
    (await mesh.spawn(Faster, 2.0)).speed.is_integer()

    def role() -> Trainer:
        return trainer

    role().speed.is_integer()  # E


async def streams(trainer: Trainer, batch: Batch) -> None:
    async for rows in trainer.rows(batch):
        rows.lost()  # E
    async for rows in trainer.rows(3):  # E
        print(rows)
    for _ in trainer.rows(batch):  # E
        pass
    await trainer.rows(batch)  # E


async def functions(trainer: Trainer, batch: Batch) -> None:
    one: Metrics = await each(trainer.update)(batch)  # E
    await each(trainer.update)("batch")  # E
    await each(trainer.updaet)(batch)  # E
    await at(trainer, dp=0).update("batch")  # E
    await at(trainer, dp="first").update(batch)  # E
    ranks(trainer)[0].indx  # E
    stop(trainer)  # E
    print(one)
