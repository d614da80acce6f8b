"""What meshes ask for, and how many nodes have room for it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshrl.errors import ConfigError
from meshrl.run.launch import Need, nodes_for


def test_so_many_nodes_have_room() -> None:
    cases: list[tuple[list[Need], int, int | None, int]] = [
        ([Need("a", 8, 1, 1)], 8, None, 1),
        ([Need("a", 8, 1, 1), Need("b", 1, 1, 0.5)], 8, None, 2),
        ([Need("a", 3, 1, 2)], 3, None, 3),  # two GPUs of a rank are on one node
        ([Need("a", 4, 1, 0.5)], 2, None, 1),
        ([Need("a", 3, 1, 0.6)], 2, None, 2),  # a share does not lie across two GPUs
        ([Need("a", 8, 4, 1)], 8, 16, 2),
        ([Need("a", 5, 1, 0)], 0, None, 1),
        ([Need("a", 2, 1, 1, {"accelerator_type:H100": 0.001})], 8, 16, 1),  # Ray itself gives it to a node
        ([], 0, 1, 1),
    ]
    for needs, gpus, cpus, nodes in cases:
        assert (nodes_for(needs, gpus, cpus), needs) == (nodes, needs)


@given(st.lists(st.tuples(st.integers(1, 20), st.integers(1, 4), st.sampled_from([0, 0.25, 0.5, 1, 2, 4])), max_size=4))
def test_no_fewer_nodes_than_what_is_asked_for_in_all(asked: list[tuple[int, int, float]]) -> None:
    needs = [Need(str(number), *each) for number, each in enumerate(asked)]
    nodes = nodes_for(needs, 4, 8)
    assert nodes * 4 >= sum(need.ranks * need.gpus for need in needs)
    assert nodes * 8 >= sum(need.ranks * need.cpus for need in needs)


def test_a_rank_that_no_node_has_room_for_is_named() -> None:
    custom = {"highmem": 1.0, "none": 0.0, "accelerator_type:H100": 0.001}
    for need, told in (
        (Need("a", 1, 1, 16), "a rank of the mesh 'a' asks for .*, and a node has .*8 GPU"),
        (Need("a", 1, 64, 0), "a rank of the mesh 'a' asks for .*, and a node has .*16 CPU and 8 GPU"),
        (Need("a", 1, 1, 0, custom), "for highmem = 1, and nodes"),
    ):
        with pytest.raises(ConfigError, match=told):
            nodes_for([need], 8, 16)
