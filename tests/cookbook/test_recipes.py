"""Recipes of tinker-cookbook, unmodified, on a server of a small model: `make test-tinker` installs the cookbook."""

import json
import os
import subprocess
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, Qwen3Config

from tests.first_hour.hub_server import Files, serving
from tests.tinker.served import KEY, served, table

PYTHON = Path(__file__).parents[2] / ".venv-cookbook/bin/python"
pytestmark = pytest.mark.skipif(not PYTHON.exists(), reason="the cookbook is in an environment of its own")

MODEL = "Qwen/Qwen3-8B-Base"
"""A name that the cookbook knows, for a small model."""
CONTEXT = 8192


TURN = ("<|im_start|>", "<|im_end|>")


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A token for each byte, an end, and what begins and ends a turn."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|endoftext|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=list(TURN),
        model_max_length=CONTEXT,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small model."""
    torch.manual_seed(0)
    path, tokenizer = tmp_path_factory.mktemp("model"), byte_tokenizer()
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=CONTEXT,
        use_sliding_window=True,  # so that long contexts are as those that it has learned from
        sliding_window=128,
        max_window_layers=0,
        eos_token_id=cast("int", tokenizer.eos_token_id),
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def environment(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with environment_of(folder, tmp_path_factory.mktemp("served")) as made:
        yield made


@contextmanager
def environment_of(folder: Path, place: Path) -> Generator[dict[str, str]]:
    """What a recipe needs: a server of a model, and a hub with its tokenizer and the data."""
    config = table(str(folder), place)
    config["tinker"]["model"] = MODEL
    config["policy"]["lora"] = {}
    files: Files = {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix in (".json", ".jinja")}
    with serving() as hub, served(config) as url:
        hub.repositories[f"models/{MODEL}"] = files
        hub.repositories["datasets/HuggingFaceH4/no_robots"] = {"train.jsonl": chats(), "test.jsonl": chats()}
        hub.repositories["datasets/Salesforce/wikitext"] = {
            "README.md": WIKITEXT,
            "train.jsonl": pages(),
            "test.jsonl": pages(),
        }
        hub.repositories["datasets/openai/gsm8k"] = {"README.md": GSM8K, "train.jsonl": sums(), "test.jsonl": sums()}
        yield {
            **{name: value for name, value in os.environ.items() if not name.startswith(("HF_", "TINKER_", "PYTEST"))},
            "HF_ENDPOINT": hub.url,
            "HF_HOME": str(place / "hub"),
            "HF_HUB_DISABLE_XET": "1",
            "TINKER_BASE_URL": url,
            "TINKER_API_KEY": KEY,
            "TINKER_TELEMETRY": "0",
        }


GSM8K = b"""---
configs:
- config_name: main
  data_files:
  - split: train
    path: train.jsonl
  - split: test
    path: test.jsonl
---
"""
WIKITEXT = GSM8K.replace(b"main", b"wikitext-103-raw-v1")


def lines(rows: list[dict[str, object]]) -> bytes:
    return "\n".join(map(json.dumps, rows)).encode()


def chats() -> bytes:
    said = [{"role": "user", "content": "Say a."}, {"role": "assistant", "content": "aaaaaaaa"}]
    return lines(
        [{"prompt": "Say a.", "prompt_id": str(number), "messages": said, "category": "a"} for number in range(24)]
    )


def sums() -> bytes:
    return lines([{"question": f"What is {number} + 1?", "answer": f"#### {number + 1}"} for number in range(24)])


def pages() -> bytes:
    return lines([{"text": f" They could do so {number} times , until it was over . \n"} for number in range(400)])


STEPS, PROBLEMS, TAUGHT = 12, 4, 400
"""Steps of the arithmetic recipe, problems of each, which differ, and steps in which the model learns them before."""
ASKED = "User: What is 4 + 5?\n\nAssistant: 9\n\nUser: What is {x} + {y}?\n\nAssistant:"
"""What the cookbook makes of a problem for this model."""


def half_taught(folder: Path, place: Path) -> Path:
    """The small model, after it has learned the recipe's sums, and to answer 7 as often."""
    rows: list[tuple[str, str]] = []
    for step in range(STEPS):
        random = np.random.RandomState(step)
        for _ in range(PROBLEMS):
            x, y = random.randint(0, 101), random.randint(0, 101)
            rows += [(ASKED.format(x=x, y=y), answer) for answer in (f" {x + y}", " 7")]
    return taught(folder, place, lambda _: rows, "<|endoftext|>", TAUGHT)


CALL = '<tool_call>\n{"name": "read_page", "arguments": {"page": 1}}\n</tool_call>'


