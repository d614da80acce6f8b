import asyncio
import errno
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from meshrl import NewModel, PolicyConfig
from meshrl.errors import ModelError
from meshrl.hub import download
from meshrl.tasks import Task, TaskConfig
from meshrl_torch.train.one_rank import TorchPolicy
from tests.first_hour.hub_server import Files, Hub, ask, serving
from tests.first_hour.terminal import FAKES, SMALL, config_of, done, refused

TABLE = """
algorithm = "sft"
steps = 2
rows = 8
run.name = "mine"
task = { source = "hf:org/sums", prompt = "{question}", answer = "{answer}", held_out = 2, held_out_fraction = 0.3 }
policy.model = "org/tiny"
sampling.max_tokens = 3
"""
NEW = NewModel(characters="0123456789+", hidden_size=16, ffn_size=24, layers=1, heads=2, max_tokens=32)
NOWHERE = "http://127.0.0.1:9"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Files:
    folder = tmp_path_factory.mktemp("tiny")
    asyncio.run(TorchPolicy(PolicyConfig(model=NEW)).save(str(folder)))
    return {each.name: each.read_bytes() for each in folder.iterdir()}


@pytest.fixture
def hub(model: Files, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    Path("mine.toml").write_text(TABLE, "utf-8")
    rows = [{"question": f"{one}+{other}", "answer": str(one + other)} for one in range(9) for other in range(9)]
    with serving() as served:
        served.repositories["models/org/tiny"] = {**model}
        served.repositories["models/org/kept"] = {}
        served.repositories["datasets/org/sums"] = {
            "train.jsonl": "".join(json.dumps(row) + "\n" for row in rows).encode(),
            "README.md": b"---\nlicense: mit\n---\n",
        }
        served.gated.add("org/kept")
        ask(served.url, monkeypatch)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(Path("cache").resolve()))
        monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(Path("datasets").resolve()))
        yield served


def test_a_model_of_the_hub_is_trained_by_the_commit_that_was_there(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("rows.jsonl").write_bytes(hub.repositories["datasets/org/sums"]["train.jsonl"])
    Path("mine.toml").write_text(TABLE.replace("hf:org/sums", "rows.jsonl"), "utf-8")
    commit = hub.commit("models/org/tiny")
    done("check", "mine.toml")
    fetched = {each.rpartition("/")[2] for each in hub.asked if "/resolve/" in each}
    assert fetched == {"config.json"}, "no other file is fetched to check"
    done("run", "mine.toml")
    assert config_of("runs/mine")["policy"]["model"] == f"org/tiny@{commit}"

    hub.repositories["models/org/tiny"]["README.md"] = b"a newer commit"
    ask(NOWHERE, monkeypatch)
    done("run", "runs/mine/config.toml", "run.name=again")
    first, again = (Path(f"runs/{name}/model/model.safetensors").read_bytes() for name in ("mine", "again"))
    assert first == again


def test_what_is_not_to_be_had_says_why(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    other = "task.source=meshrl:spell_backward"
    for override, says in {
        "policy.model=org/none": r"there is no such folder, and http://\S+ has none of this name that you may see",
        "policy.model=org/kept": r"accept them at http://\S+/org/kept, then log in with `hf auth login`, or set",
        "policy.model=org/tiny@v9": "has no such revision of it: give an existing branch, tag or commit",
        "task.source=hf:org/none": "dataset 'org/none': http://.* has none of this name that you may see",
        "task.options={ split = 'test' }": r"dataset 'org/sums': (Unknown|Bad) split",
        "task.options={ name = 'hard' }": "dataset 'org/sums': BuilderConfig 'hard' not found",
        "task.source=hf:sums": "dataset 'sums' names nothing on the hub: write ORG/NAME",
    }.items():
        told = refused("check", "mine.toml", override, *([other] if "policy" in override else []))
        assert re.search(says, told), told
    hub.repositories["models/org/bert"] = {
        "config.json": b'{"model_type": "bert", "architectures": ["BertLMHeadModel"]}'
    }
    told = refused("check", "mine.toml", "policy.model=org/bert", other)
    assert "policy, sampler: BertLMHeadModel computes something else for a row next to a longer one" in told
    assert not Path("runs").exists()
    hub.repositories["datasets/org/sums"]["train.jsonl"] += b'{"question": "1", "answer": null}\n'
    assert "row 81 has no answer to learn" in refused("check", "mine.toml")

    def full(*_: object, **__: object) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("huggingface_hub.snapshot_download", full)
        with pytest.raises(ModelError, match=r"its files cannot be kept in /.*/cache: .*No space left on device"):
            download("org/tiny")

    ask(NOWHERE, monkeypatch)
    told = refused("check", "mine.toml", "policy.model=org/other", other)
    assert f"{NOWHERE} does not answer, or HF_HUB_OFFLINE is set, and the files are not in the cache" in told


def test_a_trained_model_is_put_there_with_a_card(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = f"hf:org/sums@{hub.commit('datasets/org/sums')}"
    done("run", "mine.toml")
    assert config_of("runs/mine")["task"]["source"] == source
    task = Task.load(TaskConfig(source=source, options={"split": "train[:50]"}, held_out=0))
    assert task.train.objects("prompt")[:2] == ("0+0", "0+1")
    assert len(task.train) == 50

    assert done("push", "mine", "me/better").out == f"wrote {hub.url}/me/better\n"
    files = hub.repositories["models/me/better"]
    assert files["model.safetensors"] == Path("runs/mine/model/model.safetensors").read_bytes()
    assert hub.private == {"me/better": True}
    card = files["README.md"].decode()
    assert "base_model: org/tiny\ndatasets: [org/sums]\n---" in card
    assert re.search(r"Trained from `org/tiny@\w+` by `sft` with meshrl \S+ on `hf:org/sums@\w+` in 2 steps\.", card)
    assert "| exact_match |" in card
    assert str(tmp_path) not in card

    done("run", "mine.toml", "run.name=next", "policy.model=me/better", "steps=1")
    told = refused("push", "mine", "me/better@v1")
    assert told == "error: 'me/better@v1' is not a name on the hub: write ORG/NAME"
    ask(NOWHERE, monkeypatch)
    told = refused("push", "mine", "me/better")
    assert told.endswith("HF_HUB_OFFLINE is set: nothing was put there; push again with a network")


def test_fakes_without_a_kl_penalty_ask_for_no_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    ask(NOWHERE, monkeypatch)
    fakes = (*FAKES, *SMALL, "policy.model=org/none", "steps=1", "prompts=2", "policy.optimizer.total_steps=1")
    done("run", "grpo/quickstart", *fakes)
    assert "reference: model 'org/none'" in refused("check", "grpo/quickstart", *fakes, "loss.kl=0.1")
