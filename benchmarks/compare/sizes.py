# SPDX-License-Identifier: Apache-2.0
"""How large HBM, DRAM and NVMe of a comparison are: pure functions of a model and a load.

They are scaled down together, by the working set: all tokens that the load's sessions have when
they end. HBM is what the paper's is beside it, too small to keep a conversation until its next
turn; DRAM holds a part, NVMe the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from attnstore_lab.bench.client import RequestSettings
from attnstore_lab.bench.conversations import Conversation
from attnstore_lab.bench.schedule import Load, sessions
from attnstore_lab.bench.talk import answer_tokens
from attnstore_vllm.errors import ConfigError

HBM_SHARE: Final = 0.1
"""Of the working set; but HBM has room for two whole contexts at least."""
HBM_CONTEXTS: Final = 2
DRAM_SHARE: Final = 0.25
NVME_SHARE: Final = 1.25
BOUND_SHARE: Final = 1.25
CHUNK_TOKENS: Final = 256
"""Of the store's slots. The end of each session takes a whole one."""
RECORD_HEAD_BYTES: Final = 4096
TURN_TOKENS: Final = 8
"""That a chat template puts around a text."""
GIB: Final = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What each server gets. HBM in tokens of KV, DRAM and NVMe in bytes.

    Args:
        bound_tokens: of the server whose HBM has room for everything.
        written_bytes: that a server writes which keeps every prompt whole (ExampleConnector).
    """

    kv_bytes_per_token: int
    context_tokens: int
    block_tokens: int
    working_set_tokens: int
    hbm_tokens: int
    bound_tokens: int
    dram_bytes: int
    nvme_bytes: int
    written_bytes: int

    @property
    def hbm_holds_all(self) -> bool:
        """Then vLLM's own cache loses nothing, and a comparison says nothing."""
        return self.hbm_tokens >= self.working_set_tokens

    def blocks(self, tokens: int) -> int:
        return -(-tokens // self.block_tokens)

    def cpu_space_gib(self, tokens: int) -> int:
        """VLLM_CPU_KVCACHE_SPACE for so many tokens."""
        return tokens * self.kv_bytes_per_token // GIB + 1


def prompt_lengths(
    conversation: Conversation,
    settings: RequestSettings,
    turns: int | None,
    count: Callable[[str], int],
) -> Iterator[int]:
    """Tokens of a conversation's prompts, turn by turn, and what it has when it ends.

    Args:
        count: the tokens of a text.
    """
    questions = conversation.questions[:turns]

    def size(piece: Any) -> int:
        return count(piece) + TURN_TOKENS if isinstance(piece, str) else len(piece)

    tokens = size(conversation.system) if conversation.system is not None else 0
    for n, question in enumerate(questions):
        tokens += size(question)
        yield tokens
        said = conversation.answer(n) if settings.history == "data" else None
        last = n == len(questions) - 1
        generated = answer_tokens(conversation, n, settings)
        tokens += generated if said is None or last else size(said)
    yield tokens


def sized(
    conversations: Sequence[Conversation],
    load: Load,
    settings: RequestSettings,
    count: Callable[[str], int],
    *,
    kv_bytes_per_token: int,
    context_tokens: int,
    block_tokens: int,
    hbm_tokens: int | None = None,
    dram_bytes: int | None = None,
    nvme_bytes: int | None = None,
) -> Sizes:
    """Sizes for this load; those that are given are taken as they are.

    Raises: ConfigError if one that is given is too small to work at all.
    """
    lengths = [tuple(prompt_lengths(c, settings, load.turns, count)) for c in conversations]
    held = [lengths[s.conversation] for s in sessions(conversations, load)]
    held = [session for session in held if session[-1] <= context_tokens] or held[:1]
    ends = [session[-1] for session in held]
    working_set = sum(ends)
    slot_bytes = CHUNK_TOKENS * kv_bytes_per_token + RECORD_HEAD_BYTES
    slots = sum(-(-end // CHUNK_TOKENS) + 1 for end in ends)
    least = HBM_CONTEXTS * -(-context_tokens // block_tokens) * block_tokens
    hbm = hbm_tokens or max(least, int(HBM_SHARE * working_set))
    if hbm < context_tokens + block_tokens:
        raise ConfigError(
            f"--hbm-tokens is {hbm}; a request may have {context_tokens} tokens, so "
            f"{context_tokens + block_tokens} are the least (or a smaller --max-model-len)"
        )
    context_slots = least // CHUNK_TOKENS + 1
    return Sizes(
        kv_bytes_per_token=kv_bytes_per_token,
        context_tokens=context_tokens,
        block_tokens=block_tokens,
        working_set_tokens=working_set,
        hbm_tokens=hbm,
        bound_tokens=max(
            hbm,
            int(BOUND_SHARE * sum(-(-end // block_tokens) * block_tokens for end in ends)) + least,
        ),
        dram_bytes=dram_bytes or max(context_slots, int(DRAM_SHARE * slots)) * slot_bytes,
        nvme_bytes=nvme_bytes or max(2 * context_slots, int(NVME_SHARE * slots)) * slot_bytes,
        written_bytes=sum(sum(session[:-1]) for session in held) * kv_bytes_per_token,
    )
