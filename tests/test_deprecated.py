"""What had another module or name before the rooms can still be imported, with a warning that says where it is now."""

# pyright: reportDeprecated=false

import inspect
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest
from packaging.version import Version

from meshrl import (
    Batch,
    PolicyConfig,
    ReferenceConfig,
    RewardTrainingConfig,
    answer_pairs,
    preference_columns,
    score_columns,
)
from meshrl.deprecated import ELSEWHERE, GOES, MOVED, RENAMED, passes
from meshrl.testing import FakePolicy, FakeReference, FakeRewardModel

PUBLIC = {
    "actor": "Actor endpoint is_endpoint Together free_cores Rank rank_context current_rank",
    "advantages": (
        "Scale Gae group_advantages leave_one_out batch_advantages optimal_advantages rescaled_advantages "
        "rewards_to_go gae whiten learned_values"
    ),
    "assembly": "Assembly",
    "balance": "Share NOWHERE Balance",
    "beside": "Numbers Measurement Beside",
    "bucket": "Entry Bucket SharedHeld fingerprint",
    "calls": "Call Calls",
    "changes": "Changes",
    "check": "find_mistakes check_model",
    "checkpoints": "Saved Checkpoints newest_checkpoint",
    "columns": (
        "Objects Column ColumnLike TOKEN_COLUMNS ROW_COLUMNS taken aligned check_lengths describe by same concat "
        "private pack unpack"
    ),
    "contract": "Axes EVERY_RANK Mark Endpoint Contract read_contract read_mark",
    "critic": "with_advantages",
    "delta": "Change Chain Version Sender ChainHeld",
    "engine": "INLINE_BYTES Resources Slot Member Request Seen Engine",
    "engines.loop": "RankLoop",
    "engines.ray.order": "Outbox Line",
    "engines.ray.pickle": "carry_modules check_picklable packed unpacked",
    "engines.threads": "LocalHeld isolated sendable LocalSlot LocalMember Reply Work post answer",
    "engines.turns": "Turn Turns",
    "environment": "Step Game EnvironmentConfig Environment FunctionEnvironment Retry load_environment",
    "episodes": "Episodes",
    "estimates": "Estimate powers_of_2 pass_at_k wilson bootstrap",
    "generation": "SwapMode Call Shared Generation",
    "handle": "Plans Deployment Handle BoundEndpoint each parts divided at ranks respawn stop",
    "held": "Held Put Holder Later hold loaded seal_arrays fetched",
    "imports": "import_file where_raised",
    "judging": "BesideSampling Judged judge evaluate_during",
    "layout": "Shape FsdpConfig MegatronConfig VllmConfig",
    "ledger": "Late Group Ledger",
    "losses.loss": "Predicts TokenLoss Loss Normalised OfRows Penalised check_predicts",
    "losses.sources": "Sourced check_sources",
    "losses.surrogate": "ClippedLoss ConstantLoss clipped_surrogate",
    "metrics": "Metrics",
    "observation": "Observation",
    "position": "Numbers Deal Reached Stream Position Ranges position",
    "preferences": (
        "PairSampling answer_pairs rejected_answers labelled corrupted about_half best_and_worst log_ratios "
        "pair_margins with_margins pair_metrics pair_means mismatched_kl"
    ),
    "progress": "Progress",
    "prompts": "Prompts",
    "ragged": "Dtype check_dtype frozen sealed raw from_raw pickled equal Role Source joined Ragged bounds_of gather",
    "recorder": "Recorder",
    "reference_kl": "kl_columns penalised_rewards kl_metrics",
    "registry": "GROUP backends implementation",
    "remote": "Places Piece Here Form Remote source_of is_ragged renumbered as_remote",
    "role_config": (
        "RoleConfig check_axes NewModel ModelConfig EvaluationConfig AlgorithmConfig OptimizerConfig LoraConfig "
        "PolicyConfig CriticConfig ReferenceConfig TeacherConfig RewardModelConfig RewardTrainingConfig "
        "SamplerConfig Sampling GroupSampling"
    ),
    "rows": "Plan UNDIVIDED make_plan plan_of lightest gather mean total check_same",
    "sandbox": "Outcome Limits Result Enforced enforced code_of run_tests code_tests",
    "sandboxed": "Job main run",
    "schedule": (
        "Kind Decision Opened Load Loop Ended Entry Script Schedule DIFFERENCE PAUSE schedule load_into read_schedule"
    ),
    "scores": "with_scores least_margins score_metrics labelled_steps with_labels step_metrics",
    "scripts": (
        "Function Script Job shipped shipped_configs about find_config shipped_scripts find_script load_script "
        "load_job copy_script"
    ),
    "serve": "Address ServerConfig Server serve newest_model table_of",
    "sharding": (
        "DP TP PP CP EP EVERY Rows Splittable Joinable Averageable Addable Array SplitT JoinT MeanT SumT AnyT Axis "
        "SameAxis Shard Replicate Gather Mean Sum Same"
    ),
    "shared_memory": "FOLDER Bytes Segment Writing Pool sweep pool",
    "stream": "Score Keep rollouts Rollouts",
    "table": "Stored Table aligned lengths take concat hold load read describe row_numbers",
    "teacher": "check_teacher",
    "testing.clock": "Deadlock LeftRunning VirtualLoop simulate",
    "testing.forecast": "Lane Forecast simulate_job",
    "testing.latency": "Before Crash Latency Lognormal Recorded per_row per_token delayed crashing",
    "testing.pace": "ROLES Endpoint Work Pace Tape Draws step_windows",
    "testing.sim": (
        "ROLES Job Processor Timing SimEngine SimRole SimTrained SimPolicy SimReference SimCritic SimReward SimSampler"
    ),
    "testing.standing": "Standing describe standing_tasks",
    "testing.state": "State read_state",
    "verifiers": "NAME rows",
}
"""The names of each module that is gone."""


