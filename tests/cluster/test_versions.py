import importlib.metadata
import re
from pathlib import Path

from tests.cluster.jobs import answered, begun, joined
from tests.support.cluster import Cluster, Host


def make_older(host: Host) -> str:
    files = importlib.metadata.distribution("torch").files or []
    metadata = next(Path(str(file.locate())) for file in files if file.name == "METADATA")
    text = re.sub(r"^Version: .*$", "Version: 1.2.3", metadata.read_text("utf-8"), count=1, flags=re.MULTILINE)
    head = text.partition("\n\n")[0]
    host.run(["sh", "-c", f"printf '%s\\n' \"$1\" > /tmp/METADATA && mount --bind /tmp/METADATA {metadata}", "-", head])
    return importlib.metadata.version("torch").partition("+")[0]


def test_a_node_that_joins_later_is_refused_and_the_others_go_on() -> None:
    with Cluster(3, resources=[{}, {"rollout": 1}, {"rollout": 1}]) as cluster:
        _, second, third = cluster.hosts
        third.kill()
        controller = begun(cluster, joined)
        third._switch_on()
        version = make_older(third)
        node = third.begin_node()
        assert node
        third.wait_for_node(node)
        told, hosts = answered(controller)
    assert hosts == [second.name]
    assert re.search(rf"{third.name} \({third.address}\) +torch +{version} +1\.2\.3$", told, re.MULTILINE), told
