# SPDX-License-Identifier: Apache-2.0
"""Facts that a model's files give beside its weights: how media are made ready for it, above all.

All small files of settings and code that stand in the model's directory count, by content, unless
it is known that nothing in KV depends on them. Of a model with code of its own all files count: no
one knows what it reads.
"""

from __future__ import annotations

import importlib.metadata
import logging
import os
import secrets
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from blake3 import blake3

from attnstore_vllm.identity.drafts import draft_model_of, drafts_of
from attnstore_vllm.identity.moved_files import check_branch, check_unmoved
from attnstore_vllm.identity.own_code import digest_of_directory, files_below
from attnstore_vllm.identity.weights import weight_files

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

logger = logging.getLogger(__name__)

_SUFFIXES = (".json", ".py", ".yaml", ".yml")
_LEFT_OUT = (
    # The configuration as vLLM uses it is in the namespace as such. But see _reads_config().
    "config.json",
    "params.json",
    # They make tokens of text, or choose tokens: the keys are of tokens.
    "tokenizer.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "chat_template.json",
    "generation_config.json",
)
_VOCABULARIES = (
    "tokenizer.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt",
    "vocab.txt", "tokenizer.model", "tokenizer_config.json",
)  # fmt: skip
_READS_CONFIG = "Dots3Note"
"""Begins the names of models that read sections of the directory's config.json by themselves."""
_BELOW = ("whisper-large-v3/config.json",)
"""Files below the directory that models of vLLM read: Kimi-Audio's of its encoder."""
_LEFT_OUT_OF_TEXT = "tokenizer_config.json"
"""A file that is left out for text; for a model that takes media it says which processor there
is."""
_INDEX = ".index.json"
"""Ends the name of a file that says which weights are in which file."""
_MARKS = ("config.json", "params.json", "preprocessor_config.json", "tokenizer_config.json")
"""Files of which a model of the hub has at least one."""
_LIBRARIES = ("transformers", "torch", "torchvision", "mistral_common")
"""They make numbers of media, and models of configurations."""


class _Origin(NamedTuple):
    directory: Path
    revision: str | None
    """It is the hub's snapshot of that; None: of `main`, or it is no snapshot."""

    @property
    def is_snapshot(self) -> bool:
        return self.directory.parent.name == "snapshots"


def files_of(vllm_config: VllmConfig, *, has_own_code: bool = False) -> dict[str, str]:
    """Names and digests of the files, and versions of the libraries that read them.

    A model that takes media and whose files are not found gets a random identity: nothing of it
    is found again after a restart. Cost: reads each file whole, some MB at most, once at start; for
    code of its own as much as digest_of_code() for each directory.

    Args:
        has_own_code: the model has classes that no version tells, which may read any file.
    Raises: OSError.
    """
    model, places = vllm_config.model_config, _places(vllm_config)
    if not _of_the_model(vllm_config) and model.is_multimodal_model:
        logger.warning(
            "AttnStore finds no files that say how media are made ready for %s; what it stores now "
            "will not be used after a restart",
            model.model,
        )
        return {"unknown": secrets.token_hex(16)}
    digests: dict[str, set[str]] = {}
    for name, file in _files(vllm_config, places):
        digests.setdefault(name, set()).add(blake3(file.read_bytes()).hexdigest())
    found = {name: " ".join(sorted(several)) for name, several in digests.items()}
    if has_own_code:
        whole = [
            digest_of_directory(at, _told_as_weights(vllm_config, at)) for at in _every(places)
        ]
        found["all"] = " ".join(whole)
    return found | {f"version of {name}": _version(name) for name in _LIBRARIES}


def check_files(vllm_config: VllmConfig, begun_at: float, *, has_own_code: bool = False) -> None:
    """Raise ValueError if one of the files may not be as vLLM has read it.

    A file that was taken away since is not seen as such, but its directory has changed. Snapshots
    of the hub are new where this start has downloaded them, and never change.

    Args:
        begun_at: Unix seconds, by the clock of file systems, before vLLM has read one.
        has_own_code: see files_of().
    Raises: OSError.
    """
    places = _places(vllm_config)
    for place in places:
        if place.is_snapshot:
            check_branch(*place, begun_at)
        elif place.directory.stat().st_ctime > begun_at:
            raise ValueError(
                f"a file came to {place.directory}, or left it, while the server was starting"
            )
    found = [file for _, file in _files(vllm_config, places)]
    for at in _every(places) if has_own_code else ():
        found += set(files_below(at)) - _told_as_weights(vllm_config, at)
    check_unmoved(found, begun_at)