@pytest.mark.parametrize("old", sorted(MOVED))
def test_an_old_module_has_its_names_and_says_where_they_are(old: str) -> None:
    sys.modules.pop(f"meshrl.{old}", None)
    with pytest.warns(DeprecationWarning, match=rf"meshrl\.{old} goes with meshrl {GOES}.*{MOVED[old].split()[0]}"):
        module = import_module(f"meshrl.{old}")
    places = [
        import_module(place if place.startswith("meshrl_") else f"meshrl.{place}") for place in MOVED[old].split()
    ]
    for name in PUBLIC[old].split():
        now = RENAMED.get(old, {}).get(name, name)
        value = getattr(module, name)
        assert any(value is getattr(place, now, None) for place in places)
    assert not hasattr(module, "nothing")


@pytest.mark.parametrize(("module", "name"), [(module, name) for module in ELSEWHERE for name in ELSEWHERE[module]])
def test_an_old_name_of_a_module_that_is_still_there_says_what_it_is_now(module: str, name: str) -> None:
    place, _, now = ELSEWHERE[module][name].rpartition(".")
    with pytest.warns(DeprecationWarning, match=rf"{module}\.{name} goes with meshrl {GOES}: use {place}"):
        value = getattr(import_module(module), name)
    assert value is getattr(import_module(place), now)
    assert not hasattr(import_module(module), "nothing")


def test_the_warning_points_at_who_imports_and_comes_once() -> None:
    code = "import meshrl\nfrom meshrl.calls import Calls\nimport meshrl.calls"
    done = subprocess.run([sys.executable, "-W", "default", "-c", code], capture_output=True, text=True, check=True)
    assert [line.partition(": ")[0] for line in done.stderr.splitlines() if "Deprecation" in line] == ["<string>:2"]


def test_other_modules_are_not_found() -> None:
    with pytest.raises(ModuleNotFoundError):
        import_module("meshrl.nothing")
    with pytest.raises(ModuleNotFoundError):
        import_module("actor")


def test_what_is_deprecated_goes_with_the_version_that_was_announced() -> None:
    pyproject = Path(__file__).parents[1] / "pyproject.toml"
    version = tomllib.loads(pyproject.read_text("utf-8"))["project"]["version"]
    assert Version(version) < Version(GOES), f"remove what goes with {GOES}, and set GOES to a later version"
    for name, function in inspect.getmembers(passes, inspect.isfunction):
        if function.__module__ == passes.__name__:
            assert getattr(function, "__deprecated__", "").startswith(f"goes with meshrl {GOES}: use "), name


@pytest.mark.filterwarnings("ignore:goes with:DeprecationWarning")
async def test_passes_of_before_do_what_pages_do_themselves() -> None:
    policy, reference = FakePolicy(PolicyConfig(model="none")), FakeReference(ReferenceConfig(model="none"))
    rows = answer_pairs(Batch.of(prompt=["1+1=", "2+2="], answer=["2", "4"]), ["3", "5"])
    encoded = await policy.encode(rows)
    expected = await preference_columns(await reference.logprobs(await policy.logprobs(encoded)))
    assert (await passes.with_margins(policy, reference, encoded)).row("margins").tolist() == (
        expected.row("margins").tolist()
    )
    assert await passes.mismatched_kl(policy, reference, rows) == 0.0
    model = FakeRewardModel(RewardTrainingConfig(model="none"))
    pairs = await model.encode(rows)
    scored = await score_columns(await model.token_scores(pairs))
    assert (await passes.with_scores(model, pairs)).row("margins").tolist() == scored.row("margins").tolist()
