# SPDX-License-Identifier: Apache-2.0
"""A worker sees each change of its model's weights, and no change where there is none."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from attnstore_vllm.errors import UnsupportedError
from attnstore_vllm.identity import live_model
from attnstore_vllm.identity.live_model import LiveWeights, checksum, digest, models_of
from attnstore_vllm.types import Seen


class Layer(nn.Module):
    """As vLLM's layers are: plain, transposed, padded, packed by a kernel, shared."""

    def __init__(self) -> None:
        super().__init__()
        numbers = torch.Generator().manual_seed(0)
        made = [torch.randn(33, 70, generator=numbers).to(torch.bfloat16) for _ in range(3)]
        self.plain = nn.Parameter(made[0])
        self.transposed = nn.Parameter(made[1].t(), requires_grad=False)
        self.padded = nn.Parameter(made[2][:, :65], requires_grad=False)
        self.bytes = nn.Parameter(torch.zeros(7, dtype=torch.uint8), requires_grad=False)
        self.scale = nn.Parameter(torch.tensor(2.0), requires_grad=False)
        self.register_buffer("bias", torch.zeros(3))
        self.register_buffer("table", torch.zeros(3), persistent=False)
        self.steer, self.kv_cache = torch.zeros(3), torch.zeros(3)


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(0), requires_grad=False)
        self.bias = nn.Parameter(torch.zeros(3), requires_grad=False)
        self.pack(1)

    def pack(self, handle: int) -> None:
        self.cpu_linear: Callable[[int], int] = lambda x: x + handle


def make() -> nn.Module:
    return nn.ModuleDict({"layers": nn.ModuleList([Layer(), Packed(), Layer()])})


def watch(model: nn.Module) -> LiveWeights:
    return LiveWeights(lambda: [model], lambda _: None)


@pytest.mark.parametrize("is_device", [False, True])
def test_one_element_anywhere(monkeypatch: pytest.MonkeyPatch, is_device: bool) -> None:
    """Written behind autograd's back, as weight loaders do."""
    if is_device:  # the sums that a GPU makes, on what a CPU can run
        monkeypatch.setattr(live_model, "PIECE_BYTES", 256)
        monkeypatch.setattr(live_model, "digest", digest_by_sums)
    model = make()
    weights = watch(model)
    beside = ["bias", "table", "steer"]
    names = [name for name, p in model.named_parameters() if p.numel()]
    names += [f"layers.0.{name}" for name in beside]
    assert len(names) == 14
    for name in names:
        module, _, own = name.rpartition(".")
        tensor = getattr(model.get_submodule(module), own)
        for at in {(0,) * tensor.dim(), tuple(size - 1 for size in tensor.shape)}:
            assert weights.look() is Seen.SAME
            tensor.data[at] += 1
            assert weights.look() is Seen.CHANGED, (name, at)
    model.get_submodule("layers.0").kv_cache.add_(1)
    assert weights.look() is Seen.SAME, "steps write there"


def digest_by_sums(model: nn.Module) -> bytes:
    tables: dict[torch.device, torch.Tensor] = {}
    sums = [
        checksum(piece, tables)
        for _, tensor in live_model._tensors(model)
        for piece in live_model._pieces(tensor)
    ]
    return str(torch.stack(sums).tolist()).encode()


def test_a_weight_that_is_packed_anew() -> None:
    model = make()
    weights = watch(model)
    packed = model.get_submodule("layers.1")
    assert isinstance(packed, Packed)
    packed.pack(2)
    assert weights.look() is Seen.CHANGED
    assert weights.look() is Seen.SAME


def test_weights_that_nobody_sees(caplog: pytest.LogCaptureFixture) -> None:
    """Whatever cannot be looked at has changed."""
    model = make()
    del model.get_submodule("layers.1").cpu_linear
    weights = watch(model)
    assert weights.look() is weights.look() is Seen.UNKNOWN
    assert caplog.text.count("cannot see whether weights change") == 1


class Latents(nn.Module):
    """As MLA is on a processor with AMX: the kernel has the weights, and its layer has none."""

    def __init__(self) -> None:
        super().__init__()
        self.kv_b_proj = nn.Linear(1, 1, bias=False)
        self.kv_b_proj.weight = nn.Parameter(torch.empty(0), requires_grad=False)
        self.impl = SimpleNamespace(
            kv_b_proj=self.kv_b_proj,
            _w_uk_packed=torch.ones(2, 8, 4, dtype=torch.bfloat16),
            _w_uv_packed=torch.ones(2, 4, 8, dtype=torch.bfloat16),
            _w_scale=None,
        )


@pytest.mark.parametrize("own", ["_w_uk_packed", "_w_uv_packed"])
def test_weights_of_a_latent_kernel(own: str, caplog: pytest.LogCaptureFixture) -> None:
    model = nn.ModuleDict({"layers": nn.ModuleList([Layer(), Latents()])})
    weights = watch(model)
    assert (weights.look(), weights.name, caplog.text) == (Seen.SAME, b"", "")
    getattr(model["layers"][1].impl, own)[1, 2, 3] = 2
    assert weights.look() is Seen.CHANGED and weights.name
    assert weights.look() is Seen.SAME


def test_the_scale_of_a_latent_kernel() -> None:
    model = Latents()
    model.impl._w_scale = torch.tensor(1.0)
    weights = watch(model)
    model.impl._w_scale.fill_(2.0)
    assert weights.look() is Seen.CHANGED


