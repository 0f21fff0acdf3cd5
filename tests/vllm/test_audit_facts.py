# SPDX-License-Identifier: Apache-2.0
"""What is compared of which model: units of ranks, stages and groups, and the sides of a page."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from attnstore_vllm.config.audit import BY_DEFAULT, AuditConfig
from attnstore_vllm.connector import audit_facts
from attnstore_vllm.connector.audit_facts import comparisons_of, units_of
from attnstore_vllm.connector.build import _config as settings_of
from attnstore_vllm.connector.nodes import check_nodes
from attnstore_vllm.connector.page_contents import latent_sides, pages_of_groups, state_sides
from attnstore_vllm.errors import UnsupportedError
from attnstore_vllm.identity.rank import GroupPages, KvFacts, PageSide, RankDescription
from attnstore_vllm.policy.kv_compare import KEY, VALUE
from attnstore_vllm.transfer.geometry import Geometry, Group
from attnstore_vllm.transfer.pool import has_room

BLOCK, HEADS, DIM = 16, 2, 8
PAGE = 2 * BLOCK * HEADS * DIM * 2
SIDES = tuple(
    PageSide(name, "bfloat16", (BLOCK, HEADS, DIM), (base, BLOCK * DIM, BLOCK, 0, DIM, DIM, 0, 1))
    for name, base in ((KEY, 0), (VALUE, BLOCK * HEADS * DIM))
)
AUDIT = AuditConfig()


def described(*groups: GroupPages, device: str = "cpu") -> RankDescription:
    kv = KvFacts(device, "torch.bfloat16", (1,), PAGE, (0,), (1,), "", "", ())
    return RankDescription(kv, None, 8, True, None, None, groups=groups)


def geometry(num_ranks: int = 1, layers: int = 2, **given: Any) -> Geometry:
    groups = given.pop("groups", (Group(BLOCK, tuple(f"l{i}" for i in range(layers))),))
    return Geometry(num_ranks, layers * (PAGE,), groups, 64, **given)


def test_each_rank_and_stage_has_its_layers_where_its_part_of_a_slot_is() -> None:
    """Two stages of three layers and one, of two ranks each."""
    shape = geometry(4, 3, stages=((PAGE,) * 3, (PAGE,)))
    units = units_of(shape, [GroupPages(3)] * 2 + [GroupPages(1)] * 2)
    part = 4 * 3 * PAGE
    assert [(u.rank, u.layer) for u in units] == [
        *((rank, layer) for rank in (0, 1) for layer in range(3)), (2, 0), (3, 0),
    ]  # fmt: skip
    assert [u.at for u in units if u.layer == 0] == [0, part, 2 * part, 3 * part]
    assert [u.at for u in units if u.rank == 0] == [0, 4 * PAGE, 8 * PAGE]


def test_replicas_are_compared_once() -> None:
    shape = geometry(4, replicas=2)
    assert {unit.rank for unit in units_of(shape, [GroupPages(2)] * 4)} == {0, 2}


def test_a_group_has_the_first_regions() -> None:
    groups = (Group(BLOCK, ("a", "b", "c")), Group(BLOCK, ("d",), 1, "window", 32))
    shape = geometry(1, 3, groups=groups)
    ranks = [described(GroupPages(3, SIDES), GroupPages(1, SIDES))]
    spine, window = comparisons_of(AUDIT, shape, ranks, 0)
    assert spine is not None and window is not None
    assert [u.layer for u in spine.units] == [0, 1, 2] and [u.layer for u in window.units] == [0]


def test_a_group_that_cannot_be_told_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    groups = (Group(BLOCK, ("a",)), Group(BLOCK, ("d",), 1, "state"))
    ranks = [described(GroupPages(1, SIDES), GroupPages(1, (), "of a kind"))]
    with caplog.at_level(logging.INFO):
        spine, state = comparisons_of(AUDIT, geometry(1, 1, groups=groups), ranks, 0)
    assert spine is not None and state is None
    assert "audits no KV of cache group 1 (state), since of a kind" in caplog.text
    assert "by the distance of K and V" in caplog.text


@pytest.mark.parametrize("why", ["packed", "drafts", "untold", "ranks differ", "off"])
def test_nothing_is_audited(why: str) -> None:
    ranks = [described(GroupPages(2, SIDES))] * 2
    shape, ahead, config = geometry(2), 0, AUDIT
    if why == "packed":
        shape = Geometry(2, (2 * PAGE,), (Group(BLOCK, ("a", "b")),), 64, is_packed=True)
    if why == "drafts":
        ahead = 1
    if why == "untold":
        ranks = [described(GroupPages(2, (), "fp8"))] * 2
    if why == "ranks differ":
        ranks[1] = described(GroupPages(2, SIDES[::-1]))
    assert comparisons_of(None if why == "off" else config, shape, ranks, ahead) == ()


def test_what_another_connector_brings_is_not_compared(caplog: pytest.LogCaptureFixture) -> None:
    """Which KV it brings a request may say (`do_remote_prefill`): it would end the serving of
    all."""
    alone = described(GroupPages(2, SIDES))
    assert len(comparisons_of(AUDIT, geometry(), [alone], 0)) == 1
    beside = replace(alone, is_alone=False)
    with caplog.at_level(logging.WARNING):
        assert comparisons_of(AUDIT, geometry(2), [alone, beside], 0) == ()
    assert "another connector" in caplog.text


@pytest.mark.parametrize(("why", "is_told"), [("fp8", True), (4096 * "x", False)])
def test_what_a_rank_has_no_room_to_tell_is_left_out(why: str, is_told: bool) -> None:
    """What has none would be a refusal, and the audit is on by default."""
    found = described(GroupPages(2, (), why)).to_json(has_room)
    assert has_room(found)
    assert bool(RankDescription.of_json(json.loads(json.dumps(found))).groups) == is_told


def test_a_rank_without_room_to_tell_of_its_pages_ends_no_start() -> None:
    assert (
        comparisons_of(AUDIT, geometry(2), [described(GroupPages(2, SIDES)), described()], 0) == ()
    )


@pytest.mark.parametrize("why", ["beside", "packed", "fp8", "one group"])
def test_what_cannot_be_by_default_is_no_warning(
    why: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It is asked for in the same words, and warned of, by who asks for it."""
    groups = (Group(BLOCK, ("a",)), Group(BLOCK, ("d",), 1, "state"))
    shape, ranks = geometry(1, 1, groups=groups), [described(*2 * [GroupPages(1, (), "fp8")])]
    if why == "beside":
        ranks = [replace(ranks[0], is_alone=False)]
    if why == "packed":
        shape = replace(shape, is_packed=True)
    if why == "one group":
        ranks = [described(GroupPages(1, SIDES), GroupPages(1, (), "fp8"))]
    for config, level in ((BY_DEFAULT, logging.INFO), (AUDIT, logging.WARNING)):
        caplog.clear()
        with caplog.at_level(logging.INFO):
            found = comparisons_of(config, shape, ranks, 0)
        told = [record.levelno for record in caplog.records if "since" in record.message]
        assert bool(found) == (why == "one group") and set(told) == {level}


