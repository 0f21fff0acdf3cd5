# SPDX-License-Identifier: Apache-2.0
"""What is read of media, where, how often and under which of vLLM's names."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from vllm.config import MultiModalConfig
from vllm.config.ec_manager_config import EncoderCacheManagerConfig
from vllm.multimodal.inputs import (
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    MultiModalSharedField,
    PlaceholderRange,
)
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

from attnstore_vllm.connector.media_data import read_media, why_no_media
from attnstore_vllm.index.keys import CONTENT_BYTES
from attnstore_vllm.scheduler import media
from attnstore_vllm.scheduler.media import ALL_TOKENS, Content, MediaNames, RequestMedia
from tests.vllm_objects import Clock


def item(**fields: Any) -> MultiModalKwargsItem:
    field = MultiModalSharedField(batch_size=1)
    return MultiModalKwargsItem({k: MultiModalFieldElem(v, field) for k, v in fields.items()})


def digest(data: Any) -> bytes:
    found = read_media(data)
    assert isinstance(found, Content), found
    return found.digest()


GRID = torch.arange(6, dtype=torch.float32).reshape(2, 3)
OTHERS: list[Any] = [
    item(x=GRID.clone()),
    item(x=GRID.to(torch.bfloat16)),
    item(x=GRID.to(torch.float16)),
    item(x=GRID.reshape(3, 2)),
    item(x=GRID.flatten()),
    item(x=GRID.numpy()),
    item(x=GRID.T),
    item(x=[GRID[0], GRID[1]]),
    item(x=[[GRID[0], GRID[1]]]),
    item(y=GRID),
    item(x=GRID, y=GRID),
    item(x=GRID, y=1),
    item(x=GRID, y=1.0),
    item(x=GRID, y=True),
    item(x=GRID, y="1"),
    item(x=GRID, y=b"1"),
    item(x=torch.zeros(0)),
    item(x=torch.tensor(0.0)),
    item(x=torch.tensor(-0.0)),
    item(),
]


def test_whatever_differs_is_told_apart() -> None:
    assert len({digest(other) for other in OTHERS}) == len(OTHERS)
    for i in range(6):
        changed = GRID.clone()
        changed.view(torch.uint8).reshape(-1)[4 * i] += 1
        assert digest(item(x=changed)) != digest(item(x=GRID))


def test_what_is_the_same_is_so_however_it_lies_in_memory() -> None:
    wide = torch.zeros(2, 6)
    wide[:, ::2] = GRID
    for same in (wide[:, ::2], GRID.T.contiguous().T, GRID.clone().requires_grad_()):
        assert digest(item(x=same)) == digest(item(x=GRID))
    array = GRID.numpy().copy()
    array.flags.writeable = False
    assert digest(item(x=array)) == digest(item(x=np.asfortranarray(array)))
    assert digest(item(a=GRID, b=1)) == digest(item(b=1, a=GRID))


DEEP: Any = GRID
for _ in range(50):
    DEEP = [DEEP]


@pytest.mark.parametrize(
    "data",
    [
        None, item(x=None), item(address=7, monotonic_id=1, signature=[1]), object(),
        item(x=object()), item(x=DEEP), item(x=torch.zeros(2, device="meta")),
        item(x=torch.zeros(2, 2).to_sparse()), item(x=np.array([object()])),
        item(x=torch.zeros(2, dtype=torch.complex64)), {"x": GRID},
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_said(data: Any) -> None:
    assert isinstance(read_media(data), str)


# ---- of requests ----------------------------------------------------------------------------

PLACE = PlaceholderRange(40, 40)


def feature(data: Any, name: str = "cam-7", at: PlaceholderRange = PLACE) -> MultiModalFeatureSpec:
    return MultiModalFeatureSpec(data, "image", name, at)


def asks(*features: MultiModalFeatureSpec) -> Request:
    return Request(
        "a", [1] * 200, SamplingParams(max_tokens=1), None, mm_features=list(features),
        block_hasher=lambda r: [f.identifier for f in r.mm_features][len(r.block_hashes) :],
    )  # fmt: skip


def come(names: MediaNames, *features: MultiModalFeatureSpec) -> RequestMedia:
    found = RequestMedia(names, asks(*features))
    found.begin()
    return found


def content(*features: MultiModalFeatureSpec) -> bytes:
    return come(MediaNames(read_media), *features).spans[0].content


def test_place_and_kind_are_part_of_it() -> None:
    one = feature(item(x=GRID))
    mask = torch.ones(40, dtype=torch.bool)
    other_mask = mask.clone()
    other_mask[3] = False
    found = [
        content(one),
        content(replace(one, identifier="cam-8")),
        content(replace(one, modality="video")),
        content(replace(one, data=item(x=GRID + 1))),
        content(replace(one, mm_position=PlaceholderRange(40, 39))),
        content(replace(one, mm_position=PlaceholderRange(40, 40, mask))),
        content(replace(one, mm_position=PlaceholderRange(40, 40, other_mask))),
    ]
    assert len(set(found)) == len(found)
    assert content(one) == content(feature(item(x=GRID.clone()), at=PlaceholderRange(90, 40)))


class Uuid(str):
    """Counts how often it is encoded, and its looks."""

    encoded = 0

    def encode(self, *how: Any) -> bytes:
        Uuid.encoded += 1
        return super().encode(*how)


def test_a_uuid_of_any_length_is_hashed_once_a_request() -> None:
    long = Uuid(":renderer0-mm-0-" * (1 << 15) + "x")
    names = MediaNames(read_media)
    names.end_step()
    found = come(names, feature(item(x=GRID), long))
    wait_until(lambda: not found.waits())
    for _ in range(10):
        assert not found.waits()
        assert found.known_tokens() == ALL_TOKENS
    assert Uuid.encoded == 1
    assert len(found.spans[0].content) == CONTENT_BYTES


BIG = torch.zeros(media.STEP_BYTES, dtype=torch.uint8)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def counting(read: Callable[[Any], Content | str], counts: list[int]) -> media.Read:
    def read_and_count(data: Any) -> Content | str:
        found = read(data)
        if isinstance(found, str):
            return found

        def made() -> bytes:
            counts.append(found.num_bytes)
            return found.digest()

        return Content(found.num_bytes, made)

    return read_and_count


def test_a_step_digests_so_much_and_a_thread_the_rest() -> None:
    counts: list[int] = []
    names = MediaNames(counting(read_media, counts))
    small = [item(x=torch.full((20_000,), i)) for i in range(30)]  # 160 KB each
    asked = [come(names, feature(data, f"n{i}")) for i, data in enumerate(small)]
    known = [one for one in asked if not one.is_pending]
    assert len(known) == 1  # of the first step
    big = come(names, feature(item(x=BIG), "big"))
    assert big.waits() and big.known_tokens() == 40 and not big.spans
    for one in [*asked, big]:
        names.end_step()
        while one.is_pending:
            names.end_step()
            one.waits()
    assert big.known_tokens() == ALL_TOKENS
    # The same object again, as vLLM's cache gives it to a session's next turn: it is not read.
    before = len(counts)
    again = come(names, feature(small[3], "n3"), feature(small[4], "n4"))
    assert not again.is_pending
    assert len(counts) == before
    assert again.spans[0] == asked[3].spans[0]
    names.close()


def test_what_is_late_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    names = MediaNames(read_media, clock=clock)
    names.left = 0  # the step has spent it
    found = come(names, feature(item(x=GRID)))
    assert found.waits()
    clock.now += media.DEADLINE_S
    log = logging.getLogger(media.__name__)
    log.addHandler(caplog.handler)
    assert not found.waits()
    log.removeHandler(caplog.handler)
    assert found.known_tokens() == 40
    assert "within 2.0 s" in caplog.text
    names.end_step()
    # What is not known is not the name's owner's either.
    assert come(names, feature(item(x=GRID))).request.mm_features[0].identifier != "cam-7"


def test_a_name_is_the_first_contents() -> None:
    names = MediaNames(read_media)
    cat, dog = item(x=GRID), item(x=GRID + 1)

    def name(data: Any, under: str = "cam-7") -> str:
        names.end_step()
        request = come(names, feature(data, under)).request
        (found,) = request.block_hashes
        assert found == request.mm_features[0].identifier
        return found

    assert name(cat) == "cam-7" == name(cat)
    assert name(dog) == name(dog) != "cam-7"
    assert name(None) == name(None) not in {"cam-7", name(dog)}
    assert name(dog, "cam-8") == "cam-8"
    shared = feature(dog)
    come(names, shared)
    assert shared.identifier == "cam-7"  # the others of an `n` have it too


def test_a_name_is_of_the_weights_that_it_came_under() -> None:
    """vLLM's encoder may still have what others made. Those that come back are not known again."""
    names = MediaNames(read_media)

    def name() -> str:
        names.end_step()
        return str(come(names, feature(item(x=GRID))).request.mm_features[0].identifier)

    assert name() == "cam-7"
    found = {"cam-7"}
    for number in (2, 3):
        names.weights_changed()
        found |= {name(), name()}
        assert len(found) == number


