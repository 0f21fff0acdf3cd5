# SPDX-License-Identifier: Apache-2.0
"""`audit`: what is accepted, and that what is not is told."""

from __future__ import annotations

from typing import Any

import pytest

from attnstore_vllm.config.audit import AuditConfig
from attnstore_vllm.config.settings import StoreConfig
from attnstore_vllm.errors import ConfigError

MINIMAL: dict[str, Any] = {"dram": "64GiB", "nvme": {"path": "/mnt/kv", "capacity": "2TiB"}}


def parsed(audit: object, **others: Any) -> AuditConfig | None:
    return StoreConfig.parse({**MINIMAL, **others, "audit": audit}).audit


def test_it_is_on_unless_it_is_turned_off() -> None:
    found = StoreConfig.parse(MINIMAL).audit
    assert found is not None and found.by_default
    assert (found.rate, found.tokens_per_s, found.stop_after) == (1 / 10_000, 1000.0, 3)
    assert [parsed(off) for off in (False, "off", 0)] == [None] * 3


@pytest.mark.parametrize("given", [{}, "1/10000", {"rate": "1/10000"}])
def test_the_same_may_be_asked_for(given: object) -> None:
    """Then a start that cannot audit is refused."""
    found = parsed(given)
    assert found is not None and not found.by_default
    assert found == StoreConfig.parse(MINIMAL).audit


@pytest.mark.parametrize(("given", "rate"), [("1/1000", 1e-3), ("1 / 20", 0.05), (0.25, 0.25)])
def test_rates(given: object, rate: float) -> None:
    found = parsed({"rate": given})
    assert found is not None and found.rate == rate


@pytest.mark.parametrize(
    ("given", "rate"), [("1/1000", 1e-3), (0.25, 0.25), (1e-4, 1e-4), (1, 1.0)]
)
def test_a_rate_alone_is_short_for_a_mapping_of_it(given: object, rate: float) -> None:
    assert parsed(given) == parsed({"rate": given}) == AuditConfig(rate=rate)


@pytest.mark.parametrize("off", [False, "off", 0, 0.0])
def test_the_codec_of_dram_goes_with_an_audit_that_is_off(off: object) -> None:
    dram = {"size": "64GiB", "codec": "lossless"}
    assert parsed(off, dram=dram) is None
    given: object
    for given in ("1/1000", "1/10000", {}):
        with pytest.raises(ConfigError, match="lossless and audit is set"):
            parsed(given, dram=dram)


def test_the_codec_of_dram_turns_the_default_off() -> None:
    """A start with it, of settings that say nothing of the audit, is not refused."""
    dram = {"size": "64GiB", "codec": "lossless"}
    assert StoreConfig.parse({**MINIMAL, "dram": dram}).audit is None
    plain = StoreConfig.parse({**MINIMAL, "dram": {"size": "64GiB", "codec": "none"}})
    assert plain.audit is not None


def test_engines_share_what_it_may_cost() -> None:
    config = StoreConfig.parse(
        {**MINIMAL, "data_parallel_size": 4, "audit": {"tokens": 1000, "keep": "64MiB"}}
    )
    part = config.share(1).audit
    assert part is not None
    assert (part.tokens_per_s, part.keep_bytes, part.rate) == (250.0, 16 << 20, 0.0001)
    off = AuditConfig(keep_bytes=None).share(2)
    assert off.keep_bytes is None


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (True, "audit is True"),
        ("1/0", "audit is '1/0'; it must be off, {rate: 1/10000}, or a share of hits, as in"),
        ("1%", "audit is '1%'"),
        ("2/1000", "audit is '2/1000'"),
        ("on", "audit is 'on'"),
        ("0.1", "audit is '0.1'"),
        (1.5, "audit is 1.5"),
        (-0.1, "audit is -0.1"),
        (float("nan"), "audit is nan"),
        (None, "audit is None"),
        (["1/1000"], "audit is ['1/1000']"),
        ({"rate": "1/0"}, "audit.rate is '1/0'"),
        ({"rate": 0}, "audit.rate is 0"),
        ({"rate": 1.5}, "audit.rate is 1.5"),
        ({"rate": True}, "audit.rate is True"),
        ({"tokens": 0}, "audit.tokens is 0"),
        ({"stop_after": 0}, "audit.stop_after is 0"),
        ({"keep": "5"}, "audit.keep is 5"),
        ({"share": 1}, "audit.share is not a setting"),
        ({"rate": None}, "audit.rate is None"),
    ],
)
def test_what_makes_no_sense_is_told(given: object, named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parsed(given)
    assert named in str(caught.value)
