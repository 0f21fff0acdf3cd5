# SPDX-License-Identifier: Apache-2.0
"""Settings: what is accepted, and that every error names key, value and remedy.

It is long since each setting has its wrong values here.
"""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnstore_vllm.config import settings as config_module
from attnstore_vllm.config import values as values_module
from attnstore_vllm.config.settings import NvmeConfig, PinningConfig, StoreConfig, TraceConfig
from attnstore_vllm.config.values import format_size, parse_size
from attnstore_vllm.errors import ConfigError

MINIMAL: dict[str, Any] = {"dram": "64GiB", "nvme": {"path": "/mnt/kv", "capacity": "2TiB"}}


def message_of(settings: object) -> str:
    with pytest.raises(ConfigError) as caught:
        StoreConfig.parse(settings)
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        (4096, 4096),
        ("4096", 4096),
        ("4096 B", 4096),
        ("1KiB", 1024),
        ("1kb", 1000),
        ("1.5GiB", 3 << 29),
        (" 64 gib ", 64 << 30),
        ("2TiB", 2 << 40),
        ("2TB", 2 * 10**12),
        ("1PiB", 1 << 50),
    ],
)
def test_sizes(text: object, num_bytes: int) -> None:
    assert parse_size("dram", text) == num_bytes


@pytest.mark.parametrize(
    "value",
    [
        0,
        -1,
        True,
        1.5,
        None,
        "",
        "GiB",
        "64 parsecs",
        "-1GiB",
        "0GiB",
        "1e9",
        "64GiB 1",
        [1],
        "9" * 400,
        "9" * 400 + "GiB",
    ],
)
def test_what_is_no_size(value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_size("nvme.capacity", value)
    assert "nvme.capacity" in str(caught.value)
    assert repr(value) in str(caught.value)
    assert "64GiB" in str(caught.value)


def test_part_of_a_byte_and_no_unit() -> None:
    assert "dram is 1.5: 1 bytes" in message_of(MINIMAL | {"dram": "1.5"})
    assert "did you mean 1.5GiB?" in message_of(MINIMAL | {"dram": "1.5"})


def test_a_size_below_one_byte_is_no_size() -> None:
    with pytest.raises(ConfigError, match=r"dram is '0\.1b'"):
        parse_size("dram", "0.1b")


@given(st.integers(1, 1 << 62))
def test_a_printed_size_is_read_back_within_its_four_digits(num_bytes: int) -> None:
    assert parse_size("dram", format_size(num_bytes)) == pytest.approx(num_bytes, rel=1e-3)


FORGOTTEN = {
    "dram": ({"dram": 64}, "dram is 64: 64 bytes", "did you mean 64GiB?"),
    "in quotes": ({"dram": "64"}, "dram is 64: 64 bytes", "did you mean 64GiB?"),
    "dram in KiB": ({"dram": "64KiB"}, "dram is 64KiB: 65536 bytes", "did you mean 64GiB?"),
    "capacity": ({"nvme": {"path": "/mnt/kv", "capacity": 500}}, "nvme.capacity is 500", "500GiB?"),
    "daily writes": (
        {"nvme": MINIMAL["nvme"] | {"daily_writes": "1.5kb"}}, "nvme.daily_writes is 1.5kb",
        "did you mean 1.5GiB?",
    ),
    "scrub": ({"nvme": MINIMAL["nvme"] | {"scrub": 8}}, "nvme.scrub is 8: 8 bytes", "8MiB?"),
    "write buffer": ({"write_buffer": 256}, "write_buffer is 256", "did you mean 256MiB?"),
}  # fmt: skip


@pytest.mark.parametrize(("settings", "found", "meant"), FORGOTTEN.values(), ids=FORGOTTEN.keys())
def test_a_forgotten_unit_is_told_from_what_was_meant(
    settings: dict[str, Any], found: str, meant: str
) -> None:
    message = message_of(MINIMAL | settings)
    assert found in message
    assert meant in message
    assert "\n" not in message


def test_bytes_without_a_unit_are_taken_where_they_make_sense() -> None:
    nvme = MINIMAL["nvme"] | {"capacity": "4294967296", "daily_writes": 1 << 40, "scrub": 65_536}
    config = StoreConfig.parse({"dram": 68_719_476_736, "nvme": nvme, "write_buffer": 1 << 20})
    assert (config.dram_bytes, config.nvme.capacity_bytes) == (64 << 30, 4 << 30)
    assert (config.nvme.daily_writes_bytes, config.nvme.scrub_bytes_per_s) == (1 << 40, 65_536)
    assert config.write_buffer_bytes == 1 << 20


def test_every_setting_that_is_a_size_has_a_least(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the next one: each call of parse_size is to say what makes sense."""
    asked: dict[str, int] = {}

    def record(key: str, value: object, least: int = 1, unit: str = "GiB") -> int:
        asked[key] = least
        return parse_size(key, value, least, unit)

    monkeypatch.setattr(config_module, "parse_size", record)
    monkeypatch.setattr(values_module, "parse_size", record)
    nvme = MINIMAL["nvme"] | {"daily_writes": "1TiB", "scrub": "8MiB"}
    StoreConfig.parse(MINIMAL | {"nvme": nvme, "write_buffer": "1GiB"})
    assert len(asked) == sum(
        "bytes" in field.name for cls in (StoreConfig, NvmeConfig) for field in fields(cls)
    )
    assert min(asked.values()) >= 65_536


def test_minimal_settings() -> None:
    config = StoreConfig.parse(MINIMAL)
    assert config.dram_bytes == 64 << 30
    assert config.nvme == NvmeConfig(path=Path("/mnt/kv"), capacity_bytes=2 << 40)
    assert config.chunk_tokens == 256
    assert config.data_parallel_size == 1


def test_every_optional_setting_arrives() -> None:
    optional = {
        "chunk_tokens": 64,
        "step_budget": 1024,
        "io_depth": 2,
        "data_parallel_size": 4,
    }
    config = StoreConfig.parse(MINIMAL | optional)
    assert {key: getattr(config, key) for key in optional} == optional


@pytest.mark.parametrize(
    ("said", "every"), [("auto", None), ("off", 0), (False, 0), (16, 16), (2048, 2048)]
)
def test_how_often_states_are_kept(said: object, every: int | None) -> None:
    assert StoreConfig.parse(MINIMAL | {"states_every": said}).states_every == every


def test_an_unknown_key_names_the_nearest_known_one() -> None:
    assert "chunk_token is not a setting" in message_of(MINIMAL | {"chunk_token": 64})
    assert "did you mean chunk_tokens?" in message_of(MINIMAL | {"chunk_token": 64})
    nvme = MINIMAL["nvme"] | {"capasity": "1TiB"}
    assert "nvme.capasity" in message_of(MINIMAL | {"nvme": nvme})
    assert "did you mean capacity?" in message_of(MINIMAL | {"nvme": nvme})
    assert "known are audit, chunk_tokens, compute_if_sooner" in message_of(MINIMAL | {"zzz": 1})
    # The field's name in Python is no setting.
    assert "dram_bytes is not a setting" in message_of(MINIMAL | {"dram_bytes": 1})


@pytest.mark.parametrize("key", ["dram", "nvme"])
def test_a_missing_key_is_named_with_an_example(key: str) -> None:
    message = message_of({k: v for k, v in MINIMAL.items() if k != key})
    assert f"{key} is missing" in message
    assert "dram: 64GiB" in message


@pytest.mark.parametrize("key", ["path", "capacity"])
def test_a_missing_part_of_nvme_is_named(key: str) -> None:
    nvme = {k: v for k, v in MINIMAL["nvme"].items() if k != key}
    assert f"nvme.{key} is missing" in message_of(MINIMAL | {"nvme": nvme})


def test_a_relative_path_is_refused_with_the_absolute_one() -> None:
    message = message_of(MINIMAL | {"nvme": {"path": "kv/cache", "capacity": "1GiB"}})
    assert "'kv/cache'" in message
    assert str(Path.cwd() / "kv/cache") in message
    home = message_of(MINIMAL | {"nvme": {"path": "~/kv", "capacity": "1GiB"}})
    assert f"as in {Path.home() / 'kv'}" in home
    for odd in ("~nobody of that name/kv", "~\ud800/kv"):
        odd_path = message_of(MINIMAL | {"nvme": {"path": odd, "capacity": "1GiB"}})
        assert odd_path.endswith("write an absolute path")


@pytest.mark.parametrize("path", [3, "", None, {"a": 1}, [], "/kv\0"])
def test_a_path_must_be_text(path: object) -> None:
    message = message_of(MINIMAL | {"nvme": {"path": path, "capacity": "1GiB"}})
    assert f"nvme.path is {path!r}" in message


def test_dram_may_have_a_codec() -> None:
    config = StoreConfig.parse(MINIMAL | {"dram": {"size": "64GiB", "codec": "lossless"}})
    assert (config.dram_bytes, config.dram_codec) == (64 << 30, "lossless")
    shares = replace(config, data_parallel_size=4).share(3)
    assert (shares.dram_bytes, shares.dram_codec) == (16 << 30, "lossless")
    plain = StoreConfig.parse(MINIMAL)
    for dram in ({"size": "64GiB"}, {"size": "64GiB", "codec": "none"}):
        assert StoreConfig.parse(MINIMAL | {"dram": dram}) == plain


@pytest.mark.parametrize(
    ("dram", "more", "said"),
    [
        ({"codec": "lossless"}, {}, "dram.size is missing"),
        ({"size": "1GiB", "codec": "int8"}, {}, "dram.codec is 'int8'; it must be one of none, "),
        ({"size": "1GiB", "codecs": "none"}, {}, "dram.codecs is not a setting of AttnStore"),
        ({"size": "64KiB"}, {}, "dram.size is 64KiB"),
        ({"size": "1GiB", "codec": "lossless"}, {"audit": {}}, "lossless and audit is set"),
        (
            {"size": "1GiB", "codec": "lossless"},
            {"nvme": MINIMAL["nvme"] | {"codec": "int8"}},
            "dram.codec is lossless and nvme.codec int8",
        ),
        (
            {"size": "1GiB", "codec": "lossless"},
            {"nvme": MINIMAL["nvme"] | {"codec": "lossless"}},
            "leave one of the two out",
        ),
    ],
)
def test_what_goes_with_the_codec_of_dram(
    dram: dict[str, Any], more: dict[str, Any], said: str
) -> None:
    assert said in message_of(MINIMAL | {"dram": dram} | more)


@pytest.mark.parametrize("settings", [None, [], "dram: 64GiB", 3])
def test_settings_must_be_a_mapping(settings: object) -> None:
    found = "empty" if settings is None else repr(settings)
    assert f"the settings of AttnStore are {found}" in message_of(settings)


def test_nvme_must_be_a_mapping() -> None:
    assert "nvme is '/mnt/kv'" in message_of(MINIMAL | {"nvme": "/mnt/kv"})


@pytest.mark.parametrize(
    ("key", "value", "range_text"),
    [
        ("chunk_tokens", 15, "from 16 to 4096"),
        ("chunk_tokens", "256", "from 16 to 4096"),
        ("chunk_tokens", True, "from 16 to 4096"),
        ("step_budget", 1000, "from 1024 to 1073741824"),
        ("io_depth", 1, "from 2 to 1024"),
        ("data_parallel_size", 0, "from 1 to 4096"),
        ("states_every", 15, "from 16 to 1048576"),
        ("states_every", "1k", "from 16 to 1048576"),
        ("states_every", True, "from 16 to 1048576"),
    ],
)
def test_integers_out_of_range_or_of_another_type(key: str, value: object, range_text: str) -> None:
    message = message_of(MINIMAL | {key: value})
    assert f"{key} is {value!r}" in message
    assert range_text in message


def test_data_parallel_engines_share_both_sizes() -> None:
    config = StoreConfig.parse(MINIMAL | {"data_parallel_size": 4, "chunk_tokens": 64})
    shares = [config.share(rank) for rank in range(4)]
    assert {share.dram_bytes for share in shares} == {16 << 30}
    assert {share.nvme.capacity_bytes for share in shares} == {1 << 39}
    assert [share.nvme.path for share in shares] == [Path(f"/mnt/kv/dp{r}") for r in range(4)]
    assert {share.chunk_tokens for share in shares} == {64}
    assert config.share(None) is config


def several(paths: object, engines: int | None = None) -> dict[str, Any]:
    """Settings with a list of paths."""
    more = {} if engines is None else {"data_parallel_size": engines}
    return MINIMAL | {"nvme": {"path": paths, "capacity": "4TiB"}} | more


@pytest.mark.parametrize(
    ("num_paths", "engines", "expected"),
    [
        (1, 3, "aaa"),
        (2, 2, "ab"),
        (2, 8, "aaaabbbb"),
        (2, 3, "aab"),
        (3, 4, "aabc"),
        (3, 8, "aaabbbcc"),
        (4, 4, "abcd"),
    ],
)
def test_engines_of_one_path_follow_each_other(num_paths: int, engines: int, expected: str) -> None:
    paths = [f"/mnt/{letter}/kv" for letter in "abcd"[:num_paths]]
    config = StoreConfig.parse(several(paths, engines))
    parts = [config.share(rank) for rank in range(engines)]
    assert [str(part.nvme.path) for part in parts] == [
        f"/mnt/{letter}/kv/dp{rank}" for rank, letter in enumerate(expected)
    ]
    assert {part.nvme.named_path for part in parts} == {Path(path) for path in paths}
    assert {part.nvme.capacity_bytes for part in parts} == {(4 << 40) // engines}


def test_siblings_on_all_paths_have_one_place_in_common() -> None:
    config = StoreConfig.parse(several(["/mnt/a", "/mnt/b"], 4))
    dirs = [Path(f"/mnt/{name}") for name in ("a/dp0", "a/dp1", "b/dp2", "b/dp3")]
    for rank, own in enumerate(dirs):
        part = config.share(rank)
        assert part.nvme.path == own
        assert part.siblings() == [other for other in dirs if other != own]
        assert part.nvme.group_path == Path("/mnt/a")
    assert config.siblings() == []
    assert StoreConfig.parse(several("/mnt/dp3", 4)).siblings() == []  # the server's, no engine's


def test_a_list_of_one_path_is_that_path() -> None:
    assert StoreConfig.parse(several(["/mnt/a"])) == StoreConfig.parse(several("/mnt/a"))
    one, plain = (StoreConfig.parse(several(path, 2)).share(1) for path in (["/mnt/a"], "/mnt/a"))
    assert one == plain
    assert one.nvme.path == Path("/mnt/a/dp1")
    assert StoreConfig.parse(several(["/mnt/a"])).share(None).nvme.path == Path("/mnt/a")


@pytest.mark.parametrize(
    ("paths", "parts"),
    [
        (["/mnt/a", "kv"], ("'kv'", "relative", str(Path.cwd() / "kv"))),
        (["/mnt/a", 3], ("is 3", "absolute directory")),
        (["/mnt/a", ["/mnt/b"]], ("['/mnt/b']", "absolute directory")),
        (["/mnt/a", "/mnt/b", "/mnt/a/"], ("names '/mnt/a' twice", "each disk")),
        (["/mnt/a/b", "/mnt/a"], ("names '/mnt/a' and '/mnt/a/b' inside it", "each disk")),
        (["/mnt/a", "/mnt/c", "/mnt/a/b/c"], ("'/mnt/a' and '/mnt/a/b/c' inside it",)),
    ],
)
def test_paths_that_make_no_list(paths: list[object], parts: tuple[str, ...]) -> None:
    message = message_of(several(paths, 4))
    assert message.startswith("nvme.path ")
    for part in parts:
        assert part in message


def test_names_that_only_begin_alike_lie_beside_each_other() -> None:
    StoreConfig.parse(several(["/mnt/kv", "/mnt/kv2"], 2))


THREE = "nvme.path names 3 directories, but data_parallel_size is {}: each engine has one file; "


def test_more_paths_than_engines_are_refused() -> None:
    paths = ["/mnt/a", "/mnt/b", "/mnt/c"]
    for engines in (1, 2):
        message = message_of(several(paths, engines))
        assert message.startswith(THREE.format(engines) + f"expected {engines} at most")
        assert "RAID 0" in message
    open_ = StoreConfig.parse(several(paths))  # vLLM's command line may fill it in
    for rank in (None, 0):
        with pytest.raises(ConfigError, match="RAID 0") as caught:
            open_.share(rank)
        assert str(caught.value).startswith(THREE.format(1))
    assert StoreConfig.parse(several(paths, 3)).share(2).nvme.path == Path("/mnt/c/dp2")


@pytest.mark.parametrize("rank", [-1, 2, 7])
def test_a_rank_beyond_the_number_of_engines_is_refused(rank: int) -> None:
    config = StoreConfig.parse(MINIMAL | {"data_parallel_size": 2})
    with pytest.raises(ConfigError, match=f"data_parallel_size is 2.*rank {rank}"):
        config.share(rank)


def test_hints_are_off_until_they_are_set() -> None:
    config = StoreConfig.parse(MINIMAL)
    assert (config.ttl_s, config.pinning) == (None, None)
    config = StoreConfig.parse({**MINIMAL, "ttl": False, "pinning": "off"})
    assert (config.ttl_s, config.pinning) == (None, None)
    config = StoreConfig.parse({**MINIMAL, "ttl": "12h", "pinning": {}})
    assert config.ttl_s == 43_200
    assert config.pinning == PinningConfig(share=0.1, tenant_share=0.02, longest_s=3600.0)
    config = StoreConfig.parse({**MINIMAL, "pinning": {"share": 0.5, "longest": "2d"}})
    assert config.pinning == PinningConfig(share=0.5, tenant_share=0.1, longest_s=172_800)


def test_the_write_buffer() -> None:
    assert StoreConfig.parse(MINIMAL).write_buffer_bytes is None
    assert StoreConfig.parse(MINIMAL | {"write_buffer": "auto"}).write_buffer_bytes is None
    assert StoreConfig.parse(MINIMAL | {"write_buffer": "2MiB"}).write_buffer_bytes == 2 << 20


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ({"look_ahead": "no"}, ("look_ahead", "'no'", "true or false")),
        ({"compute_if_sooner": 1}, ("compute_if_sooner", "1", "true or false")),
        ({"write_buffer": "much"}, ("write_buffer", "'much'", "64GiB")),
        ({"write_buffer": 0}, ("write_buffer", "0", "64GiB")),
        ({"ttl": "soon"}, ("ttl", "'soon'", "30m")),
        ({"ttl": 0}, ("ttl", "0", "30m")),
        ({"ttl": True}, ("ttl", "True")),
        ({"ttl": 30}, ("ttl is 30, which has no unit", "12h")),
        ({"ttl": 86_400.0}, ("ttl is 86400.0, which has no unit",)),
        ({"ttl": "30"}, ("ttl is '30', which has no unit",)),
        ({"ttl": "1h", "eviction": "lru"}, ("ttl", "'lru'", "attnstore")),
        ({"pinning": True}, ("pinning", "True", "share: 0.1")),
        ({"pinning": {"shares": 0.1}}, ("pinning.shares", "did you mean share")),
        ({"pinning": {"share": 0}}, ("pinning.share", "0.5")),
        ({"pinning": {"share": 0.6}}, ("pinning.share", "0.6", "0.5")),
        ({"pinning": {"share": float("nan")}}, ("pinning.share", "nan")),
        ({"pinning": {"share": "10%"}}, ("pinning.share", "'10%'")),
        (
            {"pinning": {"share": 0.1, "tenant_share": 0.2}},
            ("pinning.tenant_share", "0.2", "0.1 at most (no more than pinning.share"),
        ),
        ({"pinning": {"longest": "ever"}}, ("pinning.longest", "'ever'")),
        ({"pinning": {"longest": 3600}}, ("pinning.longest is 3600, which has no unit",)),
    ],
)
def test_wrong_hints_settings(settings: dict[str, Any], parts: tuple[str, ...]) -> None:
    message = message_of({**MINIMAL, **settings})
    for part in parts:
        assert part in message


def test_a_trace_is_off_or_has_a_directory() -> None:
    assert StoreConfig.parse(MINIMAL).trace is None
    assert StoreConfig.parse({**MINIMAL, "trace": "off"}).trace is None
    given = {"path": "/var/log/x", "sample": 0.25, "size": "64MiB"}
    config = StoreConfig.parse({**MINIMAL, "trace": given, "data_parallel_size": 2})
    assert config.trace == TraceConfig(path=Path("/var/log/x"), sample=0.25, size_bytes=64 << 20)
    part = config.share(1).trace
    assert part is not None
    assert (part.path, part.size_bytes) == (Path("/var/log/x-dp1"), 32 << 20)


@pytest.mark.parametrize(
    "trace",
    ["on", {}, {"path": "x"}, {"path": "/x", "sample": 0}, {"path": "/x", "sample": 2},
     {"path": "/x", "size": "1KiB"}, {"path": "/x", "tokens": True}],
)  # fmt: skip
def test_a_trace_that_makes_no_sense(trace: object) -> None:
    with pytest.raises(ConfigError, match="trace"):
        StoreConfig.parse({**MINIMAL, "trace": trace})


@pytest.mark.parametrize(
    ("codec", "shares"), [("none", True), ("lossless", True), ("int8", False), ("fp8", False)]
)
def test_engines_share_nothing_where_a_codec_changes_kv(codec: str, *, shares: bool) -> None:
    """What comes from others does not say whether it may be changed."""
    nvme = {"path": "/mnt/x", "capacity": "2GiB", "codec": codec}
    given: dict[str, Any] = {"dram": "2GiB", "nvme": nvme, "data_parallel_size": 2}
    assert bool(StoreConfig.parse(given).share(0).siblings()) is shares
    with_tier = given | {"shared": {"redis": "redis://h"}}
    if shares:
        assert StoreConfig.parse(with_tier).shared is not None
    else:
        assert "nvme.codec" in message_of(with_tier)
