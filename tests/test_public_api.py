"""The public names, one by one: a name that comes or goes changes this list, on purpose."""

import ast
import importlib
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import meshrl

NAMES = """
    Actor Agent AgentConfig Agents AlgorithmConfig answer_pairs at BackendError BackendOptions Batch
    batch_advantages best_and_worst BradleyTerryLoss CallTimeout check_sources check_teacher CispoLoss ClippedLoss
    CollectiveActor Config ConfigError ConstantLoss ContractError conversations Correction CP Critic CriticConfig
    CrossEntropy current_rank DataError DataLost DP each effective_sample_size endpoint EngineDied Environment
    EnvironmentConfig EP Episodes evaluate evaluate_during EvaluationConfig EVERY explained_variance from_trl Gae
    gae Gateway GatewayConfig Gather greedy_baseline group_advantages GroupSampling has_signal held_out kl_columns
    kl_metrics KtoLoss labelled labelled_steps least_margins leave_one_out LocalEngine log_ratios LoraConfig Loss
    Mean Mesh MeshConfig MeshrlError MeshStopped Metrics minibatches mismatched ModelConfig ModelError NewModel
    optimal_advantages OptimizerConfig options_of overlong_penalty pair_margins pair_metrics PairSampling PassConfig
    penalised_rewards Policy PolicyConfig PP preference_columns PreferenceLoss ProcessLoss publish Ragged Rank
    RankDied RankFailed ranks read_chat Reference reference_point ReferenceConfig ReinforceLoss rejected_answers
    ReplicasDisagree Replicate rescaled_advantages Resources respawn ResumingSampler ReverseKl Reward RewardConfig
    RewardModel RewardModelConfig rewards_to_go RewardTrainingConfig RoleConfig rollout RolloutConfig Rollouts
    rollouts Run RunConfig Same Sampler SamplerConfig Sampling score_columns score_metrics SequenceLoss Shard Source
    Stateful step_score_metrics stop Sum Task TaskConfig TeacherConfig TP TrackedRun Tracker train Trained
    turn_advantages ValueLoss Weights whiten with_labels with_options
"""
PUBLIC = NAMES.split()


@cache
def tree(module: str) -> ast.Module:
    source = Path(str(importlib.import_module(module).__file__))
    stub = source.with_suffix(".pyi")
    return ast.parse((stub if stub.exists() else source).read_text("utf-8"))


@cache
def imported(module: str) -> dict[str, str]:
    """The names that a package imports, or would if it were read by a type checker, and where each comes from."""
    body = tree(module).body
    typed = [inner for node in body if isinstance(node, ast.If) for inner in node.body]
    return {
        alias.asname or alias.name: f"{module}.{node.module}" if node.level else node.module or ""
        for node in [*body, *typed]
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def home(name: str) -> ast.Module:
    """The module that defines a public name: behind the doors of the package and of a room."""
    module = "meshrl"
    while name in (names := imported(module)):
        module = names[name]
    return tree(module)


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
    assert set(PUBLIC) <= set(dir(meshrl))


@pytest.mark.process
def test_a_name_is_loaded_when_it_is_asked_for() -> None:
    code = (
        "import sys, meshrl; from meshrl import Mesh, endpoint\n"
        "assert not {'pydantic', 'structlog', 'meshrl.data', 'meshrl.run'} & set(sys.modules)\n"
        "from meshrl import AgentConfig, read_chat; import meshrl.run.check\n"
        "assert not {'openai', 'starlette', 'uvicorn'} & set(sys.modules)\n"
        "from meshrl import *\n"
        "assert all(globals()[name] is getattr(meshrl, name) for name in meshrl.__all__)\n"
        "assert not hasattr(meshrl, 'nothing')"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_each_public_name_exists_and_says_what_it_is() -> None:
    doors = {name: importlib.import_module(imported("meshrl")[name]) for name in PUBLIC}
    assert [name for name, door in doors.items() if getattr(meshrl, name) is not getattr(door, name)] == []
    assert [name for name in PUBLIC if name not in documented(home(name))] == []


SIGNATURES = Path(__file__).with_name("public_signatures.txt")
"""What each public name takes and gives; `python tests/test_public_api.py` writes it anew, on purpose."""


def signatures() -> str:
    """Each public function, and each class with its fields and public methods, as the source has them."""
    found: list[str] = []
    for name in sorted(PUBLIC):
        node = next((node for node in home(name).body if getattr(node, "name", None) == name), None)
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
