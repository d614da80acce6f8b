import os
import tempfile

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # no list of prices from the network
os.environ["MSWEA_SILENT_STARTUP"] = "1"
os.environ["MSWEA_COST_TRACKING"] = "ignore_errors"
os.environ["MSWEA_GLOBAL_CONFIG_DIR"] = tempfile.gettempdir()

from pathlib import Path

import minisweagent
import yaml
from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel
from minisweagent.models.litellm_textbased_model import LitellmTextbasedModel


def run(client, row, model, shipped):
    config = yaml.safe_load((Path(minisweagent.package_dir) / "config" / shipped).read_text())
    texts = {name: config["agent"][name] for name in ("system_template", "instance_template")}
    place = {"api_base": str(client.base_url), "api_key": client.api_key}
    keys = {key: value for key, value in config["model"].items() if key != "model_kwargs"}
    policy = model(model_name="openai/policy", model_kwargs={"drop_params": True, **place}, **keys)
    agent = DefaultAgent(policy, LocalEnvironment(), step_limit=100, cost_limit=0, **texts)
    return float(agent.run(row["prompt"])["submission"].strip().endswith(row["answer"]))


def plain(client, row):
    return run(client, row, LitellmModel, "mini.yaml")


def texts(client, row):
    return run(client, row, LitellmTextbasedModel, "mini_textbased.yaml")
