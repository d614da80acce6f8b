"""The public names, one by one: a name that comes or goes changes this list, on purpose."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import meshrl

PUBLIC = [
    "mismatched",
    "preference_columns",
    "reference_point",
    "score_columns",
    "step_score_metrics",
    "CP",
    "DP",
    "EP",
    "EVERY",
    "PP",
    "TP",
    "Actor",
    "Agent",
    "AgentConfig",
    "Agents",
    "Gateway",
    "GatewayConfig",
    "conversations",
    "read_chat",
    "AlgorithmConfig",
    "BackendError",
    "BackendOptions",
    "options_of",
    "with_options",
    "Batch",
    "CispoLoss",
    "ClippedLoss",
    "Config",
    "ConfigError",
    "ConstantLoss",
    "ContractError",
    "Correction",
    "Critic",
    "CriticConfig",
    "CrossEntropy",
    "DataError",
    "DataLost",
    "EngineDied",
    "Environment",
    "EnvironmentConfig",
    "EvaluationConfig",
    "Episodes",
    "Gae",
    "Gather",
    "GroupSampling",
    "LocalEngine",
    "LoraConfig",
    "Loss",
    "Mean",
    "Mesh",
    "MeshConfig",
    "MeshStopped",
    "MeshrlError",
    "Metrics",
    "ModelConfig",
    "ModelError",
    "NewModel",
    "OptimizerConfig",
    "PassConfig",
    "Policy",
    "PolicyConfig",
    "Ragged",
    "Rank",
    "CallTimeout",
    "RankDied",
    "RankFailed",
    "Reference",
    "ReferenceConfig",
    "ReinforceLoss",
    "ReplicasDisagree",
    "Replicate",
    "Resources",
    "ResumingSampler",
    "Reward",
    "RewardConfig",
    "ReverseKl",
    "RewardModelConfig",
    "RoleConfig",
    "RolloutConfig",
    "Rollouts",
    "Run",
    "RunConfig",
    "Same",
    "Sampler",
    "SamplerConfig",
    "Sampling",
    "SequenceLoss",
    "Shard",
    "Source",
    "Stateful",
    "Sum",
    "Task",
    "TaskConfig",
    "TeacherConfig",
    "TrackedRun",
    "Tracker",
    "Trained",
    "CollectiveActor",
    "ValueLoss",
    "Weights",
    "at",
    "batch_advantages",
    "check_sources",
    "check_teacher",
    "current_rank",
    "each",
    "effective_sample_size",
    "endpoint",
    "evaluate",
    "evaluate_during",
    "explained_variance",
    "gae",
    "from_trl",
    "greedy_baseline",
    "group_advantages",
    "has_signal",
    "held_out",
    "leave_one_out",
    "minibatches",
    "optimal_advantages",
    "overlong_penalty",
    "kl_columns",
    "kl_metrics",
    "penalised_rewards",
    "publish",
    "ranks",
    "rescaled_advantages",
    "respawn",
    "rewards_to_go",
    "rollout",
    "rollouts",
    "stop",
    "train",
    "turn_advantages",
    "whiten",
    "PairSampling",
    "answer_pairs",
    "best_and_worst",
    "labelled",
    "log_ratios",
    "pair_margins",
    "pair_metrics",
    "rejected_answers",
    "KtoLoss",
    "PreferenceLoss",
    "BradleyTerryLoss",
    "ProcessLoss",
    "RewardModel",
    "RewardTrainingConfig",
    "labelled_steps",
    "least_margins",
    "score_metrics",
    "with_labels",
]


def imported(module: str) -> dict[str, str]:
    """The names that a package imports, or would if it were read by a type checker, and where each comes from."""
    tree = ast.parse(Path(str(importlib.import_module(module).__file__)).read_text("utf-8"))
    typed = [inner for node in tree.body if isinstance(node, ast.If) for inner in node.body]
    return {
        alias.asname or alias.name: node.module or ""
        for node in [*tree.body, *typed]
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def home(name: str) -> ModuleType:
    """The module that defines a public name: behind the doors of the package and of a room."""
    module = "meshrl"
    while name in (names := imported(module)):
        module = names[name]
    return importlib.import_module(module)


def documented(tree: ast.Module) -> set[str]:
    """The names in a module with a docstring of their own; an assignment's is the text below it."""
    found = {
        node.name
        for node in tree.body
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(node)
    }
    for node, below in zip(tree.body, tree.body[1:], strict=False):
        if (
            isinstance(node, ast.Assign | ast.AnnAssign)
            and isinstance(below, ast.Expr)
            and isinstance(below.value, ast.Constant)
            and isinstance(below.value.value, str)
        ):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found.update(target.id for target in targets if isinstance(target, ast.Name))
    return found


