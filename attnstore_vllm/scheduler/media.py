# SPDX-License-Identifier: Apache-2.0
"""Pictures, sounds and videos: what of them stands in keys, and in vLLM's own caches.

It is long since the name of an input cannot be told apart from what is read of it.

vLLM names an input by a digest of its content, or by the `uuid` that its client gives. Nothing
tells the two apart, so a name is not taken for the content: keys hold a digest of what the
processor has made of the input too. Where that cannot be read, the prompt is left alone from that
input on.

vLLM's own caches go by the name alone: its prefix cache, and that of its encoder. A cat's KV there
would be saved as the dog's that came under the same name. So a name belongs to the first content
that came under it, in this process. Any other gets an alias before vLLM looks it up.

Where adapters change the encoder, vLLM puts the adapter's name before the input's. A `uuid` may
look so, too. There a name belongs to the first adapter as well; and everywhere to the weights that
it came under, since no reset of vLLM's prefix cache empties that of its encoder.
"""

from __future__ import annotations

import copy
import logging
import re
import secrets
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice, takewhile
from typing import Any, NamedTuple
from weakref import ref

from attnstore_vllm.index.keys import MultimodalSpan, media_content, media_name
from attnstore_vllm.scheduler.vllm_types import Request
from attnstore_vllm.types import Clock

logger = logging.getLogger(__name__)

ALL_TOKENS = 1 << 60
STEP_BYTES = 256 << 10
"""Bytes that one step digests on the scheduler's thread, all requests together."""
LOOK_BYTES = 2 << 10
"""Bytes that a look at an input counts for beside the bytes that are digested."""
NAME_BYTES = 1 << 10
"""Bytes that a block counts for whose name vLLM makes anew."""
JOBS_MAX = 256
"""Inputs that the thread has before it. What comes meanwhile waits to be given to it."""
DEADLINE_S = 2.0
"""A request whose media are not digested so long after vLLM first asked is computed."""
NAMES_MAX = 65_536
"""Names whose content is remembered, about 15 MB. Later ones get an alias."""
_COUNTED = re.compile(r"renderer\d+-mm-\d+-\w{1,40}-\d+")
"""As vLLM 0.32 counts (renderers/base.py); an adapter's name and a colon may stand before it."""
_COUNTED_MAX = 120
"""Characters of such a name. Longer ones are their clients', who may send a megabyte."""
_UNKNOWN = b"unknown"
"""Stands for the content of what could not be read: all under one name are taken for one."""
_MIXED = b"mixed"
"""Several contents came under the name, and nothing could be done about it."""


class Content(NamedTuple):
    """An input as the processor has made it ready, unread."""

    num_bytes: int
    digest: Callable[[], bytes]
    """Reads all of it; from any thread."""


Read = Callable[[Any], "Content | str"]
"""Takes a feature's data or mask. Returns their content, or why it cannot be read."""


def is_counted(name: str) -> bool:
    """Whether vLLM's counter made it. Cost: constant."""
    return _COUNTED.fullmatch(name[-_COUNTED_MAX:].rpartition(":")[2]) is not None


def _cannot_read(_: Any) -> Content | str:
    return "nothing here reads it"


@dataclass(slots=True)
class _Input:
    """One input of a request. It is pending until it has a content, or is left alone."""

    feature: Any
    name: bytes = b""
    """By media_name()."""
    content: bytes | None = None
    job: Future[tuple[bytes, bytes]] | None = None
    is_left_alone: bool = False
    encoder: bytes = b""
    """Names the encoder's adapter, and its weights where they have changed; empty: neither."""

    @property
    def is_pending(self) -> bool:
        return self.content is None and not self.is_left_alone

    @property
    def encoded(self) -> bytes:
        """Stands for what vLLM's encoder makes of it."""
        return (self.content or _UNKNOWN) + self.encoder


