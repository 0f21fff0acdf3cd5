# SPDX-License-Identifier: Apache-2.0
"""Whose KV it is: the model's weights, by the content of the files that vLLM loads them from.

A quick look at the files is in the namespace, which says whose segments are read. A digest of
every byte is in the first key of every sequence: so KV of other weights is not found, under any
the look has missed. Until the digest is known, nothing is found and nothing is saved.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from blake3 import blake3

from attnstore_vllm.engine_start import configured_at, end_start
from attnstore_vllm.identity.drafts import draft_model_of, drafts_of
from attnstore_vllm.identity.moved_files import FILE_CLOCK_S, check_branch, check_unmoved
from attnstore_vllm.identity.weight_files import Digest, Memo, WeightFile, sampled

if TYPE_CHECKING:
    from torch import nn
    from vllm.config import LoadConfig, ModelConfig, VllmConfig

logger = logging.getLogger(__name__)

_FROM_FILES = (
    "auto",
    "hf",
    "safetensors",
    "fastsafetensors",
    "instanttensor",
    "mistral",
    "pt",
    "sharded_state",
    "bitsandbytes",
    "gguf",
)
"""Not npcache: it loads a copy that it has made once, and not again of newer files."""
_ONLY_SAFETENSORS = ("safetensors", "fastsafetensors", "instanttensor", "mistral", "sharded_state")
_OTHERS = (".bin", ".pt", ".pth", ".gguf", ".npz")
_FROM_SUBFOLDERS = {
    "MiMoAudioTokenizer": "audio_tokenizer/",
    "JinaEmbeddingsV5DecoderModel": "adapters/",
    "JinaEmbeddingsV5EncoderModel": "adapters/",
}
"""Parts of models of vLLM that read weights beside its loader, from below the model's directory."""
_PICKLED = (".bin", ".pt", ".pth")
_THREADS = "enable_multithread_load"
_HARMLESS = {_THREADS, "num_threads"}
"""Keys of --model-loader-extra-config that do not say which weights are loaded."""
_PART = re.compile(r"(.*)-\d+-of-(\d+)\.gguf")


class DigestOfNodes:
    """Digests of the weights that each node of an engine has loaded, each from files of its own.

    Args:
        own: this node's.
        others: the digests of the others, by node, as far as they are known.
        count: how many others there are.
    """

    def __init__(self, own: Digest | bytes, others: Mapping[int, bytes], count: int) -> None:
        self._own, self._others, self._count = own, others, count

    @property
    def value(self) -> bytes | None:
        """None until all are known."""
        own = self._own.value if isinstance(self._own, Digest) else self._own
        if own is None or len(self._others) < self._count:
            return None
        return own + b"".join(digest for _, digest in sorted(self._others.items()))

    def close(self) -> None:
        if isinstance(self._own, Digest):
            self._own.close()


class Weights:
    """Names for the KV of these weights.

    Args:
        namespace: of everything else that the bytes depend on.
        digest: of the weights; a Digest may not know it yet.
    """

    def __init__(self, namespace: bytes, digest: Digest | DigestOfNodes | bytes) -> None:
        self._base = namespace
        self._digest = digest
        self._salt = secrets.token_bytes(32)
        self._live = b""
        """Names weights that came after the start; empty: they are those of the files."""

    @property
    def namespace(self) -> bytes | None:
        """The fingerprint that all keys begin with; None: it is not known yet whose KV it is."""
        found = self._digest if isinstance(self._digest, bytes) else self._digest.value
        return None if found is None else blake3(self._base + found + self._live).digest()

    def be_live(self, live: Mapping[int, bytes | None]) -> None:
        """These are in memory from now on. What no file has gets a name that no other process
        finds: this one alone sees whether KV is of them.

        Args:
            live: by rank (LiveWeights.name).
        """
        if not live or None in live.values():
            self._live = secrets.token_bytes(32)
        elif any(live.values()):
            self._live = blake3(self._salt + repr(sorted(live.items())).encode()).digest()
        else:
            self._live = b""

    def close(self) -> None:
        if not isinstance(self._digest, bytes):
            self._digest.close()


def identify(
    vllm_config: VllmConfig, own_files: Sequence[str | None], directory: Path
) -> tuple[str, Digest | bytes]:
    """(What the namespace takes in, what the keys take in).

    Weights that cannot be told by files get a random identity: nothing of them is found again
    after a restart. Cost: see weight_files.

    Args:
        own_files: each rank's (identity/rank.py).
        directory: the store's; the caller holds its lock.
    """
    try:
        return _identify(vllm_config, own_files, directory)
    finally:
        end_start()


def _identify(
    vllm_config: VllmConfig, own_files: Sequence[str | None], directory: Path
) -> tuple[str, Digest | bytes]:
    made_of = _made_of(vllm_config)
    if all(
        str(load.load_format) == "dummy" and model.quantization is None for model, load in made_of
    ):
        return "dummy", b"dummy"  # made from a fixed seed, and of the shapes that it is asked for
    try:
        files: list[WeightFile] = []
        for of, (model, load) in zip(("model", "drafts"), made_of, strict=False):
            paths = _files(model, load, own_files)
            places = places_of(paths)
            files += [
                WeightFile(path, f"{path.name} {places[path]}" if path in places else path.name, of)
                for path in paths
            ]
        look, digest = sampled(files), Digest(files, Memo(directory))
        try:
            # Once more: now a later change is seen by the digest itself.
            _check_times([file.path for file in files])
        except (OSError, ValueError):
            digest.close()
            raise
        return look, digest
    except (OSError, ValueError) as error:
        logger.warning(
            "AttnStore cannot tell the weights of %s: %s. What it stores now is not found again "
            "after a restart",
            vllm_config.model_config.model,
            error,
        )
        return secrets.token_hex(16), secrets.token_bytes(16)


