"""`python -m meshrl.testing FILE.py:SCENARIO --seed 1234`: explore a scenario, or replay one seed exactly."""

import argparse

from meshrl.testing.explorer import explore, load_scenario, replay


def main() -> None:
    """Run a scenario under one seed, which shows an exception unchanged, or under many seeds."""
    parser = argparse.ArgumentParser(prog="python -m meshrl.testing", description="Run a scenario in virtual time.")
    parser.add_argument("scenario", help="FILE.py:NAME or MODULE:NAME of an `async def scenario(seed)`")
    parser.add_argument("--seed", type=int, help="replay this seed")
    parser.add_argument("--seeds", type=int, default=10_000, help="number of seeds to explore (10000)")
    parser.add_argument("--workers", type=int, default=1, help="number of processes (1)")
    parser.add_argument("--time-limit", type=float, help="virtual seconds")
    options = parser.parse_args()
    scenario = load_scenario(options.scenario)
    if options.seed is None:
        explore(scenario, options.seeds, workers=options.workers, time_limit=options.time_limit)
        done = f"{options.seeds} seeds"
    else:
        replay(scenario, options.seed, time_limit=options.time_limit)
        done = f"seed {options.seed}"
    print(f"{options.scenario} holds under {done}")  # noqa: T201 -- a command line


if __name__ == "__main__":
    main()
