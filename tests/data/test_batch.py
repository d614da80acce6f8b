"""Batches: splitting, joining, travelling, and what they refuse."""

import copy

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshrl.data import Batch, Column, Ragged
from meshrl.errors import DataError
from meshrl.mesh import Array

DTYPES = [bool, np.int8, np.uint16, np.int64, np.float16, np.float32, np.complex64, ml_dtypes.bfloat16]
SPECIAL = [0.0, -0.0, 1.5, np.nan, np.inf]
TEXT = st.text("ab é☃", max_size=3)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | TEXT | st.binary(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXT, inner, max_size=2),
    max_leaves=4,
)


def numbers(count: int, dtype: type, seed: int) -> Array:
    """Any values, special ones among them, of a dtype."""
    generator = np.random.default_rng(seed)
    if np.dtype(dtype).kind in "bui":
        return generator.integers(0, 2 if dtype is bool else 100, count).astype(dtype)
    return generator.choice(SPECIAL, count).astype(dtype)


@st.composite
def batches(draw: st.DrawFn, max_rows: int = 9) -> Batch:
    """Any number of rows, and of columns of every kind; ragged ones with shared or with their own lengths."""
    rows = draw(st.integers(0, max_rows))
    shared = draw(st.lists(st.integers(0, 6), min_size=rows, max_size=rows))
    columns: dict[str, Column] = {}
    for index, kind in enumerate(draw(st.lists(st.sampled_from(["row", "ragged", "objects"]), min_size=1, max_size=5))):
        trailing = draw(st.sampled_from([(), (2,), (3, 0)]))
        dtype, seed = draw(st.sampled_from(DTYPES)), draw(st.integers(0, 99))
        if kind == "row":
            size = rows * int(np.prod(trailing))
            columns[f"row{index}"] = numbers(size, dtype, seed).reshape(rows, *trailing)
        elif kind == "ragged":
            own = st.lists(st.integers(0, 6), min_size=rows, max_size=rows)
            lengths = draw(st.just(shared) | own)
            values = numbers(sum(lengths) * int(np.prod(trailing)), dtype, seed)
            columns[f"ragged{index}"] = Ragged(
                values.reshape(sum(lengths), *trailing), np.cumsum([0, *lengths], dtype=np.int64)
            )
        else:
            columns[f"objects{index}"] = tuple(draw(st.lists(VALUES, min_size=rows, max_size=rows)))
    return Batch(columns)


def rollouts(rows: int = 4) -> Batch:
    """A batch with standard columns; row i has i + 1 tokens."""
    lengths = range(1, rows + 1)
    return Batch.of(
        prompt=[f"prompt {i}" for i in range(rows)],
        tokens=Ragged.of([np.arange(n) + 10 * n for n in lengths], np.int32),
        loss_mask=Ragged.of([[False] * (n - 1) + [True] for n in lengths], bool),
        rewards=np.arange(rows, dtype=np.float32),
        groups=np.arange(rows) // 2,
    )


@given(batches(), st.integers(1, 12))
def test_join_undoes_split_also_of_parts_that_are_made_anew_by_the_plan(batch: Batch, n: int) -> None:
    assert batch == batch.only(*reversed(batch.names)), "the order of columns is no difference"
    assert batch == batch.part(np.arange(len(batch))), "nor is the origin"
    parts, plan = batch.split(n), batch.plan(n)
    assert len(parts) == n
    assert sum(map(len, parts)) == len(batch)
    whole = Batch.join(parts)
    assert whole == batch
    assert whole.names == batch.names
    assert whole.origins == ()
    assert Batch.join(parts, plan) == batch
    anew = [Batch(dict(batch.part(rows).columns)) for rows in plan]
    assert [part.origins for part in anew] == [()] * n
    assert Batch.join(anew, plan) == batch


@given(batches(), st.integers(1, 4), st.integers(1, 4))
def test_splits_nest(batch: Batch, outer: int, inner: int) -> None:
    parts = batch.split(outer)
    again = [Batch.join(part.split(inner)) for part in parts]
    assert again == parts
    assert [len(part.origins) for part in again] == [1] * outer
    assert Batch.join(again) == batch
    flat = [small for part in parts for small in part.split(inner)]
    assert [len(part.origins) for part in flat] == [2] * outer * inner


