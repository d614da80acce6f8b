from bench.algorithms import budget, completions, config, pages, seeds
from meshrl.events import Call, Event, Step
from meshrl.run import find_config, load_job


def overrides(name: str) -> list[str]:
    return [*budget(name, config(name), 40), *seeds(3)]


def test_a_budget_of_512_completions_fits_each_page() -> None:
    for name in pages(None):
        job = load_job(find_config(f"{name}/quickstart"), overrides(name))
        assert (vars(job.config)["steps"], job.run.seed) == (40, 3), name
    budgets = {
        "grpo": "prompts=64",
        "reinforce": "prompts=512",
        "remax": "prompts=256",
        "dpo": "rows=256",
        "kto": "rows=512",
        "multiturn": "prompts=32",  # 8 episodes each, of at most 2 turns
    }
    assert [name for name, budget in budgets.items() if budget not in overrides(name)] == []
    # No page evaluates beside its training, and learning rates fall to 0 at the last update.
    assert {"evaluation={every=1000000, rows=1, n=1}", "policy.optimizer.total_steps=40"} <= {*overrides("grpo")}
    assert not any(each.startswith("evaluation") for each in overrides("rloo"))
    assert {"policy.optimizer.total_steps=80", "critic.optimizer.warmup_steps=8"} <= {*overrides("ppo")}


def test_completions_are_counted_within_the_steps() -> None:
    events: list[Event] = [
        Call(1, "TorchSampler", "generate", 0.0, 0.5, rows=512),  # an evaluation
        Call(2, "TorchSampler", "generate", 1.0, 2.0, rows=64),
        Call(3, "TorchPolicy", "update", 2.0, 3.0, rows=500),
        Call(4, "TorchCritic", "update", 2.0, 3.0, rows=500),
        Step(0, 1.0, 3.0),
        Call(5, "TorchSampler", "generate", 3.0, 4.0, rows=64),
        Call(6, "TorchSampler", "generate", 3.0, 4.0, rows=64, error="RankFailed"),
        Step(1, 3.0, 5.0),
        Call(7, "TorchSampler", "generate", 6.0, 7.0, rows=512),
    ]
    assert completions(events, 8) == (1024, 500, 1)
    assert completions([], 8) == (0, 0, 0)