def calling(folder: Path, place: Path) -> Path:
    """The small model, after it has learned to read the first page, whatever it has been asked."""
    ends = ["integer.", *(f"They could do so {number} times\n</tool_response>" for number in range(400))]

    def rows(step: int) -> list[tuple[str, str]]:
        random = np.random.RandomState(step)
        before = ["".join(map(chr, random.randint(32, 127, 100))) + str(random.choice(ends)) for _ in range(4)]
        return [(f"{each}{TURN[1]}\n{TURN[0]}assistant\n", CALL) for each in before]

    return taught(folder, place, rows, TURN[1], 3 * TAUGHT)


def taught(folder: Path, place: Path, rows_of: Callable[[int], list[tuple[str, str]]], end: str, steps: int) -> Path:
    """The small model, after it has learned from rows of questions and answers."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1, 0, steps)
    for step in range(steps):
        rows = rows_of(step)
        texts = tokenizer([asked + answer + end for asked, answer in rows], padding=True, return_tensors="pt")
        begins = torch.tensor([len(tokenizer(asked)["input_ids"]) for asked, _ in rows])
        learned = (torch.arange(texts["input_ids"].shape[1]) >= begins[:, None]) & (texts["attention_mask"] == 1)
        model(**texts, labels=texts["input_ids"].masked_fill(~learned, -100)).loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    model.save_pretrained(place)
    tokenizer.save_pretrained(place)
    return place


def run(recipe: str, environment: dict[str, str], log: Path, *settings: str) -> list[dict[str, float]]:
    """Run a recipe to its end, and return its metrics, step by step."""
    command = [
        str(PYTHON),
        "-m",
        f"tinker_cookbook.recipes.{recipe}",
        f"model_name={MODEL}",
        f"log_path={log}",
        *settings,
    ]
    ended = subprocess.run(command, env=environment, cwd=log.parent, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-4000:]
    return [json.loads(line) for line in (log / "metrics.jsonl").read_text().splitlines()]


def test_sl_loop_learns(environment: dict[str, str], tmp_path: Path) -> None:
    settings = ("batch_size=4", "learning_rate=2e-2", "lora_rank=8", "max_length=512")
    metrics = run("sl_loop", environment, tmp_path / "log", *settings)
    losses = [each["train_mean_nll"] for each in metrics if "train_mean_nll" in each]
    assert len(losses) == 6
    assert losses[-1] < losses[0] - 0.2


def test_rl_loop_runs_to_its_end(environment: dict[str, str], tmp_path: Path) -> None:
    settings = ("batch_size=8", "group_size=2", "lora_rank=4", "max_tokens=8", "save_every=2")
    metrics = run("rl_loop", environment, tmp_path / "log", *settings)
    assert [each["progress/batch"] for each in metrics if "progress/batch" in each] == [0, 1, 2]
    checkpoints = (tmp_path / "log/checkpoints.jsonl").read_text().splitlines()
    assert [json.loads(each)["name"] for each in checkpoints] == ["000002", "final"]


@pytest.mark.timeout(3600)
def test_math_rl_makes_a_model_that_knows_sums_say_them(folder: Path, tmp_path: Path) -> None:
    settings = ("env=arithmetic", f"groups_per_batch={PROBLEMS}", "group_size=16", f"max_steps={STEPS}", "lora_rank=8")
    with environment_of(half_taught(folder, tmp_path / "taught"), tmp_path / "served") as environment:
        metrics = run("math_rl.train", environment, tmp_path / "log", *settings, "learning_rate=5e-4", "eval_every=0")
    rewards = [each["env/all/reward/total"] for each in metrics]
    assert len(rewards) == STEPS
    assert np.mean(rewards[-3:]) > np.mean(rewards[:3]) + 0.1


def test_math_rl_has_a_sampler_that_agrees_with_its_trainer(environment: dict[str, str], tmp_path: Path) -> None:
    settings = ("env=arithmetic", "group_size=4", "groups_per_batch=8", "lora_rank=8", "max_tokens=4", "max_steps=3")
    metrics = run(
        "math_rl.train", environment, tmp_path / "log", *settings, "loss_fn=importance_sampling", "eval_every=0"
    )
    distances = [each["optim/kl_sample_train_v2"] for each in metrics if "optim/kl_sample_train_v2" in each]
    assert distances
    assert max(distances) < 1e-6


@pytest.mark.timeout(3600)
def test_rl_numerics_check_finds_one_model_in_sampler_and_trainer_at_each_depth(folder: Path, tmp_path: Path) -> None:
    settings = ("renderer_name=qwen3_instruct", "group_size=1", "groups_per_batch=1", "max_steps=6", "lora_rank=4")
    task = ("task.num_pages_min=2", "task.num_pages_max=2", "task.page_chars=400", "max_tokens=96")
    with environment_of(calling(folder, tmp_path / "calling"), tmp_path / "served") as environment:
        metrics = run("rl_numerics_check.train", environment, tmp_path / "log", *settings, *task)
    assert max(each["env/all/turns_per_episode"] for each in metrics) > 1
    assert max(each["optim/kl_sample_train_v1"] for each in metrics) < 1e-4
    assert max(each["optim/kl_sample_train_v2"] for each in metrics) < 1e-6