class MediaNames:
    """Reads media for one scheduler, and knows whose each name is. All methods run on the
    scheduler's thread.

    Args:
        read: see Read.
        counted: vLLM names inputs by a counter, which begins anew with each process. Names that
            look so are refused in any case: another process may have named the input.
        why_not: no media can be read here, for this reason. None: they can.
        by_adapter: adapters have weights in the encoder.
    """

    def __init__(
        self,
        read: Read = _cannot_read,
        *,
        counted: bool = False,
        why_not: str | None = None,
        by_adapter: bool = False,
        clock: Clock = time.monotonic,
    ) -> None:
        self._read = read
        self._counted = counted
        self._why_not = why_not
        self._by_adapter = by_adapter
        self._num_weights = 0
        self.clock = clock
        self.left = STEP_BYTES
        """Bytes that this step may still digest."""
        self._thread: ThreadPoolExecutor | None = None
        self._jobs: list[Future[tuple[bytes, bytes]]] = []
        self._digests: dict[int, tuple[ref[Any], bytes]] = {}
        """By the id of the data: vLLM's cache gives the same object to the next request."""
        self._owners: dict[bytes, bytes] = {}
        self._prefix = f"attnstore-{secrets.token_hex(8)}-"
        self._has_said = False

    # ---- reading -----------------------------------------------------------------------

    def advance(self, one: _Input) -> None:
        """Begin to read the input, or see whether it has been read."""
        if one.job is not None:
            if one.job.done():
                self._take(one, one.job)
            return
        if self.left <= 0:
            return
        self.left -= LOOK_BYTES
        feature, position = one.feature, one.feature.mm_position
        why = self._why_no_name(feature.identifier)
        data, mask = self._read(feature.data), Content(0, bytes)
        if position.is_embed is not None:
            found = self._read(position.is_embed)
            mask = found if isinstance(found, Content) else mask
            data = found if isinstance(found, str) else data
        if why is not None or isinstance(data, str):
            self.leave_alone(one, why or f"{data}. {_UNREAD}")
            return
        key = id(feature.data)
        known = self._digests.get(key)
        if known is not None and known[0]() is feature.data:
            data = Content(0, lambda: known[1])
        size = data.num_bytes + mask.num_bytes + len(feature.identifier)

        def work(digest: Callable[[], bytes] = data.digest) -> tuple[bytes, bytes]:
            name = media_name(feature.identifier)
            made = digest()
            self._remember(key, feature.data, made)
            parts = name, made, feature.modality, position.length, mask.digest()
            return name, media_content(*parts)

        if size <= self.left:
            self.left -= size
            one.name, one.content = work()
            return
        if len(self._jobs) >= JOBS_MAX:
            self._jobs = [job for job in self._jobs if not job.done()]
        if len(self._jobs) < JOBS_MAX:
            self._thread = self._thread or ThreadPoolExecutor(1, "attnstore-media")
            one.job = self._thread.submit(work)
            self._jobs.append(one.job)

    def _why_no_name(self, name: str | None) -> str | None:
        if self._why_not is not None:
            return self._why_not
        if self._counted or not name or is_counted(name):
            return (
                f"vLLM names it {(name or '')[:100]!r}, which means another one after a restart. "
                "Names by content need --enable-prefix-caching, or --mm-processor-cache-gb above 0"
            )
        return None

    def _take(self, one: _Input, job: Future[tuple[bytes, bytes]]) -> None:
        one.job, error = None, job.exception()
        if error is not None:
            self.leave_alone(one, f"reading it has failed ({error!r}). {_UNREAD}")
        else:
            one.name, one.content = job.result()

    def _remember(self, key: int, data: Any, digest: bytes) -> None:
        """For as long as the data live. From any thread."""
        self._digests[key] = ref(data, lambda _: self._digests.pop(key, None)), digest

    def end_step(self) -> None:
        self.left = STEP_BYTES

    def leave_alone(self, one: _Input, why: str) -> None:
        one.is_left_alone = True
        if one.job is not None:
            one.job.cancel()
        if not self._has_said:
            self._has_said = True
            logger.warning(
                "AttnStore leaves prompts alone from their first picture or sound on that it "
                "cannot tell from others by content: %s",
                why,
            )

    # ---- names -------------------------------------------------------------------------

    @property
    def watches_names(self) -> bool:
        """Whether KV of media is saved here at all."""
        return self._why_not is None and not self._counted

    def weights_changed(self) -> None:
        """The encoder of media that come from now on is another one, be it known again or not."""
        self._num_weights += 1

    def encoder_of(self, request: Request) -> bytes:
        """See _Input.encoder."""
        lora = request.lora_request
        name = media_name(lora.lora_name) if self._by_adapter and lora is not None else b""
        return name + str(self._num_weights or "").encode()

    def is_its(self, one: _Input) -> bool:
        """Whether what vLLM has under the input's name is of its content. From now on it is, if
        nothing was."""
        identifier = one.feature.identifier
        if not self.watches_names or not identifier or is_counted(identifier):
            return True  # under such a name nothing is saved
        if identifier.startswith(self._prefix):
            return False  # an alias, which its client has from KV events: it is another input's
        one.name = one.name or media_name(identifier)
        if len(self._owners) >= NAMES_MAX and one.name not in self._owners:
            return False
        return self._owners.setdefault(one.name, one.encoded) == one.encoded

    def alias(self, one: _Input) -> str:
        """A name for the input that is its content's alone; no client can guess it."""
        return f"{self._prefix}{one.name.hex()}-{one.encoded.hex()}"

    def mix(self, name: bytes) -> None:
        """Something else runs under the name from now on."""
        if name in self._owners:
            self._owners[name] = _MIXED

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)


_UNREAD = "vLLM's name for it may be its client's, and is not enough"