def test_the_public_names_are_these() -> None:
    assert sorted(vars(meshrl)["__all__"]) == sorted(PUBLIC)


def test_type_checkers_and_people_see_the_same_names() -> None:
    typed = {name for name, module in imported("meshrl").items() if module.startswith("meshrl.")}
    assert typed == set(PUBLIC)
    assert set(PUBLIC) <= set(dir(meshrl))


def test_a_name_is_loaded_when_it_is_asked_for() -> None:
    code = (
        "import sys, meshrl; from meshrl import Mesh, endpoint\n"
        "assert not {'pydantic', 'structlog', 'meshrl.data', 'meshrl.run'} & set(sys.modules)\n"
        "from meshrl import AgentConfig, read_chat; import meshrl.run.check\n"
        "assert not {'openai', 'starlette', 'uvicorn'} & set(sys.modules)\n"
        "import meshrl.rollout; assert meshrl.rollout is not sys.modules['meshrl.rollout'], 'the function goes first'\n"
        "assert meshrl.losses.WithKl is sys.modules['meshrl.losses'].WithKl, 'rooms are loaded too'\n"
        "from meshrl import *\n"
        "assert all(globals()[name] is getattr(meshrl, name) for name in meshrl.__all__)\n"
        "assert not hasattr(meshrl, 'nothing')"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("name", PUBLIC)
def test_each_public_name_exists_and_says_what_it_is(name: str) -> None:
    assert getattr(meshrl, name) is getattr(importlib.import_module(imported("meshrl")[name]), name)
    module = home(name)
    assert name in documented(ast.parse(Path(str(module.__file__)).read_text("utf-8"))), f"{module.__name__}.{name}"


SIGNATURES = Path(__file__).with_name("public_signatures.txt")
"""What each public name takes and gives; `python tests/test_public_api.py` writes it anew, on purpose."""


def signatures() -> str:
    """Each public function, and each class with its fields and public methods, as the source has them."""
    found: list[str] = []
    for name in sorted(PUBLIC):
        tree = ast.parse(Path(str(home(name).__file__)).read_text("utf-8"))
        node = next((node for node in tree.body if getattr(node, "name", None) == name), None)
        if isinstance(node, ast.ClassDef):
            bases = ", ".join(ast.unparse(base) for base in node.bases)
            found += [f"class {name}({bases})", *(f"    {line}" for part in node.body if (line := _line(part)))]
        elif node is not None:
            found.append(_line(node) or name)
    return "\n".join(found) + "\n"


def _line(node: ast.stmt) -> str | None:
    """A public function's or a field's first line."""
    if isinstance(node, ast.AnnAssign) and not ast.unparse(node.target).startswith("_"):
        return ast.unparse(node)
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        if node.name.startswith("_") and node.name != "__init__":
            return None
        decorators = "".join(f"@{ast.unparse(each)} " for each in node.decorator_list)
        returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
        kind = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
        return f"{decorators}{kind} {node.name}({ast.unparse(node.args)}){returns}"
    return None


def test_public_signatures_change_on_purpose() -> None:
    assert signatures().splitlines() == SIGNATURES.read_text("utf-8").splitlines()


if __name__ == "__main__":
    SIGNATURES.write_text(signatures(), "utf-8")