def _made_of(vllm_config: VllmConfig) -> list[tuple[ModelConfig, LoadConfig]]:
    """The model, and the one that makes its drafts if that has files of its own."""
    load, draft = vllm_config.load_config, draft_model_of(vllm_config)
    own_load = getattr(vllm_config.speculative_config, "draft_load_config", None) or load
    if draft is None and own_load != load:  # it may load other files of the same directory
        draft = getattr(drafts_of(vllm_config), "draft_model_config", None)
    found = [(vllm_config.model_config, load)]
    return found if draft is None else [*found, (draft, own_load)]


def own_files(model: nn.Module) -> str | None:
    """Why the files of a rank's model cannot be named from outside. See identity/rank.py."""
    for name in ("allow_patterns_overrides", "secondary_weights"):
        if getattr(model, name, None):
            return f"{type(model).__name__} says itself what it loads ({name})"
    for part in model.modules():
        for kind in type(part).__mro__:
            if kind.__name__ in _FROM_SUBFOLDERS:
                return f"{kind.__name__} loads {_FROM_SUBFOLDERS[kind.__name__]} by itself"
    return None


def _files(model: ModelConfig, load: LoadConfig, own: Sequence[str | None]) -> list[Path]:
    """The files that decide the weights. Raises ValueError if they cannot be named."""
    load_format = str(load.load_format)
    for reason in filter(None, own):
        raise ValueError(reason)
    if load_format not in _FROM_FILES or getattr(model, "model_weights", None):
        raise ValueError(f"load format {load_format!r} does not load them from files here")
    unknown = _unknown_settings(load.model_loader_extra_config)
    if unknown:
        raise ValueError(f"--model-loader-extra-config says {unknown}")
    if os.path.isfile(model.model):
        files = _parts(Path(model.model))
    else:
        directory = _directory(model.model, model.revision, load.download_dir)
        files = weight_files(directory, load_format)
    check_order(files, load.model_loader_extra_config)
    _check_times(files)
    return files


def check_order(files: Sequence[Path], extra: object) -> None:
    """Raise ValueError where threads load several files in any order: of a tensor that is in two
    the last one counts. An index says which safetensors file has which."""
    if not (isinstance(extra, Mapping) and extra.get(_THREADS)):
        return
    pickled = [file for file in files if file.suffix in _PICKLED]
    safe = [file for file in files if file.suffix == ".safetensors"]
    has_index = any(".index" in file.name for file in files)
    if len(pickled) > 1 or (len(safe) > 1 and not has_index):
        raise ValueError(
            f"--model-loader-extra-config says {_THREADS}, which loads them in any order"
        )


def places_of(files: Sequence[Path]) -> dict[Path, int]:
    """The order of several pickled files in their directory: vLLM loads them so, and of a tensor
    that is in two the last one counts. It loads safetensors in the order of their names."""
    pickled = [file for file in files if file.suffix in _PICKLED]
    if len(pickled) < 2:
        return {}
    order = {name: place for place, name in enumerate(os.listdir(pickled[0].parent))}
    return {file: place for place, file in enumerate(sorted(pickled, key=lambda f: order[f.name]))}


def _unknown_settings(extra: object) -> str:
    names = extra.keys() if isinstance(extra, Mapping) else [] if extra is None else ["?"]
    return ", ".join(sorted(str(name) for name in names if name not in _HARMLESS))


def weight_files(directory: Path, load_format: str) -> list[Path]:
    """The files of a directory that vLLM loads, and what says how it is quantized.

    Rather too many than too few: a file that is not loaded makes other copies another model, one
    that is left out could make other weights the same. Raises ValueError if there are no weights.
    """
    found = sorted(file for file in directory.iterdir() if file.is_file())
    weights = [file for file in found if file.suffix == ".safetensors"]
    if load_format == "mistral":
        weights = [file for file in weights if file.name.startswith("consolidated")]
    if load_format not in _ONLY_SAFETENSORS and (
        not weights or load_format in ("pt", "gguf", "bitsandbytes")
    ):
        # All formats: which of them is loaded, the loader decides.
        weights += [file for file in found if file.suffix in _OTHERS]
    if not weights:
        raise ValueError(f"there are none in {directory}")
    said = [file for file in found if file.suffix == ".json"]
    return weights + [file for file in said if "quant" in file.name or ".index" in file.name]


def _parts(file: Path) -> list[Path]:
    """A model of one file; of a GGUF that was split, all its parts."""
    part = _PART.fullmatch(file.name)
    if part is None:
        return [file]
    stem, count = part.groups()
    parts = [_PART.fullmatch(other.name) for other in file.parent.iterdir()]
    return sorted(file.parent / p[0] for p in parts if p and p.groups() == (stem, count))


def _directory(model: str, revision: str | None, download_dir: str | None) -> Path:
    """Where the weights lie: the model itself, or the hub's snapshot that was made of it."""
    from huggingface_hub import snapshot_download  # noqa: PLC0415
    from vllm import envs  # noqa: PLC0415

    if os.path.isdir(model):
        return Path(model)
    if envs.VLLM_USE_MODELSCOPE:
        raise ValueError("they come from ModelScope")
    found = Path(
        snapshot_download(model, revision=revision, cache_dir=download_dir, local_files_only=True)
    )
    check_branch(found, revision, _begun_at())
    return found


def _begun_at() -> float:
    """Before that, by the clock of file systems."""
    return configured_at() - FILE_CLOCK_S


def _check_times(files: Sequence[Path]) -> None:
    """Raise ValueError for what vLLM may not have read as it is now."""
    check_unmoved(files, _begun_at())
