"""Old modules and names that have moved. Each works until version `GOES`, with a DeprecationWarning.

`import meshrl` installs them. Nothing is loaded until an old module is imported. docs/stability.md has the policy.
"""

import sys
import warnings
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Final, cast

if TYPE_CHECKING:
    from importlib.abc import Loader  # as a base class it would make the import of meshrl slower

__all__ = ["GOES", "MOVED", "RENAMED", "add_old_names", "install", "old_names"]

GOES: Final = "0.2"
"""The version that removes them all."""

MOVED: Final = {
    "actor": "mesh.actor",
    "advantages": "objectives.advantages",
    "assembly": "rollout.grouping",
    "balance": "rollout.routing",
    "beside": "run.periodic",
    "bucket": "weights.bucket",
    "calls": "roles.generate_calls",
    "changes": "rollout.condition",
    "check": "run.check",
    "checkpoints": "run.checkpoints",
    "columns": "data.columns data.wire",
    "contract": "mesh.contract mesh.marks",
    "critic": "objectives.advantages",
    "delta": "weights.delta",
    "engine": "mesh.engine",
    "engines.loop": "engines.local.event_loop",
    "engines.ray.order": "engines.hosting.call_order",
    "engines.ray.pickle": "engines.hosting.pickling",
    "engines.threads": "engines.local.rank_thread engines.local.refs engines.isolation",
    "engines.turns": "engines.local.shared_task",
    "environment": "environments.environment",
    "episodes": "environments.episodes",
    "estimates": "evaluation.estimates",
    "generation": "rollout.producer",
    "handle": "mesh.handle mesh.parts",
    "held": "mesh.refs",
    "imports": "user_code",
    "judging": "evaluation.judge",
    "layout": "roles.config meshrl_fsdp.options meshrl_megatron.options meshrl_vllm.options",
    "ledger": "rollout.staleness",
    "losses.loss": "losses.base",
    "losses.sources": "losses.provenance_check",
    "losses.surrogate": "losses.clipped",
    "metrics": "data.metrics",
    # Not `minibatches`: importing it would replace the function `meshrl.minibatches` by a module.
    "observation": "mesh.call_events",
    "position": "tasks.cursor",
    "preferences": "objectives.preferences tasks.pairs roles.sampling deprecated.passes",
    "progress": "run.progress",
    "prompts": "rollout.prompt_queue",
    "ragged": "data.ragged data.provenance",
    "recorder": "run.recorder",
    "reference_kl": "objectives.reference_kl",
    "registry": "roles.registry",
    "remote": "data.remote_column",
    "role_config": "roles.config roles.sampling run.algorithm_config",
    "rows": "mesh.scatter mesh.partition",
    "sandbox": "rewards.sandbox",
    "sandboxed": "rewards.sandbox_worker",
    "schedule": "rollout.replay",
    "scores": "objectives.reward_scores tasks.steps deprecated.passes",
    "scripts": "run.jobs run.new",
    "serve": "run.serving run.artifacts roles.server",
    "sharding": "mesh.sharding",
    "shared_memory": "mesh.shared_memory",
    "stream": "rollout.stream",
    "table": "data.column_ops",
    "teacher": "roles.tokens",
    "testing.clock": "simulation.clock",
    "testing.forecast": "simulation.forecast",
    "testing.latency": "simulation.latency",
    "testing.pace": "simulation.pace",
    "testing.sim": "simulation.backend",
    "testing.standing": "simulation.wait_graph",
    "testing.state": "simulation.json_state",
    "verifiers": "tasks.verifiers",
}
"""Old modules, and the modules that have their names now, searched in this order."""

