# SPDX-License-Identifier: Apache-2.0
"""Every setting in words, the only ones: default, unit, what it does, when to change it.

`attnstore init`, configs/attnstore.yaml and docs/configuration.md are made of this;
tests/unit/config/test_texts.py compares all of them with config/settings.py. It is long since
each setting has its texts here.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass

from attnstore_vllm.io.codec import CODEC_NAMES


@dataclass(frozen=True, slots=True)
class Setting:
    """One key of the YAML, in words.

    Args:
        key: with its section, as in nvme.path.
        default: as YAML; None: it must be given.
        unit: or the values that it may have.
        what: it does. The first sentence is short: a file of settings has it, a page has all.
        change: when to change it; of its first sentence the same is true.
        is_common: people change it; `attnstore init` writes it without --all.
    """

    key: str
    default: str | None
    unit: str
    what: str
    change: str
    is_common: bool = False

    @property
    def short(self) -> str:
        """Two sentences: what it does, and when to change it."""
        return f"{first_sentence(self.what)} {first_sentence(self.change)}"


def first_sentence(text: str) -> str:
    """Up to the first full stop before a space, that included."""
    return re.split(r"(?<=[.])\s", text, maxsplit=1)[0]


SETTINGS = (
    Setting(
        "dram", None, "size, as in 64GiB, or {size: 64GiB, codec: lossless}",
        "DRAM for KV: shared memory, all of it taken when the server starts.",
        "Raise it while memory is free: fewer hits wait for NVMe. A token of Llama-3-8B in bf16 "
        "takes 128 KiB, so 64GiB hold half a million tokens.",
        is_common=True,
    ),
    Setting(
        "dram.size", "required", "size, as in 64GiB",
        "The same size, written in this way where dram has a codec too.",
        "Raise it as you would raise dram.",
    ),
    Setting(
        "dram.codec", "none", "none, lossless",
        "How KV is encoded in DRAM: lossless takes 0.74 of the bytes, and gives back every bit. "
        "NVMe and the shared tier then hold the encoded bytes as well. It is for bfloat16, other "
        "KV stays as it is; no GPU has run it.",
        "Set lossless where DRAM or the disk is too small: each copy takes processor time. Leave "
        "out nvme.codec and audit then: no hit is audited. What was stored before is not found.",
    ),
    Setting(
        "nvme.path", None, "absolute directory, or a list of them",
        "The directory for KV on disk, which no other server may use. A start makes it (mode "
        "0700), but not the directories above it. Of a list, [/mnt/nvme0/kv, /mnt/nvme1/kv], each "
        "data-parallel engine has one, the first engines the first.",
        "Put it on the fastest local disk, never on a network file system. Name a directory of "
        "each disk where several engines share a machine.",
        is_common=True,
    ),
    Setting(
        "nvme.capacity", None, "size, as in 2TiB",
        "The most that the server's files in nvme.path may take, of all engines together. It is "
        "allocated when the server starts.",
        "Raise it until it holds the conversations that may come back: `attnstore simulate` says "
        "how much that is.",
        is_common=True,
    ),
    Setting(
        "nvme.io", "auto", "auto, uring, aiofiles",
        "How the disk is read and written. uring is io_uring with O_DIRECT, and aiofiles is "
        "threads. auto takes io_uring where the machine has it.",
        "Set uring to make a start fail where io_uring is missing.",
    ),
    Setting(
        "nvme.io_deadline", "5s", "time, 100ms to 10m",
        "A disk that leaves a request unanswered for so long is out of use for a while. DRAM "
        "serves meanwhile, and the disk is tried again later.",
        "Raise it for a disk that pauses and recovers.",
    ),
    Setting(
        "nvme.daily_writes", "off", "size a day, or off",
        "The most that is written to the disk in a day; off: no limit. Unused writes add up to an "
        "hour's share at most. A restart begins with none.",
        "Set it to what the disk is rated for, if its endurance matters. What is beyond it is not "
        "kept on NVMe.",
        is_common=True,
    ),
    Setting(
        "nvme.scrub", "8MiB", "size a second, or off",
        "How fast cold records are read again, so that damaged ones are found early.",
        "Lower it on a disk that is busy all the time.",
    ),
    Setting(
        "nvme.codec", "none", ", ".join(CODEC_NAMES),
        "How KV is encoded on the disk: lossless gives back every bit, int8 and fp8 do not. In "
        "bf16 lossless takes 0.66 to 0.76 of the bytes, more of them where the disk is fast. int8 "
        "and fp8 take one byte a number.",
        "Set lossless where the disk is small or slow: it takes processor time. From 2 GB/s on it "
        "is worth that in bf16 only. What was stored with another codec is not found.",
        is_common=True,
    ),
    Setting(
        "nvme.approximate", "asked", "asked, all",
        "Whom NVMe serves under int8 or fp8: requests that ask for it, or all that do not refuse. "
        "They say `approximate: true`, or `false`. The KV of others stays in DRAM and HBM, and is "
        "exact.",
        "Set all where answers may differ slightly. Other codecs do not look at it.",
    ),
    Setting(
        "chunk_tokens", "256", "tokens, 16 to 4096",
        "How many tokens are named, moved and evicted together, rounded up to whole blocks of "
        "vLLM.",
        "Raise it for models with little KV a token, so that a read moves more bytes. What was "
        "stored with another value is not found.",
    ),
    Setting(
        "load_deadline", "1s", "time, 0s to 60s",
        "How long a request waits for its KV to come up from NVMe before it is computed instead.",
        "Lower it to bound the first token where the disk is slow. KV that is longer than DRAM "
        "comes in parts, and each part may take so long.",
        is_common=True,
    ),
    Setting(
        "step_budget", "131072", "tokens, 1024 to 1073741824",
        "Prompt tokens that one step of the engine looks up; each request counts 1,024 more. What "
        "is beyond waits for a later step, so that a burst of requests holds up no running answer. "
        "It bounds saves too: a chunk for each 512 of it, or twice what a step computes.",
        "Lower it where the gaps between tokens must be short even in bursts. Raise it where "
        "thousands of short requests start at once. A prompt that is longer is looked up alone.",
    ),
    Setting(
        "eviction", "attnstore", "attnstore, lru, fifo",
        "Which KV leaves a full tier, of what no request waits for. attnstore: what is least "
        "likely to return soon. lru: what was not used for longest; fifo: what came first.",
        "Set lru or fifo only to compare with.",
    ),
    Setting(
        "look_ahead", "true", "true, false",
        "Whether KV that waiting requests want is read from NVMe before it is their turn.",
        "Set false only to compare with.",
    ),
    Setting(
        "compute_if_sooner", "true", "true, false",
        "Whether stored tokens are computed where that is measured to be sooner than loading them.",
        "Set false to spare the accelerator. What is stored is then always loaded, and waited for "
        "until the deadline.",
    ),
    Setting(
        "write_buffer", "auto", "size, or auto",
        "HBM of each GPU that KV waits in on its way to DRAM. auto has room for the tokens of two "
        "steps. The CPU build has none.",
        "Raise it where `vllm:attnstore_chunks_total{event=\"unsaved\"}` grows. vLLM must leave as "
        "much HBM free.",
    ),
    Setting(
        "states_every", "auto", "tokens, 16 to 1048576, auto, or off",
        "Of models with recurrent layers: how often a prompt leaves a state that others go on "
        "from. auto: where vLLM's steps end, if computing takes longer than reading a state from "
        "NVMe. Ends of prompts, and where prompts part, have a state anyway while there is room.",
        "Set it where prompts share long beginnings and part anywhere. vLLM then ends steps there, "
        "so a long prompt takes more of them. The number is rounded up to whole blocks of states.",
    ),
    Setting(
        "ttl", "off", "time, as in 30m, 12h, 7d, or off",
        "KV that is not used for so long is not found any more, restarts included. off: it stays "
        "while there is room.",
        "Set it where KV that is not asked for must not stay. Each use begins the time anew. A "
        "request's own `ttl` may be shorter, never longer; vLLM's own prefix cache in HBM knows "
        "none.",
        is_common=True,
    ),
    Setting(
        "pinning", "off", "off, or {share: 0.1, tenant_share: 0.02, longest: 1h}",
        "Whether requests may pin KV (`pin: true`), which is then not evicted for a while.",
        "Set {} for the values shown, or a mapping of your own, if requests need it. Pins take "
        "room from others, however much theirs is worth.",
    ),
    Setting(
        "pinning.share", "0.1", "share of each tier's slots, 0.5 at most",
        "The most that all pins together may take of a tier.",
        "Raise it if `vllm:attnstore_chunks_total{event=\"pin_refused\"}` grows.",
    ),
    Setting(
        "pinning.tenant_share", "a fifth of share", "share of each tier's slots",
        "The most that the pins of one tenant (cache_salt) may take of a tier. All requests "
        "without a salt are one tenant.",
        "Raise it where there are few tenants.",
    ),
    Setting(
        "pinning.longest", "1h", "time, as in 30m",
        "The longest time that a pin lasts.",
        "Lower it if pins outlive their use.",
    ),
    Setting(
        "holding", "off", "off, or {share: 0.9, longest: 30s, defer: 60s}",
        "Whether the HBM of a conversation is held after its answer, until its next request. It "
        "is let go as soon as a request has no room.",
        "Set {} for the values shown where agents call tools of a few seconds. It needs prefix "
        "caching, and full attention in all layers.",
    ),
    Setting(
        "holding.share", "0.9", "share of HBM's blocks, 0.9 at most",
        "The most that all holds together may take of HBM.",
        "Lower it to keep more room for other cached prefixes.",
    ),
    Setting(
        "holding.longest", "30s", "time, as in 10s",
        "The longest time that a conversation's HBM is held.",
        "Raise it where tools take longer and HBM has room.",
    ),
    Setting(
        "holding.defer", "60s", "time, as in 30s, or off",
        "The longest time that a conversation that comes back waits, while those in play fill HBM.",
        "Set off where no request may wait for others' holds.",
    ),
    Setting(
        "quotas", "off",
        "off, or {NAME: {salt_file: absolute path, dram, nvme: share or size, shared: size}}",
        "How much of each tier a tenant may hold: requests of the file's cache_salt, or those "
        "without one. At its quota its own KV goes first. Of the shared tier it bounds what this "
        "server puts there.",
        "Set it, as in {gold: {salt_file: /run/secrets/gold_salt, nvme: 0.25}}, where one tenant "
        "takes the room of others. Any of dram, nvme and shared may be left out.",
    ),
    Setting(
        "truncation.enabled", "false", "true, false",
        "Whether prompts whose first turns were cut are served from stored KV. It is moved to its "
        "new position, which is approximate. false: only requests that ask (`truncation: true`); "
        "true: all that do not refuse.",
        "Set true where conversations outgrow the context window and answers may differ slightly. "
        "Set `truncation: off` in place of the section to serve none.",
    ),
    Setting(
        "truncation.min_tokens", "64", "tokens, 32 to 65536",
        "The shortest run of tokens whose KV is moved; shorter ones are computed.",
        "Raise it if short matches cost more than they save.",
    ),
    Setting(
        "truncation.sinks", "0", "tokens, 0 to 65536",
        "How many first tokens of a prompt must be found in their old place. Else all of it is "
        "computed.",
        "Set it for models whose answers depend on their first tokens (attention sinks).",
    ),
    Setting(
        "truncation.share", "salted", "salted, everyone",
        "Who shares moved KV: requests of one cache_salt, or also all that send none. Who guesses "
        "single tokens of a stored prompt can learn from moved KV that they are right.",
        "Set everyone if all users without a salt trust each other.",
    ),
    Setting(
        "truncation.documents", "false", "true, false",
        "Whether requests that take moved KV find parts of their prompt in any place and order. "
        "What lies between them is computed by passes of our own. Answers may differ slightly.",
        "Set true where prompts bring the same documents, tool results or files in other orders.",
    ),
    Setting(
        "truncation.recompute", "0.15", "off, share above 0, 1 at most",
        "The share of documents whose KV is computed anew. It mends part of what moved KV lacks, "
        "and costs as much of the time that it would save.",
        "Set off where the first token counts more than an answer's words.",
    ),
    Setting(
        "truncation.recompute_by", "auto", "auto, first, deviation",
        "Which tokens of documents are computed anew. `first` takes the first ones of each, and "
        "`deviation` those whose K differs most, which a look at two layers of all tells. `auto` "
        "takes deviation for models of 20 layers or more, and first for others.",
        "Set first where the first token counts more than an answer's words.",
    ),
    Setting(
        "truncation.recompute_last", "0", "tokens, 0 to 65536",
        "How many of the last moved tokens before a prompt's new part are computed anew, by vLLM.",
        "Set 64 where answers to cut prompts lean on the last turn.",
    ),
    Setting(
        "share", "everyone", "everyone, salted",
        "Who shares KV: everyone without a cache_salt with each other, or only requests of one "
        "salt. With salted, requests without a salt neither find KV in the store nor leave any. "
        "vLLM's own cache in HBM is not ours to restrict.",
        "Set salted where every user must have a salt.",
        is_common=True,
    ),
    Setting(
        "shared", "off", "off, or {redis: URL}, or {mooncake: {master: host:port}}",
        "A tier behind NVMe that several servers share, in a network store.",
        "Set it where a conversation may go on at another server. "
        "[Deploying](deploying.md#a-tier-that-servers-share) says what the network must be like.",
        is_common=True,
    ),
    Setting(
        "shared.redis", "off", "redis://, rediss:// (TLS) or unix:// URL",
        "The address of a Redis or Valkey server. User and database may be in it.",
        "Set it for small fleets, and where Redis's ACLs must keep tenants apart.",
    ),
    Setting(
        "shared.mooncake", "off", "{master, host, metadata, protocol, devices}",
        "The address of a Mooncake Store, whose memory belongs to other processes. master is "
        "needed; protocol is tcp or rdma. `pip install attnstore-vllm[mooncake]` brings its "
        "client.",
        "Set it for fleets with a network of their own: Mooncake has neither passwords nor TLS.",
    ),
    Setting(
        "shared.password_file", "none", "absolute path",
        "A file with the password for Redis, which its owner alone may read.",
        "Set it where Redis has a password. vLLM writes one that is in the URL to its log.",
    ),
    Setting(
        "shared.secret_file", "none", "absolute path",
        "A file with a secret of 32 bytes or more, which its owner alone may read. Records and "
        "their names are made with it, so that what a stranger writes to the store is a miss.",
        "Set it always, and the same at all servers. Without one, who can write to the store can "
        "have forged KV served.",
    ),
    Setting(
        "shared.ca", "the system's", "absolute path",
        "The certificates that Redis's own is checked against.",
        "Set it where a CA of your own has signed that. Only with rediss://, as cert and key are.",
    ),
    Setting(
        "shared.cert", "none", "absolute path",
        "This server's certificate, for a Redis that asks for one.",
        "Set it where Redis has `tls-auth-clients yes`.",
    ),
    Setting(
        "shared.key", "none", "absolute path",
        "The private key of shared.cert.",
        "Set it with shared.cert.",
    ),
    Setting(
        "shared.deadline", "500ms", "time, 10ms to 10s",
        "How long a request waits for the store's answer. A store that is later is left alone for "
        "a while.",
        "Lower it to bound the first token, raise it for a slow network.",
    ),
    Setting(
        "shared.bandwidth", "off", "size a second, or off",
        "The most that this server writes to the store in a second.",
        "Set it where the network has other users.",
    ),
    Setting(
        "shared.daily_writes", "off", "size a day, or off",
        "The most that this server writes to the store in a day. Unused writes add up to an hour's "
        "share at most. A start begins with none.",
        "Set it where what is written costs.",
    ),
    Setting(
        "shared.prefix", "as1/", "64 characters at most",
        "The beginning of all names in the store.",
        "Set one for each group of servers, so that an ACL of Redis can tell them apart.",
    ),
    Setting(
        "trace", "off", "off, or {path: /var/log/attnstore, sample: 1, size: 256MiB}",
        "A trace of requests for `attnstore simulate` and `plan`, without a token in it. It has "
        "times, lengths, and a keyed hash for each chunk.",
        "Set it for a day or so, to find the sizes that your own load wants.",
        is_common=True,
    ),
    Setting(
        "trace.path", "required", "absolute directory",
        "Where requests.jsonl and machine.yaml are written. A start keeps one older trace. "
        "Data-parallel engine N has `path-dpN`.",
        "Put it where some hundreds of MiB are free.",
    ),
    Setting(
        "trace.sample", "1", "share of conversations, 1 at most",
        "The part of all conversations that is in the trace.",
        "Lower it where a whole trace gets too large. The sizes that it leads to are then those "
        "of that part.",
    ),
    Setting(
        "trace.size", "256MiB", "size",
        "The trace ends when it is so large.",
        "Raise it for longer traces. A prompt of 10,000 tokens takes about 1 KiB.",
    ),
    Setting(
        "audit", "1/10000", "off, a rate as 1/10000, or "
        "{rate: 1/10000, tokens: 1000, stop_after: 3, keep: 256MiB}",
        "Compute a few hits all the same, and compare what is stored with what is computed. A "
        "chunk that differs is removed, and the log says so.",
        "Set off where every hit has to be served, or a start has to serve at once what it finds. "
        "[Audit](audit.md) says what it looks at, and where it is off by default.",
    ),
    Setting(
        "audit.rate", "1/10000", "share of hits, as in 1/10000",
        "The share of hits that are computed. Each costs its request the prefill that it would "
        "have saved.",
        "Raise it after an upgrade, or where something seems wrong.",
    ),
    Setting(
        "audit.tokens", "1000", "tokens a second, 1 to 1000000",
        "The most that the audit has computed, in the mean over a minute.",
        "Lower it where the accelerator has no time to spare.",
    ),
    Setting(
        "audit.stop_after", "3", "hits, 1 to 1000",
        "After so many hits that differ, nothing that is stored is served any more. Hits with the "
        "hint `audit: true` do not count. A start serves again when the file that the log names is "
        "removed.",
        "Set 1 where a wrong answer is worse than any loss of speed.",
    ),
    Setting(
        "audit.keep", "256MiB", "size, or off",
        "Room on disk for chunks that differ, beside what was computed. They are in `audit` of "
        "nvme.path, with mode 0600. `attnstore inspect` lists them.",
        "Set off where no KV may outlive its `ttl`.",
    ),
    Setting(
        "io_depth", "8", "requests, 2 to 1024",
        "How many requests the disk has at a time; half of them may be writes.",
        "Raise it for disks that need more to be busy: `attnstore doctor` measures yours with it.",
    ),
    Setting(
        "peers", "auto", "auto or off",
        "Whether data-parallel engines of one host copy KV from each other's DRAM and NVMe. A "
        "conversation that comes from another engine is then not computed again.",
        "Set off where a router keeps each conversation at its engine.",
    ),
    Setting(
        "data_parallel_size", "1", "engines, 1 to 4096",
        "How many engines share the sizes. `vllm serve --data-parallel-size N` fills it in.",
        "Set it only where engines are started one by one.",
    ),
)  # fmt: skip

HEAD = (
    "Use: vllm serve MODEL --kv-transfer-config attnstore.yaml",
    "Only dram and nvme are required. Sizes are those of the whole server: tensor- and "
    "pipeline-parallel ranks share them, data-parallel engines get an equal part each.",
    "docs/configuration.md says more of each setting.",
)


def as_yaml(given: Mapping[str, str], *, every: bool = True) -> str:
    """A commented YAML file of settings.

    Args:
        given: values by key, of those that have no default at least.
        every: all of them, not only those that people change.
    """
    which = "all settings" if every else "the settings that people change (init --all: all of them)"
    head = (f"AttnStore, {which}.", *HEAD)
    lines: list[str] = [comment for text in head for comment in _comment(text, "")]
    section = ""
    switches = {s.key for s in SETTINGS if "." not in s.key}
    for setting in SETTINGS:
        parent, _, name = setting.key.rpartition(".")
        if parent in switches or not (every or setting.is_common):
            continue  # of a switch: off as a whole, and its own text shows what it may hold
        if parent != section or not parent:
            lines.append("")
        if parent and parent != section:
            lines.append(f"{parent}:")
        section, indent = parent, "  " if parent else ""
        lines += _comment(setting.short, indent)
        lines += _comment(f"[{setting.unit}]", indent)
        value = given.get(setting.key, setting.default)
        lines.append(f"{indent}{name}: {value}")
    return "\n".join(lines) + "\n"


def _comment(text: str, indent: str) -> list[str]:
    return textwrap.wrap(text, 99, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# ")


PAGE_HEAD = """# Configuration

Every setting, each under its name.
`attnstore init` writes a commented file of those that people change, with `--all` of all.
`attnstore check FILE` finds what is wrong in one.
`attnstore doctor FILE` finds what this machine lacks for it.

Only these are needed:
```yaml
dram: 64GiB
nvme: {path: /mnt/nvme/attnstore, capacity: 2TiB}
```
Sizes are numbers with a unit: `64GiB`, `1.5TB`, or as in Kubernetes `64Gi`.
Times have a unit, too: `90s`, `30m`, `12h` or `7d`. Deadlines may have milliseconds: `500ms`.
Before, deadlines were in milliseconds, under names that end in `_ms`. Those are still read, and
`attnstore check` says what to write in their place.
What a single request may ask for is in [hints](hints.md).
"""
