# SPDX-License-Identifier: Apache-2.0
"""Names that clients choose: which fields of a request reach its keys, each with why it may.

A field that vLLM gains fails here until a person has said of it what it is.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.request import Request

from attnstore_vllm.connector.media_data import read_media
from attnstore_vllm.scheduler.media import MediaNames, RequestMedia
from attnstore_vllm.scheduler.request import bypasses, make_state
from tests.vllm.scripted import seen

IN_KEYS = {
    "prompt_token_ids": "the tokens themselves",
    "mm_features": "a digest of the data; names stand beside it (scheduler/media.py)",
    "cache_salt": "hashed; it parts tenants, and stands for no content",
    "lora_request": "none of its fields: the digest that the workers tell (scheduler/adapters.py)",
}
LEFT_ALONE = {
    "prompt_embeds": "bypasses()",
    "prompt_is_token_ids": "says which tokens prompt_embeds replace",
    "pooling_params": "bypasses()",
}
NOT_IN_KEYS = {
    "request_id", "sampling_params", "arrival_time", "data_parallel_rank", "client_index",
    "current_wave", "priority", "trace_headers", "resumable", "external_req_id", "session_id",
    "kv_hints", "reasoning_ended", "reasoning_parser_kwargs", "abort_immediately",
}  # fmt: skip
OF_A_FEATURE = {
    "data": "digested",
    "modality": "in the content",
    "identifier": "a client's `uuid`, it may be: beside the digest",
    "mm_position": "its length and mask in the content, its offset in the chunk's extra",
    "mm_hash": "not in keys",
}


class Seen:
    """A request that notes what is read of it."""

    def __init__(self, request: Request) -> None:
        self.__dict__.update(request=request, read=set())

    def __getattr__(self, name: str) -> Any:
        self.read.add(name)
        return getattr(self.request, name)


def request(**given: Any) -> Request:
    position = PlaceholderRange(20, 10)
    how: dict[str, Any] = {
        "request_id": "a", "prompt_token_ids": list(range(64)), "pooling_params": None,
        "sampling_params": SamplingParams(max_tokens=1), "cache_salt": "salt",
        "mm_features": [MultiModalFeatureSpec(seen("cat"), "image", "cam-7", position)],
    }  # fmt: skip
    return Request(**{**how, **given})


def keys(asked: Any) -> list[bytes]:
    media = RequestMedia(MediaNames(read_media), asked)
    media.begin()
    state = make_state(asked, bytes(32), b"adapter", 16, media)
    return [state.root, *state.sequence.keys(0, 4)]


def test_each_field_of_a_request_is_known() -> None:
    there = set(EngineCoreRequest.__struct_fields__)
    known = IN_KEYS.keys() | LEFT_ALONE.keys() | NOT_IN_KEYS
    assert there <= known, f"say of {there - known} whether a client chooses it, and if it is keyed"
    assert {f.name for f in dataclasses.fields(MultiModalFeatureSpec)} <= OF_A_FEATURE.keys()


def test_nothing_else_is_read_for_keys() -> None:
    asked = Seen(request())
    keys(asked)
    assert asked.read <= {
        "all_token_ids", "mm_features", "cache_salt",
        "resumable", "kv_transfer_params", "lora_request",  # how it is looked up, not under what
    }  # fmt: skip


def test_what_a_client_chooses_beside_them_changes_no_key() -> None:
    others: list[dict[str, Any]] = [
        {"request_id": "b"}, {"priority": 3}, {"session_id": "s"}, {"trace_headers": {"a": "b"}},
        {"arrival_time": 1.0}, {"client_index": 1}, {"reasoning_ended": True},
        {"sampling_params": SamplingParams(max_tokens=9, temperature=1.0, seed=7)},
        {"sampling_params": SamplingParams(
            extra_args={"kv_transfer_params": {"attnstore": {"priority": 1}, "remote": "x"}})},
    ]  # fmt: skip
    plain = keys(request())
    for other in others:
        assert keys(request(**other)) == plain, other


def test_a_name_without_its_content_is_no_key() -> None:
    """Equal in all that a client can name, and other bytes: no key of media is the same."""
    position = PlaceholderRange(20, 10)
    dog = [MultiModalFeatureSpec(seen("dog"), "image", "cam-7", position, "cam-7")]
    one, other = keys(request()), keys(request(mm_features=dog))
    assert one[:2] == other[:2]
    assert not set(one[2:]) & set(other[2:])


def test_embeddings_are_left_alone() -> None:
    assert bypasses(request(prompt_embeds=torch.zeros(64, 4), prompt_token_ids=None))
    assert bypasses(request(prompt_embeds=torch.zeros(64, 4), prompt_is_token_ids=[True] * 64))


@pytest.mark.parametrize("params", ["do_remote_prefill", ["do_remote_prefill"], 7, 0.5])
def test_params_of_another_type_are_none(params: Any) -> None:
    """As `vllm_xargs` brings them, which are no objects."""
    how = SamplingParams(extra_args={"kv_transfer_params": params})
    assert keys(request(sampling_params=how)) == keys(request())
