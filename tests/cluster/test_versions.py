"""A node with another version of a package than the controller's is refused before any rank works there."""

import importlib.metadata
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshrl.testing.cluster import Cluster, Host
from tests.cluster.jobs import answered, begun, do
from tests.cluster.version_jobs import joined, reserved


@pytest.fixture(scope="module")
def three() -> Iterator[Cluster]:
    with Cluster(3, resources=[{}, {"rollout": 1}, {"rollout": 1}]) as cluster:
        yield cluster


def make_older(host: Host) -> str:
    """Let a host have another version of torch; the one that others have."""
    files = importlib.metadata.distribution("torch").files or []
    metadata = next(Path(str(file.locate())) for file in files if file.name == "METADATA")
    text = re.sub(r"^Version: .*$", "Version: 1.2.3", metadata.read_text("utf-8"), count=1, flags=re.MULTILINE)
    head = text.partition("\n\n")[0]
    host.run(["sh", "-c", f"printf '%s\\n' \"$1\" > /tmp/METADATA && mount --bind /tmp/METADATA {metadata}", "-", head])
    return importlib.metadata.version("torch").partition("+")[0]


def test_a_node_that_joins_later_is_refused_and_the_others_go_on(three: Cluster) -> None:
    _, second, third = three.hosts
    third.kill()
    controller = begun(three, joined)
    third._switch_on()
    version = make_older(third)
    node = third.begin_node()
    assert node
    third.wait_for_node(node)
    told, hosts = answered(controller)
    assert hosts == [second.name]
    assert re.search(rf"{third.name} \({third.address}\) +torch +{version} +1\.2\.3$", told, re.MULTILINE), told


def test_a_node_is_refused_with_a_table_of_versions(three: Cluster) -> None:
    """The last test on these hosts. Nodes that have the same are not named."""
    version = make_older(three.hosts[1])
    told = do(three, reserved)
    assert re.search(rf"^  {three.hosts[1].address} +torch +{version} +1\.2\.3$", told, re.MULTILINE), told
    assert three.hosts[0].address not in told
    assert f"pip install torch=={version}" in told