def test_a_latent_kernel_without_weights(caplog: pytest.LogCaptureFixture) -> None:
    model = Latents()
    model.impl._w_uk_packed = None
    assert watch(model).look() is Seen.UNKNOWN
    assert "kv_b_proj has its weights where they cannot be seen" in caplog.text


def test_no_model(caplog: pytest.LogCaptureFixture) -> None:
    def find() -> nn.Module:
        raise UnsupportedError("not there")

    weights = LiveWeights(find, lambda _: None)
    assert weights.look() is Seen.UNKNOWN and weights.own_files
    assert "not there" in caplog.text


def test_swapped_elements_and_pieces() -> None:
    """A sum that forgot places would not see it."""
    piece = torch.arange(64, dtype=torch.uint8)
    tables: dict[torch.device, torch.Tensor] = {}
    swapped = piece.clone()
    swapped[0:4], swapped[4:8] = piece[4:8], piece[0:4]
    assert checksum(piece, tables) != checksum(swapped, tables)
    assert checksum(piece[1:33], tables) != checksum(piece[0:32], tables)


def test_the_model_of_these_layers() -> None:
    models = [make(), make()]
    for model in models:
        whole = nn.ModuleDict({"language_model": model})
        layers = {
            f"language_model.layers.{i}": whole.get_submodule(f"language_model.layers.{i}")
            for i in range(3)
        }
        assert models_of(layers) == [whole]
    mixed = {f"layers.{i}": models[i].get_submodule(f"layers.{i}") for i in range(2)}
    with pytest.raises(UnsupportedError, match="2 models have these layers, where 1 may"):
        models_of(mixed)
    assert len(models_of(mixed, at_most=2)) == 2, "the second makes drafts"


def test_weights_of_the_drafts_model_too() -> None:
    models = [make(), make()]
    weights = LiveWeights(lambda: models, lambda _: None)
    assert weights.look() is Seen.SAME
    for model in models:
        model.get_submodule("layers.0").plain.data[0, 0] += 1
        assert weights.look() is Seen.CHANGED
        assert weights.look() is Seen.SAME
        model.get_submodule("layers.1").pack(2)
        assert weights.look() is Seen.CHANGED


def test_files_of_the_drafts_model_too() -> None:
    models = [make(), make()]
    whole = LiveWeights(lambda: models, lambda model: "why" if model is models[1] else None)
    assert whole.own_files == "why"


def test_equal_models_have_equal_digests() -> None:
    assert digest(make()) == digest(make())


def test_a_weight_that_is_transposed_in_place() -> None:
    """No byte of it moves."""
    model = nn.Linear(64, 64, bias=False)
    before = digest(model)
    model.weight.data = model.weight.data.t()
    assert digest(model) != before


def test_names_of_what_is_in_memory() -> None:
    """By content: what comes back has the name that it had."""
    model = nn.ModuleDict({"layers": nn.ModuleList([Layer(), Layer()])})
    weights = watch(model)
    assert weights.name == b"", "those of the start"
    plain = model.get_submodule("layers.0").plain
    names = []
    for add in (1, 1, -1, -1):
        plain.data[0, 0] += add
        assert weights.look() is Seen.CHANGED
        names.append(weights.name)
    assert names == [names[0], names[1], names[0], b""]
    assert len({b"", *names}) == 3 and None not in names


def test_a_packed_weight_has_no_name() -> None:
    model = make()
    weights = watch(model)
    assert weights.name == b""
    packed = model.get_submodule("layers.1")
    assert isinstance(packed, Packed)
    packed.pack(2)
    assert weights.look() is Seen.CHANGED
    assert weights.name is None


def put_forward(module: nn.Module) -> Callable[[], None]:
    vars(module)["forward"] = lambda x: x
    return lambda: vars(module).__delitem__("forward")


def test_code_that_is_put_into_a_model_has_no_name() -> None:
    model = nn.ModuleDict({"layers": nn.ModuleList([Layer(), Layer()])})
    weights = watch(model)
    for put in (
        lambda one: one.register_forward_hook(lambda *_: None).remove,
        lambda one: one.register_forward_pre_hook(lambda *_: None).remove,
        put_forward,
        lambda _: nn.modules.module.register_module_forward_hook(lambda *_: None).remove,
    ):
        take_out = put(model.get_submodule("layers.1"))
        assert (weights.look(), weights.name) == (Seen.CHANGED, None)
        take_out()
        assert (weights.look(), weights.name) == (Seen.CHANGED, b"")


def test_a_class_that_computes_otherwise_from_now_on(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = watch(nn.ModuleList([Layer()]))
    monkeypatch.setattr(Layer, "forward", lambda self, x: x)
    assert (weights.look(), weights.name) == (Seen.CHANGED, None)


def test_numbers_have_names() -> None:
    model = nn.ModuleDict({"layers": nn.ModuleList([Layer()])})
    layer = model.get_submodule("layers.0")
    layer.eps, layer.sizes = 1e-6, [1, 2]
    weights = watch(model)
    for name, changed in (("eps", 2.0), ("sizes", [1, 3])):
        before = getattr(layer, name)
        setattr(layer, name, changed)
        assert weights.look() is Seen.CHANGED and weights.name
        setattr(layer, name, before)
        assert (weights.look(), weights.name) == (Seen.CHANGED, b"")
    layer.compiled = True
    assert weights.look() is Seen.SAME, "torch.compile() says how far it is"