@pytest.mark.parametrize(("nodes", "is_on"), [(1, True), (2, False)])
def test_an_engine_over_several_nodes_has_none(nodes: int, is_on: bool) -> None:
    nvme = {"path": "/mnt/kv", "capacity": "1GiB"}
    extra = {"dram": "1GiB", "nvme": nvme}
    config: Any = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config=extra, engine_id="a"),
        parallel_config=SimpleNamespace(nnodes_within_dp=nodes, data_parallel_index=0),
    )
    check_nodes(config)
    assert (settings_of(config).audit is not None) == is_on


def test_a_model_whose_code_ends_in_any_way_is_served() -> None:
    """A compiler of kernels has errors of its own kind."""

    class CompilationError(Exception):
        pass

    class Caches(dict[str, Any]):
        def __missing__(self, name: str) -> Any:
            raise CompilationError("no such kernel")

    group = SimpleNamespace(kv_cache_spec=None, layer_names=["l0"])
    config: Any = SimpleNamespace(kv_cache_groups=[group], num_blocks=1)
    (found,) = pages_of_groups({}, geometry(1, 1), config, Caches())
    assert not found.sides and "CompilationError: no such kernel" in found.why_none


def test_where_bits_are_compared_states_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit_facts, "computes_alike", lambda _: True)
    groups = (Group(BLOCK, ("a",)), Group(BLOCK, ("d",), 1, "state"))
    ranks = [described(GroupPages(1, SIDES), GroupPages(1, SIDES))]
    spine, state = comparisons_of(AUDIT, geometry(1, 1, groups=groups), ranks, 0)
    assert spine is not None and spine.sides is None
    assert state is not None and state.sides is not None
    (alone,) = comparisons_of(AUDIT, geometry(1, 1), [described(GroupPages(1, (), "fp8"))], 0)
    assert alone is not None and alone.sides is None, "bits need no sides"


def test_pages_that_have_no_room_for_the_sides_are_refused() -> None:
    shape = replace(geometry(), regions=(PAGE, PAGE // 2))
    assert comparisons_of(AUDIT, shape, [described(GroupPages(2, SIDES))], 0) == ()


def places(side: PageSide) -> Any:
    return audit_facts.side_of(side).places


def test_a_state_has_its_tensors_one_after_the_other() -> None:
    first, second = state_sides([(3, 4), (2, 5, 6)], [torch.bfloat16, torch.float32])
    assert (first.name, first.dtype, second.dtype) == ("state 0", "bfloat16", "float32")
    assert np.array_equal(places(first), np.arange(12).reshape(1, 3, 4))
    assert np.array_equal(places(second), 6 + np.arange(60).reshape(1, 2, 30))
    with pytest.raises(UnsupportedError, match="begins within a number"):
        state_sides([(3,), (4,)], [torch.bfloat16, torch.float32])
    with pytest.raises(UnsupportedError, match="has no distance"):
        state_sides([(3,)], [torch.int8])


def test_a_latent_has_what_is_compressed_and_its_positions() -> None:
    block = torch.zeros(2, 1, 4, 10, dtype=torch.bfloat16)
    latent, positions = latent_sides(block, 7)
    rows = np.arange(80).reshape(8, 1, 10)
    assert np.array_equal(places(latent), rows[:, :, :7])
    assert np.array_equal(places(positions), rows[:, :, 7:])
    (alone,) = latent_sides(block, 10)
    assert alone.name == "latent"
    with pytest.raises(UnsupportedError):
        latent_sides(block.transpose(1, 2), 7)
