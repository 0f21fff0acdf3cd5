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
        "DRAM for KV: shared memory, taken when the server starts.",
        "More of it means fewer reads from NVMe. A token of Llama-3-8B in bf16 takes 128 KiB.",
        is_common=True,
    ),
    Setting(
        "dram.size", "required", "size, as in 64GiB",
        "The same, where dram has a codec.",
        "As that of dram.",
    ),
    Setting(
        "dram.codec", "none", "none, lossless",
        "How KV is encoded in DRAM: lossless takes 0.74 of the bytes, and brings back every bit. "
        "NVMe, other engines and the shared tier keep the same bytes. It is for bfloat16 on vLLM's "
        "CPU build: other KV is kept as it is, and a GPU is refused. Of a chunk whose numbers have "
        "too many exponents nothing is stored (event unsaved). It goes neither with nvme.codec nor "
        "with audit. What was stored without it is not found.",
        "Set lossless where DRAM or the disk is too small. Each copy between HBM and DRAM takes "
        "processor time for it.",
    ),
    Setting(
        "nvme.path", None, "absolute directory, or a list of them",
        "A directory of this server's own. Created (0700) if only its last part is missing. A "
        "list, as in [/mnt/nvme0/attnstore, /mnt/nvme1/attnstore], is for data-parallel engines. "
        "Each has one of them, the first engines the first.",
        "Put it on the fastest local disk, never on a network file system. Name one directory of "
        "each disk where several engines share a machine.",
        is_common=True,
    ),
    Setting(
        "nvme.capacity", None, "size, as in 2TiB",
        "The most that its file, or the files of all engines, may take. It is allocated when the "
        "server starts.",
        "It should hold the conversations that may come back.",
        is_common=True,
    ),
    Setting(
        "nvme.io", "auto", "auto, uring, aiofiles",
        "How the disk is asked: io_uring with O_DIRECT, or threads; auto takes io_uring where it "
        "can be had.",
        "Set uring to make a start fail where it cannot be had.",
    ),
    Setting(
        "nvme.io_deadline", "5s", "time, 100ms to 10m",
        "A request that the disk does not answer in this time puts NVMe out of use for a while.",
        "Raise it for a disk that pauses and recovers.",
    ),
    Setting(
        "nvme.daily_writes", "off", "size a day, or off",
        "The most that is written to the disk a day; off: no limit. It is written in bursts of an "
        "hour's share. A restart begins without savings, so restarts add nothing.",
        "Set it to what the disk is rated for, if its endurance matters.",
        is_common=True,
    ),
    Setting(
        "nvme.scrub", "8MiB", "size a second, or off",
        "What cold records are read again with, so that rot is found early.",
        "Lower it on a disk that is busy all the time.",
    ),
    Setting(
        "nvme.codec", "none", ", ".join(CODEC_NAMES),
        "How KV is encoded on the disk: lossless brings back every bit, int8 and fp8 do not. The "
        "first takes 0.66 to 0.76 of the bytes in bf16, more where the disk is fast, and "
        "processor time. int8 and fp8 keep a byte a number: see nvme.approximate. What was stored "
        "with another codec is not found.",
        "Set lossless where the disk is small or slow. From 2 GB/s on, only in bf16.",
        is_common=True,
    ),
    Setting(
        "nvme.approximate", "asked", "asked, all",
        "With int8 or fp8, who is served from NVMe: requests that ask for it, or all that do not "
        "refuse. They ask with `approximate: true`. The KV of other requests stays in DRAM and "
        "HBM, and is exact.",
        "Set all where answers may differ slightly.",
    ),
    Setting(
        "chunk_tokens", "256", "tokens, 16 to 4096",
        "Tokens that are named, moved and evicted together; rounded up to whole blocks of vLLM.",
        "Raise it for models with little KV a token. What is stored is not found after a change.",
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
        "Prompt tokens that are looked up in one step of the engine, on its own thread. Each "
        "request counts 1,024 more. Who comes beyond is looked up in a later step: so no burst of "
        "requests, however long, holds up the answers of others. A prompt that is longer is looked "
        "up alone. As many chunks are saved as 512 tokens each allow, or twice what a step "
        "computes.",
        "Lower it where the gaps between tokens must be short even in bursts. Raise it where "
        "thousands of short requests start at once.",
    ),
    Setting(
        "eviction", "attnstore", "attnstore, lru, fifo",
        "Who leaves a full tier, of what no request waits for: what is least likely to return "
        "soon.",
        "Set lru or fifo only to compare with.",
    ),
    Setting(
        "look_ahead", "true", "true, false",
        "Bring up from NVMe what waiting requests want, before it is their turn.",
        "Set false only to compare with.",
    ),
    Setting(
        "compute_if_sooner", "true", "true, false",
        "Compute what is stored where that is measured to be sooner than loading it from NVMe or "
        "DRAM.",
        "Set false to spare the accelerator. It is then always loaded, and waited for until the "
        "deadline.",
    ),
    Setting(
        "write_buffer", "auto", "size, or auto",
        "HBM of each GPU that KV waits in on its way to DRAM. auto: room for the tokens of two "
        "steps. Of no account on the CPU.",
        "Raise it where chunks are counted as unsaved.",
    ),
    Setting(
        "states_every", "auto", "tokens, 16 to 1048576, auto, or off",
        "Of models with recurrent layers: so often a prompt leaves a state that others go on from. "
        "Ends, and where prompts part, have one besides, while there is room. auto: where "
        "vLLM's steps end, if computing the tokens takes longer than reading a state from NVMe.",
        "Set it where prompts share long beginnings and part anywhere. vLLM then ends steps there, "
        "rounded up to whole blocks of states, and a long prompt takes more steps.",
    ),
    Setting(
        "ttl", "off", "time, as in 30m, 12h, 7d, or off",
        "After so long without use KV is not found any more, restarts included. off: it stays "
        "while there is room.",
        "Set it where KV that is not asked for must not stay. Each use begins the time anew: what "
        "is used again and again stays. A request's own `ttl` may be shorter, never longer.",
        is_common=True,
    ),
    Setting(
        "pinning", "off", "off, or {share: 0.1, tenant_share: 0.02, longest: 1h}",
        "Whether requests may pin KV (`pin: true`).",
        "Give it a mapping, {} for the values shown, if requests need it. Pins take room from "
        "others, however much theirs is worth.",
    ),
    Setting(
        "pinning.share", "0.1", "share of each tier's slots, 0.5 at most",
        "What all pins together may take.",
        "Raise it if many pins are refused.",
    ),
    Setting(
        "pinning.tenant_share", "a fifth of share", "share of each tier's slots",
        "What the pins of one tenant (cache_salt) may take. All requests without a salt are one.",
        "Raise it where there are few tenants.",
    ),
    Setting(
        "pinning.longest", "1h", "time, as in 30m",
        "For how long at most a pin lasts.",
        "Lower it if pins outlive their use.",
    ),
    Setting(
        "truncation.enabled", "false", "true, false",
        "Prompts that were cut are served from KV that is moved to its new position, which is "
        "approximate. false: only for requests that ask (`truncation: true`); true: for all that "
        "do not refuse. `truncation: off`: for none.",
        "Set it where conversations outgrow the context window and answers may differ slightly.",
    ),
    Setting(
        "truncation.min_tokens", "64", "tokens, 32 to 65536",
        "Fewer in a row are computed.",
        "Raise it if short matches cost more than they save.",
    ),
    Setting(
        "truncation.sinks", "0", "tokens, 0 to 65536",
        "First tokens of a prompt that have to be in their place; else it is computed.",
        "Set it for models whose answers depend on their first tokens (attention sinks).",
    ),
    Setting(
        "truncation.share", "salted", "salted, everyone",
        "Among whom KV is moved: requests of one cache_salt, or also all that send none. Moved KV "
        "tells single tokens of a stored prompt to who guesses them.",
        "Set everyone if all users without a salt trust each other.",
    ),
    Setting(
        "share", "everyone", "everyone, salted",
        "Who shares KV: everyone without a cache_salt with each other, or only requests of one "
        "salt. With salted, requests without a salt neither find KV in the store nor leave any. "
        "Requests of one salt share in both cases. vLLM's own cache in HBM is not ours to "
        "restrict.",
        "Set salted where every user must have a salt.",
        is_common=True,
    ),
    Setting(
        "shared", "off", "off, or {redis: URL}, or {mooncake: {master: host:port}}",
        "A tier behind NVMe that several servers share, in a network store.",
        "Set it where a conversation may go on at another server. See deploying.md for what the "
        "network must be like.",
        is_common=True,
    ),
    Setting(
        "shared.redis", "off", "redis://, rediss:// (TLS) or unix:// URL",
        "A Redis or Valkey server. User and database may be in the URL.",
        "Small fleets, and where tenants must be kept apart by ACL.",
    ),
    Setting(
        "shared.mooncake", "off", "{master, host, metadata, protocol, devices}",
        "Mooncake Store, whose segments other processes own. master is needed; protocol is tcp or "
        "rdma. Needs attnstore-vllm[mooncake].",
        "Fleets with a network of their own: Mooncake has neither passwords nor TLS.",
    ),
    Setting(
        "shared.password_file", "none", "absolute path",
        "A file with the password for Redis.",
        "Rather than a password in the URL, which vLLM writes to its log.",
    ),
    Setting(
        "shared.secret_file", "none", "absolute path",
        "A file with the servers' secret, 32 bytes or more, that its owner alone may read. Records "
        "and their names are made with it: what a stranger writes to the store is a miss.",
        "Always, and the same at all servers. Without one who can write to the store can have "
        "forged KV served.",
    ),
    Setting(
        "shared.ca", "the system's", "absolute path",
        "Certificates that Redis's own is checked against.",
        "With a CA of your own.",
    ),
    Setting(
        "shared.cert", "none", "absolute path",
        "This server's certificate, which Redis may ask for.",
        "With `tls-auth-clients yes`.",
    ),
    Setting(
        "shared.key", "none", "absolute path",
        "The key of that certificate.",
        "With shared.cert.",
    ),
    Setting(
        "shared.deadline", "500ms", "time, 10ms to 10s",
        "How long a request waits for an answer. A store that is later is left alone for a while.",
        "Lower it to bound the first token, raise it for a slow network.",
    ),
    Setting(
        "shared.bandwidth", "off", "size a second, or off",
        "The most that is written there a second.",
        "Set it where the network has other users.",
    ),
    Setting(
        "shared.daily_writes", "off", "size a day, or off",
        "The most that is written there a day, in bursts of an hour's share. A start begins "
        "without savings.",
        "Set it where what is written costs.",
    ),
    Setting(
        "shared.prefix", "as1/", "64 characters at most",
        "What all names in the store begin with.",
        "One of each group of servers, for an ACL of Redis.",
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
        "Where requests.jsonl and machine.yaml are written. A start keeps one older trace.",
        "Put it where some hundreds of MiB are free. Data-parallel engine N has `path-dpN`.",
    ),
    Setting(
        "trace.sample", "1", "share of conversations, 1 at most",
        "The part of all conversations that is in the trace.",
        "Lower it where a whole trace gets too large: what is found then is for that part.",
    ),
    Setting(
        "trace.size", "256MiB", "size",
        "Where the trace ends.",
        "Raise it for longer traces. A prompt of 10,000 tokens takes about 1 KiB.",
    ),
    Setting(
        "audit", "off", "off, or {rate: 1/1000, tokens: 1000, stop_after: 3, keep: 256MiB}",
        "Compute a few hits all the same, and compare what is stored with what is computed. A "
        "chunk that differs is removed, and told.",
        "Give it a mapping, {} for the values shown, to see that hits are right. See audit.md.",
    ),
    Setting(
        "audit.rate", "1/1000", "share of hits, as in 1/1000",
        "The hits that are computed. Each costs its request the prefill that it would have saved.",
        "Raise it after an upgrade, or where something seems wrong.",
    ),
    Setting(
        "audit.tokens", "1000", "tokens a second, 1 to 1000000",
        "The most that is computed for it, in the mean over a minute.",
        "Lower it where the accelerator has no time to spare.",
    ),
    Setting(
        "audit.stop_after", "3", "hits, 1 to 1000",
        "After so many that differ nothing of what is stored is served any more. A start serves "
        "again when the file that the log names is removed.",
        "Set 1 where a wrong answer is worse than any loss of speed.",
    ),
    Setting(
        "audit.keep", "256MiB", "size, or off",
        "Room for chunks that differ, beside what was computed: in `audit` of nvme.path, with mode "
        "0600. `attnstore inspect` lists them.",
        "Set off where no KV may outlive its `ttl`.",
    ),
    Setting(
        "io_depth", "8", "requests, 2 to 1024",
        "Requests in flight on the device; half of them may be writes.",
        "Raise it for disks that need more to be busy. Compare with attnstore doctor.",
    ),
    Setting(
        "peers", "auto", "auto or off",
        "Data-parallel engines of one host copy KV from each other's DRAM and NVMe. A "
        "conversation that came from a sibling is not computed again.",
        "Set off where a router keeps each conversation at its engine.",
    ),
    Setting(
        "data_parallel_size", "1", "engines, 1 to 4096",
        "Engines that share the sizes. `vllm serve --data-parallel-size N` fills it in.",
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
