# SPDX-License-Identifier: Apache-2.0
"""Public data that benchmarks use: where each file comes from, its licence and its SHA-256.

A file is named by its hash, so a copy from anywhere serves. What has another hash is refused: its
figures would be those of other data under the same name.
"""

from __future__ import annotations

import json
import os
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from hashlib import file_digest, sha256
from pathlib import Path
from typing import BinaryIO, Final

from attnstore_vllm.errors import AttnStoreError

ROOT: Final = Path(__file__).parent.parent.parent
FOLDER: Final = ROOT / ".cache" / "data"
"""Where files are fetched to, and looked for."""
SHAREGPT: Final = "ShareGPT_V3_unfiltered_cleaned_split.json"
TIMEOUT_S: Final = 60.0
READ_BYTES: Final = 1 << 20
_GITHUB = "https://raw.githubusercontent.com"
_MOONCAKE = f"{_GITHUB}/kvcache-ai/Mooncake/3b5a594133958449a1feaf1c9e0fc1b553e34a28"
_AZURE = f"{_GITHUB}/Azure/AzurePublicDataset/b469a113cedca53ddc3bdea71a143dc4b7d8700c"
_FASTCHAT = f"{_GITHUB}/lm-sys/FastChat/0e6d3e4beaab66f4d3f93db72541a4abab8af28d"
_HUGGING_FACE = "https://huggingface.co/datasets"

Progress = Callable[[str, int], AbstractContextManager[Callable[[int], object]]]
"""A bar for a file's name and its bytes; what it gives is called with the bytes that came."""


class DataError(AttnStoreError):
    """A file is not to be had, or is not what it should be. Nothing is left at its place."""


@dataclass(frozen=True, slots=True)
class Source:
    """One file.

    Args:
        words: what it is, in a table.
        licence: as its publisher says.
        sha256: of the whole file, in hexadecimal.
    """

    file: str
    words: str
    licence: str
    url: str
    num_bytes: int
    sha256: str

    def where(self, folder: Path) -> Path:
        return folder / self.file


# fmt: off
SOURCES: Final[Mapping[str, Source]] = {
    "sharegpt": Source(
        SHAREGPT, "90,000 conversations with ChatGPT, as benchmarks of serving use them",
        "of its users; upstream says Apache-2.0",
        f"{_HUGGING_FACE}/anon8231489123/ShareGPT_Vicuna_unfiltered/resolve/main/{SHAREGPT}",
        672_837_942, "35f0e213ce091ed9b9af2a1f0755e9d39f9ccec34ab281cd4ca60d70f6479ba4",
    ),
    "mooncake-conversation": Source(
        "mooncake_conversation_trace.jsonl", "12,031 requests of a chat service, one hour",
        "Apache-2.0", f"{_MOONCAKE}/FAST25-release/traces/conversation_trace.jsonl",
        3_029_533, "b8cbb061a85206d729d91cdc2981f43c9e0d99209dce588d3af5f7934408b9df",
    ),
    "mooncake-synthetic": Source(
        "mooncake_synthetic_trace.jsonl", "3,993 requests made of public data sets",
        "Apache-2.0", f"{_MOONCAKE}/FAST25-release/traces/synthetic_trace.jsonl",
        1_136_313, "bd070915a98fc0ed264d7cfef2ce746002eb3076a695ec31ba2674c0111ec131",
    ),
    "azure-conversation": Source(
        "AzureLLMInferenceTrace_conv.csv", "19,366 requests of a service: times and lengths",
        "CC-BY-4.0", f"{_AZURE}/data/AzureLLMInferenceTrace_conv.csv",
        719_188, "2f1e5b666d4e3055fdbba98598ce2ec307767b9064e03e2fa46676dbcc7d0bf8",
    ),
    "azure-code": Source(
        "AzureLLMInferenceTrace_code.csv", "8,819 requests of a coding service",
        "CC-BY-4.0", f"{_AZURE}/data/AzureLLMInferenceTrace_code.csv",
        320_117, "54e9a6d2a4bd06ba1e060304b900abbc74cbea53de96506e60fe5bb4f2277fb6",
    ),
    "mt-bench": Source(
        "mt_bench_question.jsonl", "80 questions of two turns",
        "Apache-2.0", f"{_FASTCHAT}/fastchat/llm_judge/data/mt_bench/question.jsonl",
        48_929, "119565adbab82227089cefdb44c8d7e2cf04dc0a0ec233634c82e7d4e2a944f7",
    ),
}
# fmt: on


def digest(path: Path) -> str:
    with path.open("rb") as file:
        return file_digest(file, "sha256").hexdigest()


def facts(path: Path) -> dict[str, object]:
    """What a result says of its data: name, hash, and of conversations how many there are."""
    content = path.read_bytes()
    told: dict[str, object] = {"data": path.name, "data_sha256": sha256(content).hexdigest()}
    if path.suffix == ".json":
        told["data_conversations"] = len(json.loads(content))
    return told


def is_papers(result: Mapping[str, object]) -> bool:
    """Whether a result is of the conversations that the paper replays."""
    return result.get("data_sha256") == SOURCES["sharegpt"].sha256


def fetch(source: Source, to: Path, progress: Progress, origin: Path | None = None) -> bool:
    """Bring a file to `to`; False if it is there already.

    Args:
        origin: a folder that has the file, for machines without a network.
    Raises: DataError if it is not to be had, or has another hash than it should.
    """
    place = source.where(to)
    if place.exists() and digest(place) == source.sha256:
        return False
    to.mkdir(parents=True, exist_ok=True)
    began = origin / source.file if origin is not None else source.url
    fd, name = tempfile.mkstemp(dir=to, prefix=f".{source.file}.")
    try:
        with os.fdopen(fd, "wb") as file, _opened(began) as stream:
            found = _copy(stream, file, source, progress)
        if found != source.sha256:
            raise DataError(
                f"{began} has the SHA-256 {found}; {source.sha256} was expected. "
                "It is other data, or a transfer broke off; it is not kept"
            )
        Path(name).chmod(0o644)  # a temporary file is its owner's alone
        Path(name).replace(place)
    except OSError as error:
        raise DataError(
            f"{began} is not to be had: {error}. Bring {source.file} in some other way, and name "
            "its folder: --from FOLDER"
        ) from error
    finally:
        Path(name).unlink(missing_ok=True)
    return True


def _opened(began: Path | str) -> BinaryIO:
    if isinstance(began, Path):
        return began.open("rb")
    opened: BinaryIO = urllib.request.urlopen(began, timeout=TIMEOUT_S)  # https, of SOURCES
    return opened


def _copy(stream: BinaryIO, file: BinaryIO, source: Source, progress: Progress) -> str:
    """Returns the SHA-256 of what came. It stops where more comes than the file has."""
    hashed, came = sha256(), 0
    with progress(source.file, source.num_bytes) as advance:
        while came <= source.num_bytes and (part := stream.read(READ_BYTES)):
            came += len(part)
            hashed.update(part)
            file.write(part)
            advance(len(part))
    return hashed.hexdigest()
