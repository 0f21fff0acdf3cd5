# SPDX-License-Identifier: Apache-2.0
"""Real servers as users start them: compiled. Other tests have eager ones, which start sooner."""

from __future__ import annotations

from pathlib import Path

from attnstore_lab.testing.tiny_model import TINY, make_model
from tests.vllm import serve_helpers as serving
from tests.vllm.serve_helpers import CHUNK, ask_and_count, ask_and_store, know_weights, story


def test_a_compiled_model_has_one_name_at_each_start_and_behind_each_reset(
    models: Path, tmp_path: Path
) -> None:
    """The compiler leaves objects of its own, and numbers, in a model's modules."""
    model = make_model(models / "serve", TINY)
    flag = serving.in_yaml(tmp_path / "attnstore.yaml", serving.settings(tmp_path / "store"))
    arguments = ("--no-enforce-eager", serving.FLAG, flag)
    with serving.server(model, tmp_path / "first", *arguments) as server:
        first = ask_and_store(server, story(1))
        again, loaded = ask_and_count(server, story(1))
        assert again == first and sum(loaded.values()) >= CHUNK
    with serving.server(model, tmp_path / "second", *arguments) as server:
        know_weights(server)
        again, loaded = ask_and_count(server, story(1))
        assert again == first and loaded["nvme"] >= CHUNK
    assert "enforce_eager=False" in (tmp_path / "second").read_text()