RENAMED: Final = {
    "actor": {"Together": "CollectiveActor"},
    "assembly": {"Assembly": "GroupBuffer"},
    "balance": {"Balance": "Router"},
    "beside": {"Beside": "BackgroundMeasurements"},
    "calls": {"Call": "GenerateCall", "Calls": "GenerateCalls"},
    "changes": {"Changes": "Condition"},
    "delta": {"Chain": "DeltaChain", "Version": "DeltaVersion", "Sender": "WeightSource", "ChainHeld": "DeltaRef"},
    "engine": {"Seen": "OnSpan"},
    "engines.ray.order": {"Line": "CallerQueue"},
    "engines.threads": {"LocalHeld": "LocalRef"},
    "environment": {"Game": "EnvironmentInstance"},
    "generation": {"Call": "GenerateRequest", "Generation": "Producer", "Shared": "StreamState"},
    "handle": {"divided": "routed"},
    "held": {
        "Held": "Ref",
        "Holder": "HasRefs",
        "Later": "ArrayRef",
        "hold": "put_large",
        "loaded": "resolve",
        "fetched": "fetch",
    },
    "ledger": {"Ledger": "StalenessLedger"},
    "losses.loss": {"OfRows": "SequenceNormalised", "Penalised": "WithKl"},
    "position": {
        "Position": "DataCursor",
        "Ranges": "IntervalSet",
        "Reached": "CursorState",
        "position": "data_cursor",
    },
    "prompts": {"Prompts": "PromptQueue"},
    "ragged": {"Role": "Origin"},
    "remote": {
        "Places": "RowIndex",
        "Piece": "Chunk",
        "Here": "InlineRef",
        "Form": "ColumnType",
        "Remote": "RemoteColumn",
    },
    "schedule": {"Script": "DecisionLog"},
}
"""For each old module, the new names of renamed objects."""

ELSEWHERE: Final = {
    "meshrl": {
        "FsdpConfig": "meshrl_fsdp.options.FsdpConfig",
        "MegatronConfig": "meshrl_megatron.options.MegatronConfig",
        "Together": "meshrl.mesh.CollectiveActor",
        "mismatched_kl": "meshrl.deprecated.passes.mismatched_kl",
        "step_metrics": "meshrl.deprecated.passes.step_metrics",
        "with_margins": "meshrl.deprecated.passes.with_margins",
        "with_scores": "meshrl.deprecated.passes.with_scores",
        "VllmConfig": "meshrl_vllm.options.VllmConfig",
    },
    "meshrl.evaluation": {"Evaluation": "meshrl.evaluation.offline.Evaluation"},
    "meshrl.losses": {"Penalised": "meshrl.losses.WithKl"},
    "meshrl.rewards": {
        "boundary": "meshrl.rewards.function.boundary",
        "load_name": "meshrl.user_code.load_name",
        "reasoning_gym": "meshrl.rewards.builtin.reasoning_gym",
    },
    "meshrl.rollout": {"evaluate": "meshrl.evaluation.evaluate"},
    "meshrl.testing.conformance": {"Bench": "meshrl.testing.conformance.Harness"},
    "meshrl.weights": {
        "BUCKET": "meshrl.weights.weights.BUCKET",
    },
}
"""For each existing module, the new places of objects that moved."""


def install() -> None:
    """Make the old modules importable."""
    sys.meta_path.append(_Finder())


def add_old_names(module: ModuleType) -> None:
    """Make an existing module find its old names."""
    if module.__name__ in ELSEWHERE:
        vars(module)["__getattr__"] = old_names(module.__name__)


def old_names(module: str, otherwise: Callable[[str], object] | None = None) -> Callable[[str], object]:
    """Return a module's `__getattr__` that finds its old names in their new places. `otherwise` finds all others."""
    names = ELSEWHERE[module]

    def find(name: str) -> object:
        if name in names:
            now, _, attribute = names[name].rpartition(".")
            _warn(f"{module}.{name}", f"use {names[name]}")
            return getattr(import_module(now), attribute)
        if otherwise is not None:
            return otherwise(name)
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return find


class _Finder:
    """Finds old modules. Each is empty and looks its names up in their new places."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, old = fullname.partition(".")
        return ModuleSpec(fullname, cast("Loader", self)) if package == "meshrl" and old in MOVED else None

    def create_module(self, spec: ModuleSpec) -> None:
        """Create a plain module."""

    def exec_module(self, module: ModuleType) -> None:
        old = module.__name__.removeprefix("meshrl.")
        places = [place if place.startswith("meshrl_") else f"meshrl.{place}" for place in MOVED[old].split()]
        _warn(module.__name__, f"its names are in {', '.join(places)}; import them from the package, if it has them")

        def find(name: str) -> object:
            now = RENAMED.get(old, {}).get(name, name)
            for place in () if name.startswith("__") else map(import_module, places):
                if hasattr(place, now):
                    return getattr(place, now)
            raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")

        vars(module)["__getattr__"] = find


def _warn(old: str, now: str) -> None:
    warnings.warn(f"{old} goes with meshrl {GOES}: {now}", DeprecationWarning, stacklevel=3)