class RequestMedia:
    """The media of one request, or of a session, which gets more. All methods run on the
    scheduler's thread."""

    def __init__(self, names: MediaNames, request: Request) -> None:
        self._names = names
        self.request = request
        self._inputs: list[_Input] = []
        self._num_decided = self._num_claimed = 0
        """Leading inputs that are not pending, and those whose names are claimed."""
        self._until: float | None = None
        self._reads = True
        """No input was left alone so far."""
        self.spans: list[MultimodalSpan] = []
        """Places of the leading inputs whose content is known. It grows, and stays this object."""

    def known_tokens(self) -> int:
        """Tokens before the first input whose content is not known. Cost: constant."""
        features = self.request.mm_features
        if len(self.spans) == len(features):
            return ALL_TOKENS
        return int(features[len(self.spans)].mm_position.offset)

    @property
    def is_pending(self) -> bool:
        """Whether something of it is still to be read, or to be named."""
        return self._num_claimed < len(self._inputs)

    def begin(self, *, at_once: bool = False) -> None:
        """The request has come: vLLM has looked up nothing of it.

        Args:
            at_once: it is not to wait for what is read later.
        """
        self._advance()
        if at_once:
            self._give_up(f"it came with more than is read in a step, and does not wait. {_UNREAD}")
        self._claim()

    def waits(self) -> bool:
        """vLLM asks what the request finds: is it to ask again?"""
        if self._num_claimed == len(self.request.mm_features):
            return False
        self._advance()
        if self._num_decided < len(self._inputs):
            now = self._names.clock()
            self._until = self._until or now + DEADLINE_S
            if now < self._until:
                return True
            self._give_up(f"it was not read within {DEADLINE_S} s. {_UNREAD}")
        return self._claim()  # vLLM has looked up its old names: it is to look again

    def leave_alone(self, *, at_once: bool) -> None:
        """The store does not serve the request: nothing of it is read.

        Args:
            at_once: vLLM does not let it wait.
        """
        self._reads = False
        self._advance()
        self._claim(at_once=at_once)

    def name_anew(self) -> None:
        """The encoder's weights have changed. vLLM asks again, and then it gets other names."""
        self._num_claimed = 0
        for one in self._inputs:
            one.encoder = self._names.encoder_of(self.request)

    def scheduled(self) -> set[bytes]:
        """vLLM has scheduled it, with all its inputs. What a session has brought since the last
        time is looked up under its names already.

        Returns the names under which vLLM may have several contents from now on.
        """
        if self._num_claimed == len(self.request.mm_features):
            return set()
        self._advance()
        self._give_up(f"a session brought more at once than is read in a step. {_UNREAD}")
        mixed = set()
        for one in self._inputs[self._num_claimed :]:
            if not self._names.is_its(one):
                self._names.mix(one.name)
                mixed.add(one.name)
                one.is_left_alone, one.content, self._reads = True, None, False
        self._num_claimed = len(self._inputs)
        self._place()
        return mixed

    def end(self) -> None:
        """The request has ended: what was not read need not be."""
        for one in self._inputs:
            if one.job is not None:
                one.job.cancel()

    def has(self, names: Collection[bytes]) -> bool:
        return any(one.name in names for one in self._inputs)

    # ---- parts of these ----------------------------------------------------------------

    def _see(self) -> None:
        new = self.request.mm_features[len(self._inputs) :]
        encoder = self._names.encoder_of(self.request) if new else b""
        self._inputs += [_Input(feature, encoder=encoder) for feature in new]

    def _advance(self) -> None:
        self._see()
        for one in islice(self._inputs, self._num_decided, None):
            if one.is_pending and self._reads:
                self._names.advance(one)
            if one.is_left_alone or not self._reads:  # and so is what follows
                one.is_left_alone, self._reads = True, False
            if one.is_pending and one.job is None:
                break  # there is no more time for it in this step, nor for what follows
        self._count_decided()

    def _count_decided(self) -> None:
        rest = islice(self._inputs, self._num_decided, None)
        self._num_decided += len(list(takewhile(lambda one: not one.is_pending, rest)))

    def _give_up(self, why: str) -> None:
        for one in islice(self._inputs, self._num_decided, None):
            if one.is_pending:
                self._names.leave_alone(one, why)
        self._count_decided()

    def _claim(self, *, at_once: bool = False) -> bool:
        """Claim the names of all inputs, once all are decided and the step has time for it. Returns
        whether vLLM is to ask again: not all are claimed, or some had to be renamed.

        Args:
            at_once: also beyond what the step has time for.
        """
        if self._num_decided < len(self._inputs):
            return True
        renamed = [one for one in self._inputs[self._num_claimed :] if not self._names.is_its(one)]
        if renamed and self._names.left <= 0 and not at_once:
            return True  # to name blocks anew costs a hash each, and how many come is for clients
        self._num_claimed = len(self._inputs)
        if renamed:
            self._rename(renamed)
        self._place()
        return bool(renamed)

    def _rename(self, inputs: Sequence[_Input]) -> None:
        for one in inputs:
            one.feature = copy.copy(one.feature)  # the other requests of an `n` may share it
            one.feature.identifier = self._names.alias(one)
            one.name = media_name(one.feature.identifier)
        request = self.request
        request.mm_features = [one.feature for one in self._inputs]
        self._names.left -= NAME_BYTES * len(request.block_hashes)
        request.block_hashes.clear()  # they are made of the names
        request.update_block_hashes()

    def _place(self) -> None:
        for one in self._inputs[len(self.spans) : self._num_claimed]:
            if one.content is None:
                return
            position = one.feature.mm_position
            self.spans.append(MultimodalSpan(one.content, position.offset, position.length))
