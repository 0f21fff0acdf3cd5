# SPDX-License-Identifier: Apache-2.0
"""Names of the pictures and sounds of a request, and which of these names are none.

vLLM names an input by a digest of its content, or by the `uuid` that its user gives. Where nobody
of its own needs a name (no prefix caching, no processor cache) it counts: such a name means another
picture after a restart. Everything from an input without a name on is neither stored nor found.
"""

from __future__ import annotations

import logging
import re

from attnstore_vllm.index.keys import MultimodalSpan
from attnstore_vllm.scheduler.vllm_types import Request

logger = logging.getLogger(__name__)

ALL_TOKENS = 1 << 60
_COUNTED = re.compile(r"renderer\d+-mm-\d+-\w{1,40}-\d+")
"""As vLLM 0.32 counts (renderers/base.py); an adapter's name and a colon may stand before it."""
_COUNTED_MAX = 120
"""Characters of such a name. Longer ones are their users', who may send a megabyte."""


def spans_of(request: Request) -> tuple[MultimodalSpan, ...]:
    """Spans of all inputs that the request has now: a streaming session's next one brings more."""
    return tuple(
        MultimodalSpan(feature.identifier, feature.mm_position.offset, feature.mm_position.length)
        for feature in request.mm_features
    )


def _is_counted(name: str) -> bool:
    """Cost: constant."""
    return _COUNTED.fullmatch(name[-_COUNTED_MAX:].rpartition(":")[2]) is not None


class MediaNames:
    """Says how much of a request has names.

    Args:
        counted: vLLM names inputs by a counter. Names that look so are refused in any case: what
            reads the prompts may be another process, with settings of its own.
    """

    def __init__(self, *, counted: bool = False) -> None:
        self._counted = counted
        self._has_said = False

    def named_tokens(self, request: Request) -> int:
        """Tokens before the first input that has no name. Cost: one match for each input."""
        for feature in request.mm_features:  # in the order of their offsets
            name = feature.identifier
            if self._counted or not name or _is_counted(name):
                self._say(name)
                return int(feature.mm_position.offset)
        return ALL_TOKENS

    def _say(self, name: str) -> None:
        if not self._has_said:
            self._has_said = True
            logger.warning(
                "AttnStore leaves prompts alone from their first picture or sound on: vLLM names "
                "it %r, which means another one after a restart. Names by content need "
                "--enable-prefix-caching, or --mm-processor-cache-gb above 0",
                (name or "")[:100],
            )
