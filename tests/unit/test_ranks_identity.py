"""Rank identities and their keys."""

import dataclasses

import pytest

from kvstrata.core.ranks import RankIdentity, all_ranks

FIELDS = {
    f"{d}_{what}": value
    for d in ("tp", "pp", "pcp", "dcp", "dp")
    for what, value in (("rank", 0), ("size", 2))
}


def test_key_names_every_dimension():
    rank = RankIdentity(
        tp_rank=0, tp_size=2, pp_rank=1, pp_size=3, pcp_rank=0, pcp_size=1,
        dcp_rank=3, dcp_size=4, dp_rank=5, dp_size=6,
    )  # fmt: skip
    assert rank.key() == "tp0of2.pp1of3.pcp0of1.dcp3of4.dp5of6"


@pytest.mark.parametrize("field", FIELDS)
def test_every_field_changes_the_key(field):
    # Field fault: keys that leave out a rank dimension.
    base = RankIdentity(**FIELDS)
    assert dataclasses.replace(base, **{field: FIELDS[field] + 1}).key() != base.key()


@pytest.mark.parametrize("field", FIELDS)
def test_no_field_can_be_left_out(field):
    with pytest.raises(TypeError, match=field):
        RankIdentity(**{name: value for name, value in FIELDS.items() if name != field})


@pytest.mark.parametrize("dimension", ["tp", "pp", "pcp", "dcp", "dp"])
@pytest.mark.parametrize(("rank", "size"), [(2, 2), (-1, 2), (0, 0)])
def test_a_rank_outside_its_group(dimension, rank, size):
    with pytest.raises(ValueError, match=f"{dimension}_rank={rank}"):
        RankIdentity(**(FIELDS | {f"{dimension}_rank": rank, f"{dimension}_size": size}))


@pytest.mark.parametrize("value", [True, "0", 0.0, None])
def test_ranks_are_integers(value):
    with pytest.raises(TypeError, match="tp rank and size"):
        RankIdentity(**(FIELDS | {"tp_rank": value}))


def test_all_ranks_lists_each_once_tensor_parallel_fastest():
    ranks = all_ranks(2, 3, 2, dcp_size=1, dp_size=2)
    assert len({rank.key() for rank in ranks}) == len(ranks) == 24
    assert [(rank.tp_rank, rank.pp_rank) for rank in ranks[:6]] == [
        (0, 0),
        (1, 0),
        (0, 1),
        (1, 1),
        (0, 2),
        (1, 2),
    ]
    assert {rank.dp_size for rank in ranks} == {2}


def test_all_ranks_of_one():
    assert [rank.key() for rank in all_ranks(1, 1, 1)] == ["tp0of1.pp0of1.pcp0of1.dcp0of1.dp0of1"]


def test_all_ranks_refuses_an_empty_dimension():
    with pytest.raises(ValueError, match="pcp_size=0"):
        all_ranks(1, 1, 0)
