"""Copy a shipped script, a configuration, rows and a reward into a folder, as a starting point."""

import os
import random
import re
import tomllib
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Final

import msgspec

from meshrl.errors import ConfigError
from meshrl.run.jobs import find_script, shipped_configs

_CONFIG: Final = "config.toml"
_TASK: Final = "task.jsonl"
_REWARD: Final = "reward.py"
_PROGRAM: Final = "program.py"
_ROWS: Final = 600

_TABLE: Final = f"""\
[task]
source = "{_TASK}"
prompt = "PROMPT"
answer = "{{answer}}"
held_out = "all"  # keep a tenth of the prompts for judging, and never train on them; 64 would keep 64 of them
"""

_FUNCTION: Final = '''\
"""What a completion is worth."""


def reward(prompt: str, completion: str, row: dict[str, object]) -> float:
    """1.0 where the completion is the answer. `row` is the line of task.jsonl."""
    return float(completion.strip() == row["answer"])
'''


def copy_script(algorithm: str, folder: Path) -> list[Path]:
    """Copy a shipped algorithm and its inputs into a folder as a starting point, and return the files.

    These are the script, `config.toml`, `task.jsonl` with rows of the quickstart's kind, and `reward.py` if the
    algorithm calls a function, or `program.py` if it plays a program. The models of other runs are those of the current
    folder. `verifiers:TASKSET` instead of an algorithm is `agent` in that environment, which has the rows and plays
    the program. Raises ConfigError if one of these files exists already. Nothing is overwritten.
    """
    environment = algorithm if algorithm.startswith("verifiers:") else ""
    algorithm = "agent" if environment else algorithm
    script = find_script(algorithm)
    shipped = shipped_configs()[f"{algorithm}/quickstart"]
    config = _config(shipped.read_text("utf-8"), script.name, folder, environment)
    texts = {script.name: script.read_text("utf-8"), _CONFIG: config}
    if not environment:
        texts[_TASK] = "".join(_rows())
    if f'"{_REWARD}:' in config:
        texts[_REWARD] = _FUNCTION
    if f'"{_PROGRAM}:' in config:
        texts[_PROGRAM] = files("meshrl.agents").joinpath("speller.py").read_text("utf-8")
    existing = [str(folder / name) for name in texts if (folder / name).exists()]
    if existing:
        raise ConfigError(f"{', '.join(existing)}: exists already and is not overwritten: choose another folder")
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (folder / name).write_text(text, "utf-8")
    return [folder / name for name in texts]


def writer_of(model: Path) -> str | None:
    """Return the shipped configuration whose run writes this model, as `runs/NAME/model`. None without one."""
    if model.name != "model":
        return None
    for name, path in shipped_configs().items():
        run: object = tomllib.loads(path.read_text("utf-8")).get("run")
        if isinstance(run, dict) and run.get("name") == model.parent.name:
            return name
    return None


def _config(shipped: str, script: str, folder: Path, environment: str) -> str:
    name = re.sub(r"[^\w.-]", "-", folder.resolve().name).lstrip("-.") or "mine"
    _, _, text = shipped.partition("\n#\n")
    # The chat template of an agent's model ends the prompt.
    table = _TABLE.replace("PROMPT", "{question}" if "\n[agent]\n" in text else "{question}>")
    program = f'"{_PROGRAM}:solve"'
    if environment:
        options = '.options.env.agent]\nruntime = { type = "subprocess" }'  # of both, which then share a process
        table = f'[task]\nsource = "{environment}"\nheld_out = "all"\n\n[task{options}\n'
        program = f'"{environment}"\n\n[agent{options}'
    changes = {
        r"^algorithm\s*=.*$": f'algorithm = "{script}"',
        r"(?<=^\[run\]\n)name\s*=.*$": f'name = "{name}"',
        r"^\[task\]\n(?:(?!\[).*\n)*?(?=\n*(?:\[|\Z))": table,
        r'(?<=^function = )"exact_match"$': f'"{_REWARD}:reward"',
        r'(?<=^source = )"meshrl\.agents\.speller:solve"$': program,
    }
    for pattern, value in changes.items():
        text = re.sub(pattern, value.replace("\\", r"\\"), text, flags=re.MULTILINE)
    start = Path(os.path.relpath(Path.cwd(), folder.resolve()))
    return re.sub(r'(?m)(?<=^model = ")(runs/.*)(?="$)', lambda match: (start / match[1]).as_posix(), text)


def _rows() -> Iterator[str]:
    """Yield pronounceable words of three to eight letters with their reversals, always the same."""
    letters = random.Random(0)
    words: dict[str, None] = {}
    while len(words) < _ROWS:
        sounds = ("bcdfghklmnprstvz", "aeiou")
        first = letters.randrange(2)
        words["".join(letters.choice(sounds[(first + at) % 2]) for at in range(letters.randint(3, 8)))] = None
    for word in words:
        yield msgspec.json.encode({"question": word, "answer": word[::-1]}).decode() + "\n"