@given(batches(), st.integers(1, 5), st.integers(0, 3), st.integers(0, 3))
def test_repeat_on_the_ranks_is_repeat_before(batch: Batch, n: int, times: int, again: int) -> None:
    joined = Batch.join([part.repeat(times).repeat(again) for part in batch.split(n)])
    assert joined == batch.repeat(times * again)
    nested = Batch.join([Batch.join([s.repeat(times) for s in part.split(2)]) for part in batch.split(n)])
    assert nested == batch.repeat(times)


@given(batches(), st.integers(1, 5), st.data())
def test_ranks_may_reorder_filter_and_stream(batch: Batch, n: int, data: st.DataObject) -> None:
    kept = np.array(data.draw(st.lists(st.booleans(), min_size=len(batch), max_size=len(batch))), bool)
    numbered = batch.assign(number=np.arange(len(batch)), kept=kept)
    chunks: list[Batch] = []
    for part in numbered.split(n):
        shuffled = part.select(data.draw(st.permutations(range(len(part)))))
        left = shuffled.select(shuffled.row("kept"))
        cut = data.draw(st.integers(0, len(left)))
        chunks += [left.select(range(cut)), left.select(range(cut, len(left)))]
    assert Batch.join(data.draw(st.permutations(chunks))) == numbered.select(kept)


def test_copies_of_a_row_stay_in_the_order_they_were_given() -> None:
    parts = [part.select(np.zeros(50, np.int64)).assign(copy=np.arange(50)) for part in rollouts().split(4)]
    joined = Batch.join(parts)
    assert joined.rewards.tolist() == [row for row in range(4) for _ in range(50)]
    assert joined.row("copy").tolist() == list(range(50)) * 4


def test_parts_without_rows_and_columns_are_left_out() -> None:
    batch = rollouts()
    nothing = Batch({})
    assert Batch.join([nothing, *batch.split(2), nothing]) == batch
    assert Batch.join([nothing, nothing]) == nothing
    assert Batch.join([]) == Batch.concat([]) == nothing
    empty = batch.select([])
    assert Batch.join([nothing, empty.split(2)[1]]) == empty
    assert Batch.join(empty.split(3)).origins == ()
    assert Batch.concat(empty.split(3)).origins[0].shape == (0,)


def test_parts_that_do_not_fit_together_are_refused() -> None:
    batch = rollouts()
    one, two = batch.split(2)
    other, ragged = two.assign(prompt=np.zeros(len(two))), Batch.of(x=Ragged.of([[1]], np.int32))
    for together, parts, message in (
        (Batch.join, [one, batch], "part 0 was split 1 times, part 1 0 times"),
        (Batch.join, [one, two.only("tokens")], r"part 0 has prompt, .* part 1 has tokens"),
        (Batch.join, [one, other], "`prompt` differs between parts: str, float64"),
        (Batch.concat, [one, other], "`prompt` differs between parts: str, float64"),
        (Batch.join, [Batch.of(x=np.zeros(1, np.float32)), Batch.of(x=np.zeros(1))], "`x` differs .* float32, float64"),
        (Batch.join, [ragged, Batch.of(x=np.zeros((1, 2), np.int32))], r"`x` differs .* ragged int32, int32\[2\]"),
    ):
        with pytest.raises(DataError, match=message):
            together(parts)
    anew = [Batch.of(x=np.zeros(len(part) + 1)) for part in (one, two)]
    with pytest.raises(DataError, match=r"have \[3, 3\] rows for \[2, 2\] rows .* assign, select or repeat"):
        Batch.join(anew, batch.plan(2))
    assert len(Batch.join(anew)) == 6, "without a plan they follow one another"


@given(st.lists(st.integers(0, 50), max_size=40), st.integers(1, 9))
def test_a_plan_is_a_balanced_partition(lengths: list[int], n: int) -> None:
    batch = Batch.of(tokens=Ragged.of([[0] * length for length in lengths], np.int32))
    plan = batch.plan(n)
    assert sorted(np.concatenate(plan).tolist()) == list(range(len(lengths)))
    assert all(rows.dtype == np.int64 and (np.diff(rows) > 0).all() for rows in plan)
    loads = [sum(lengths[row] for row in rows) for rows in plan]
    assert max(loads) - min(loads) <= max(lengths, default=0)
    again = batch.plan(n)
    assert all((one == two).all() for one, two in zip(plan, again, strict=True))