@pytest.mark.parametrize("given", [None, "some.other.Manager"])
def test_a_cache_of_the_encoder_that_is_not_vllms(given: str | None) -> None:
    """Of any content, from any process, by the name."""
    config: Any = SimpleNamespace(
        model_config=SimpleNamespace(multimodal_config=None),
        ec_transfer_config=None,
        ec_manager_config=EncoderCacheManagerConfig(encoder_cache_manager_cls=given),
    )
    why = why_no_media(config)
    assert (why is None) == (given is None)
    assert why is None or "--ec-manager-config" in why


@pytest.mark.parametrize("rate", [None, 0.0, 0.3])
def test_pruned_videos(rate: float | None) -> None:
    """vLLM puts text behind one at its place by what it encodes in the same step. Behind a hit it
    encodes nothing: the text is elsewhere, and so is its KV."""
    config: Any = SimpleNamespace(
        model_config=SimpleNamespace(multimodal_config=MultiModalConfig(video_pruning_rate=rate)),
        ec_transfer_config=None,
        ec_manager_config=None,
    )
    why = why_no_media(config)
    assert (why is None) == (not rate)
    assert why is None or "--video-pruning-rate" in why


def test_names_beyond_those_that_are_remembered_get_an_alias(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(media, "NAMES_MAX", 1)
    names = MediaNames(read_media)
    assert come(names, feature(item(x=GRID))).request.mm_features[0].identifier == "cam-7"
    found = come(names, feature(item(x=GRID), "cam-8"))
    assert found.request.mm_features[0].identifier != "cam-8"
    assert found.known_tokens() == ALL_TOKENS


def test_a_sessions_later_input_under_the_name_of_another() -> None:
    """vLLM has looked it up when it is seen: nothing of it is saved, nor of those that run under
    its name."""
    names = MediaNames(read_media)
    runs, session = come(names, feature(item(x=GRID))), come(names)
    cast("list[Any]", session.request.mm_features).append(feature(item(x=GRID + 1)))
    assert session.known_tokens() == 40
    mixed = session.scheduled()
    assert runs.has(mixed) and not session.spans
    assert come(names, feature(item(x=GRID))).request.mm_features[0].identifier != "cam-7"
    cast("list[Any]", session.request.mm_features).append(
        feature(item(x=GRID), "own", PlaceholderRange(100, 40))
    )
    assert not session.scheduled() and session.known_tokens() == 40
    other = come(names)
    cast("list[Any]", other.request.mm_features).append(feature(item(x=GRID), "another"))
    assert not other.scheduled() and other.known_tokens() == ALL_TOKENS


def test_where_no_media_are_read_names_stay_as_they_are() -> None:
    for names in (MediaNames(read_media, why_not="shm"), MediaNames(read_media, counted=True)):
        for data in (item(x=GRID), item(x=GRID + 1), None):
            found = come(names, feature(data))
            assert found.known_tokens() == 40
            assert found.request.mm_features[0].identifier == "cam-7"


def test_an_alias_is_no_name_that_a_client_may_give() -> None:
    """KV events tell it to routers. It stays the dog's where a client gives it first."""
    names = MediaNames(read_media)
    cat, dog = item(x=GRID), item(x=GRID + 1)

    def name(data: Any, under: str = "cam-7") -> str:
        names.end_step()
        return come(names, feature(data, under)).request.mm_features[0].identifier

    name(cat)
    alias = name(dog)
    assert name(cat, alias) == name(cat, alias) not in {alias, "cam-7"}
    assert name(dog) == alias
