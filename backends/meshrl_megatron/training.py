"""One optimizer step of a whole batch through the pipeline, for all that is trained."""

from collections.abc import Callable

from meshrl.data import Batch, Metrics
from meshrl.losses import Loss
from meshrl_hf.training import prepared, stepped
from meshrl_megatron.optimizer import Trained
from meshrl_megatron.passes import Pipeline
from meshrl_megatron.world import World


def step(
    trained: Trained,
    pipeline: Pipeline,
    batch: Batch,
    loss: Loss,
    budget: int,
    check: Callable[[], object],
    world: World,
) -> Metrics:
    """One step on the rows of all ranks, in micro-batches of at most `budget` tokens; as `meshrl_hf.training.step`."""
    ready = prepared(batch, loss, budget, check, world, pipeline.split)
    judge = ready.judge
    trained.forget()
    pipeline.train(batch, ready.micros, lambda said, micro: judge(said, micro, world))
    told = world.agree(judge.told)  # where the loss has raised, all raise
    judge.total, judge.sums = told[world.last]
    return stepped(trained, judge, batch, world)