def test_a_plan_without_tokens_balances_rows_and_else_counts_those_of_the_longest_token_column() -> None:
    plan = Batch.of(prompt=["a"] * 7).plan(3)
    assert [rows.tolist() for rows in plan] == [[0, 3, 6], [1, 4], [2, 5]]
    plan = Batch.of(tokens=Ragged.of([[]] * 4, np.int32)).plan(2)
    assert [rows.tolist() for rows in plan] == [[0, 2], [1, 3]]
    with pytest.raises(DataError, match="into 0 parts: give a number from 1"):
        rollouts().plan(0)
    short, long = Ragged.of([[1], [2]], np.int32), Ragged.of([[1, 1, 1], []], np.int64)
    assert Batch.of(a=long, tokens=short).lengths.tolist() == [1, 1]
    assert Batch.of(a=short, b=long).lengths.tolist() == [3, 0]
    assert Batch.of(a=np.zeros(2)).lengths.tolist() == [1, 1]


@given(batches(), st.integers(1, 3))
def test_the_wire_carries_everything(batch: Batch, n: int) -> None:
    for sent in (batch, *batch.split(n)):
        header, buffers = sent.to_wire()
        received = Batch.from_wire(header, [bytearray(buffer) for buffer in buffers])
        assert received == sent
        assert received.names == sent.names
        assert [level.tolist() for level in received.origins] == [level.tolist() for level in sent.origins]
    assert Batch.join([Batch.from_wire(*part.to_wire()) for part in batch.split(n)]) == batch


def test_arrays_are_copied_neither_way_and_offsets_of_the_same_lengths_sent_once() -> None:
    sent = rollouts()
    header, buffers = sent.to_wire()
    received = Batch.from_wire(header, buffers)
    for one, two in ((sent.row("rewards"), received.row("rewards")), (sent.tokens.values, received.tokens.values)):
        assert np.shares_memory(one, two)
    memory = [bytearray(buffer) for buffer in buffers]
    landed = Batch.from_wire(header, memory)
    assert any(np.shares_memory(landed.tokens.values, np.frombuffer(buffer, np.uint8)) for buffer in memory)
    assert not landed.tokens.values.flags.writeable
    assert not landed.row("rewards").flags.writeable

    columns = {name: Ragged.of([[1, 2], [3]], np.int8) for name in "abcd"}
    assert len(Batch(columns).to_wire()[1]) == 5
    received = Batch.from_wire(*Batch(columns).split(2)[0].to_wire())
    assert received.ragged("a").offsets is received.ragged("d").offsets


def test_what_cannot_travel_and_a_damaged_wire_form_are_refused() -> None:
    with pytest.raises(DataError, match=r"column `when` cannot be sent: .* keep to None, bool"):
        Batch.of(when=[object()]).to_wire()
    with pytest.raises(DataError, match="column `big` cannot be sent"):
        Batch.of(big=[2**64]).to_wire()
    header, buffers = rollouts().to_wire()
    for damaged in (
        (header[:-1], buffers),
        (b"\xc0", buffers),
        (header, buffers[:-1]),
        (header, [buffer[:-1] for buffer in buffers]),
        (header, buffers[::-1]),
        (header.replace(b"int32", b"int99"), buffers),
        (bytes([header[0], header[1] + 1]) + header[2:], buffers),  # a column more
        (Batch.of(deep=[0]).to_wire()[0], [b"\x91" * 100_000 + b"\xc0"]),
    ):
        with pytest.raises(DataError, match="not a batch, or a damaged one"):
            Batch.from_wire(*damaged)


def test_a_batch_does_not_alias_what_the_caller_can_write() -> None:
    memory = np.arange(6.0)
    rows = np.array([1, 0])
    names = ["a", "b", "c"]
    batch = Batch.of(x=memory[:3], y=Ragged(memory[3:], [0, 1, 1, 3]), names=names)
    part = batch.part(rows)
    memory[:] = 9
    rows[:] = 2
    names[0] = "changed"
    assert batch.row("x").tolist() == [0, 1, 2]
    assert batch.ragged("y").values.tolist() == [3, 4, 5]
    assert batch.objects("names") == ("a", "b", "c")
    assert part.origins[0].tolist() == [1, 0]


def test_deepcopy_shares_arrays_and_copies_what_can_be_written() -> None:
    plain = rollouts()
    assert copy.deepcopy(plain) is plain
    batch = plain.assign(row=[{"words": ["a"], "when": {1}} for _ in range(4)]).split(2)[0]
    private = copy.deepcopy(batch)
    assert private == batch
    assert private.tokens is batch.tokens
    assert private.origins == batch.origins
    value = private.objects("row")[0]
    assert isinstance(value, dict)
    value["words"].append("b")
    value["when"].add(2)
    assert batch.objects("row")[0] == {"words": ["a"], "when": {1}}