def _every(places: Iterable[_Origin]) -> list[Path]:
    return list(dict.fromkeys(place.directory for place in places))


def _told_as_weights(vllm_config: VllmConfig, directory: Path) -> set[Path]:
    """Files that identity/weights.py names: of made-up weights there are none."""
    load_format = str(vllm_config.load_config.load_format)
    try:
        return set() if load_format == "dummy" else set(weight_files(directory, load_format))
    except ValueError:
        return set()


def _places(vllm_config: VllmConfig) -> list[_Origin]:
    places = _of_the_model(vllm_config)
    if (draft := draft_model_of(vllm_config)) is not None:
        download_dir = vllm_config.load_config.download_dir
        places += _directories(draft.model, draft.revision, download_dir)
    return places


def _of_the_model(vllm_config: VllmConfig) -> list[_Origin]:
    model = vllm_config.model_config
    return [
        *_directories(model.model, model.revision, vllm_config.load_config.download_dir),
        *_directories(str(model.tokenizer), model.tokenizer_revision, None),
    ]


def _files(vllm_config: VllmConfig, places: Sequence[_Origin]) -> Iterator[tuple[str, Path]]:
    """Each file and its name. Those that a setting names are called by what they say."""
    model, draft = vllm_config.model_config, draft_model_of(vllm_config)
    # Drafts with a vocabulary of their own are made of both tokenizers.
    maps = bool(getattr(drafts_of(vllm_config), "use_heterogeneous_vocab", False))
    reads_config = _reads_config(model)
    for number, place in enumerate(places):
        below = [place.directory / name for name in _BELOW if model.is_multimodal_model]
        yield from ((file.parent.name, file) for file in below if file.is_file())
        for file in place.directory.iterdir():
            is_read = reads_config and file.name == "config.json"
            if is_read or _counts(file, model.is_multimodal_model):
                yield file.name, file
            elif maps and file.name in _VOCABULARIES:
                yield f"{number} {file.name}", file
    scales = getattr(model.multimodal_config, "mm_encoder_fp8_scale_path", None)
    if scales is not None:
        yield "scales", Path(scales)
    for of, one in (("model", model), ("drafts", draft)):
        overrides = getattr(one, "hf_overrides", None)  # of drafts it may be a function
        if isinstance(overrides, dict) and (named := overrides.get("quantization_config_file")):
            yield f"quantization of the {of}", Path(named)


def _reads_config(model: ModelConfig) -> bool:
    """Whether media may be made ready by what the directory's own config.json says: vLLM reads it
    for some, also where a setting has replaced it for the model."""
    is_replaced = bool(model.hf_overrides or model.hf_config_path)
    reads = any(name.startswith(_READS_CONFIG) for name in model.architectures)
    return model.is_multimodal_model and (is_replaced or reads)


def _counts(file: Path, takes_media: bool) -> bool:
    name = file.name
    known = name in _LEFT_OUT or name.endswith(_INDEX)
    known = known or (name == _LEFT_OUT_OF_TEXT and not takes_media)
    return file.suffix in _SUFFIXES and not known and file.is_file()


def _directories(model: str, revision: str | None, download_dir: str | None) -> Iterator[_Origin]:
    """A model's directory, or its snapshots in the caches of the hub: processors are read from the
    usual one, also where weights are in another."""
    if os.path.isdir(model):
        yield _Origin(Path(model).resolve(), None)
        return
    from huggingface_hub import try_to_load_from_cache  # noqa: PLC0415

    for cache in (None, download_dir) if download_dir else (None,):
        for mark in _MARKS:
            try:
                found = try_to_load_from_cache(
                    model, mark, cache_dir=cache, revision=revision or "main"
                )
            except ValueError:  # not the name of a hub model
                return
            if isinstance(found, str):
                yield _Origin(Path(found).parent, revision)
                break


def _version(library: str) -> str:
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return ""
