"""Published architectures and bare counts: exact numbers of parameters, and the work and activations of real modules."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowtide.errors import ArgumentError
from lowtide.job.gpt import GPT
from lowtide.job.presets import Shape
from lowtide.spec.architectures import ARCHITECTURES, Transformer, architecture
from lowtide.spec.counts import bare_count, parse_count
from lowtide.spec.model import ModelSpec, UnitFacts
from lowtide.spec.tracing import trace

PUBLISHED = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "bert-base": 109_482_240,
    "bert-large": 335_141_888,
    "resnet-50": 25_557_032,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_exact(name: str) -> None:
    assert architecture(name).numel == PUBLISHED[name]


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("gpt3-125m", 0.125),
        ("gpt3-350m", 0.356),
        ("gpt3-760m", 0.76),
        ("gpt3-1.3b", 1.3),
        ("gpt3-2.7b", 2.65),
        ("gpt3-6.7b", 6.7),
        ("gpt3-13b", 13),
        ("gpt3-175b", 174.6),
    ],
)
def test_gpt3_has_the_size_in_its_name(name: str, billions: float) -> None:
    assert architecture(name).numel == pytest.approx(billions * 1e9, rel=0.015)


def built(name: str, layers: int | None = None) -> nn.Module:
    """The same model by transformers, without memory and without dropout."""
    from transformers import BertConfig, BertModel, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    shape: Any = ARCHITECTURES[name]
    depth = layers or shape.layers
    with torch.device("meta"):
        if shape.family == "gpt2":
            config = GPT2Config(n_layer=depth, n_embd=shape.width, n_head=shape.heads)
            config.loss_type = "ForCausalLM"
            return GPT2LMHeadModel(config).eval()
        sizes = dict(
            vocab_size=shape.tokens,
            hidden_size=shape.width,
            num_hidden_layers=depth,
            num_attention_heads=shape.heads,
            intermediate_size=shape.inner,
            max_position_embeddings=shape.context,
        )
        if shape.family == "bert":
            return BertModel(BertConfig(**sizes)).eval()
        return LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=shape.key_heads))


@pytest.mark.parametrize("name", ["gpt2", "gpt2-xl", "llama-2-7b", "llama-3.1-405b", "bert-base"])
def test_parameters_are_those_of_the_real_module(name: str) -> None:
    shape = ARCHITECTURES[name]
    assert isinstance(shape, Transformer)
    model = built(name, layers=2)
    others = (shape.layers - 2) * shape.layer_numel
    assert sum(p.numel() for p in model.parameters()) + others == architecture(name).numel


def traced(
    name: str, batch: int, length: int, *, dtype: str = "fp32", layers: int | None = None, device: str = "cpu"
) -> ModelSpec:
    model = built(name, layers)
    if dtype == "bf16":
        model = model.bfloat16()
    tokens = torch.empty(batch, length, dtype=torch.int64, device="meta")
    inputs = {"input_ids": tokens} if name.startswith("bert") else {"input_ids": tokens, "labels": tokens}
    return trace(model, inputs, bucket_bytes=1 << 20, device=device)


def totals(spec: ModelSpec) -> dict[str, float]:
    return {
        "forward flops": sum(u.forward.flops for u in spec.units) + spec.outside_forward.flops,
        "backward flops": sum(u.backward.flops for u in spec.units) + spec.outside_backward.flops,
        "activations": sum(u.activation_bytes for u in spec.units),
        "outside": spec.outside_bytes,
        "forward moved": sum(u.forward.moved_bytes for u in spec.units) + spec.outside_forward.moved_bytes,
        "backward moved": sum(u.backward.moved_bytes for u in spec.units) + spec.outside_backward.moved_bytes,
        "forward fresh": sum(u.forward.fresh_bytes for u in spec.units) + spec.outside_forward.fresh_bytes,
        "backward fresh": sum(u.backward.fresh_bytes for u in spec.units) + spec.outside_backward.fresh_bytes,
    }


@pytest.mark.parametrize(("name", "batch", "length"), [("gpt2", 2, 512), ("llama-2-7b", 1, 1024)])
def test_agrees_with_a_trace_of_the_whole_model(name: str, batch: int, length: int) -> None:
    formula, real = architecture(name, batch=batch, sequence=length), traced(name, batch, length)
    assert totals(formula) == pytest.approx(totals(real), rel=0.1)
    assert sum(u.activation_bytes for u in formula.units) == pytest.approx(
        sum(u.activation_bytes for u in real.units), rel=0.02
    )


def layer(spec: ModelSpec) -> UnitFacts:
    """The second one: the first also takes what all layers share."""
    return next(u for u in spec.units if u.name.endswith(("layer 1", ".1")))


def numbers(unit: UnitFacts) -> dict[str, float]:
    return {
        "numel": unit.numel,
        "forward flops": unit.forward.flops,
        "forward moved": unit.forward.moved_bytes,
        "forward fresh": unit.forward.fresh_bytes,
        "forward kernels": unit.forward.operations,
        "backward flops": unit.backward.flops,
        "backward moved": unit.backward.moved_bytes,
        "backward fresh": unit.backward.fresh_bytes,
        "backward kernels": unit.backward.operations,
        "saved": unit.activation_bytes,
        "input": unit.input_bytes,
        "transient": unit.transient_bytes,
    }


@pytest.mark.parametrize(
    ("name", "dtype", "device"),
    [
        ("gpt2-xl", "fp32", "cpu"),
        ("llama-2-70b", "fp32", "cpu"),
        ("llama-3-8b", "bf16", "cuda"),
        ("llama-3.1-405b", "bf16", "cuda"),
        ("bert-base", "fp32", "cpu"),
    ],
)
def test_a_layer_agrees_with_a_trace(name: str, dtype: str, device: str) -> None:
    formula = layer(architecture(name, batch=2, sequence=256, dtype=dtype))
    assert numbers(formula) == pytest.approx(
        numbers(layer(traced(name, 2, 256, dtype=dtype, layers=2, device=device))), rel=0.02
    )


def test_gpt3_is_what_lowtide_trains() -> None:
    formula = layer(architecture("gpt3-1.3b", batch=1, sequence=512))
    with torch.device("meta"):
        model = GPT(Shape(layers=2, width=2048, heads=24 - 8, tokens=100, context=512))
        tokens = torch.empty(1, 512, dtype=torch.int64)
    real = layer(trace(model, (tokens, tokens), bucket_bytes=0))
    assert numbers(formula) == pytest.approx(numbers(real), rel=0.01)


# -- resnet -----------------------------------------------------------------------------------------------------------


class Bottleneck(nn.Module):
    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.convs = nn.Sequential(
            nn.Conv2d(inputs, width, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, stride, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, 4 * width, 1, bias=False),
            nn.BatchNorm2d(4 * width),
        )
        self.skip = nn.Identity()
        if stride != 1 or inputs != 4 * width:
            self.skip = nn.Sequential(nn.Conv2d(inputs, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width))

    def forward(self, x: Tensor) -> Tensor:
        return (self.convs(x) + self.skip(x)).relu_()


def resnet(blocks: tuple[int, ...]) -> nn.Sequential:
    stem = nn.Sequential(nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True))
    layers: list[nn.Module] = [stem, nn.MaxPool2d(3, 2, 1)]
    inputs = 64
    for index, count in enumerate(blocks):
        width = 64 << index
        stage = nn.Sequential()
        for number in range(count):
            stage.append(Bottleneck(inputs, width, 2 if number == 0 and index else 1))
            inputs = 4 * width
        layers.append(stage)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 1000))


def test_resnet() -> None:
    with torch.device("meta"):
        model, images = resnet((3, 4, 6, 3)), torch.empty(4, 3, 224, 224)
    stages = [model[i] for i in (0, 2, 3, 4, 5)]
    real = trace(model, images, units=lambda module: module in stages, bucket_bytes=0)
    formula = architecture("resnet-50", batch=4)
    assert [u.numel for u in formula.units] == [u.numel for u in real.units]
    assert sum(u.forward.flops for u in formula.units) == pytest.approx(2 * 4 * 4.1e9, rel=0.01)
    for ours, theirs in zip(formula.units, real.units, strict=True):
        assert ours.forward.flops == theirs.forward.flops
        assert ours.backward.flops == theirs.backward.flops
        assert ours.activation_bytes == pytest.approx(theirs.activation_bytes, rel=0.1)
    assert totals(formula) == pytest.approx(totals(real), rel=0.1)


# -- names and counts -------------------------------------------------------------------------------------------------


def test_wrong_names_and_batches() -> None:
    with pytest.raises(ArgumentError, match=r"known: gpt2, .* Did you mean 'llama-2-7b'\?"):
        architecture("llama2-7b")
    for wrong in ({"batch": 0}, {"sequence": 0}, {"sequence": 1025}):
        with pytest.raises(ArgumentError, match="gpt2 knows 1024 positions"):
            architecture("gpt2", **wrong)
    with pytest.raises(ArgumentError, match="'int3'; allowed: 'fp64'"):
        architecture("gpt2", dtype="int3")


def test_no_torch_is_needed() -> None:
    code = "import sys, lowtide.spec.architectures, lowtide.spec.counts; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("7.5e9", 7_500_000_000),
        ("7.5B", 7_500_000_000),
        ("7500000000", 7_500_000_000),
        ("7,500,000,000", 7_500_000_000),
        (" 124m ", 124_000_000),
        ("124_439_808", 124_439_808),
        ("1T", 10**12),
        ("0.1B", 10**8),
        ("1", 1),
    ],
)
def test_counts_as_people_write_them(text: str, count: int) -> None:
    assert parse_count(text) == count


@pytest.mark.parametrize("text", ["", "B", "-3", "7.5 billion", "1e400", "nan", "inf", "7..5", "0x10"])
def test_what_is_no_count(text: str) -> None:
    with pytest.raises(ArgumentError, match=r"7\.5e9, 7\.5B, 124M, 1T"):
        parse_count(text)


@pytest.mark.parametrize("text", ["0", "0.0B", "1.5", "0.0001K"])
def test_a_model_has_a_whole_number_of_parameters(text: str) -> None:
    with pytest.raises(ArgumentError, match="whole number"):
        parse_count(text)


@pytest.mark.parametrize("params", [1, 5, 97, 124_439_808, 7_500_000_001, 128 * 10**9, 10**12])
def test_a_bare_count_is_split_evenly(params: int) -> None:
    spec = bare_count(params, dtype="bf16")
    sizes = [u.numel for u in spec.units]
    assert sum(sizes) == spec.numel == spec.trained_numel == params
    assert max(sizes) - min(sizes) <= 1
    assert len(sizes) <= 96
    assert len(sizes) >= 24 or params < 24
    assert all(u.parameter_bytes == 2 * u.numel for u in spec.units)
    assert spec.batch == ""
    assert not any(u.forward.flops or u.backward.flops or u.activation_bytes for u in spec.units)


def test_a_bare_count_with_tokens() -> None:
    spec = bare_count(10**9, layers=10, tokens=2048)
    assert len(spec.units) == 10
    assert sum(u.forward.flops for u in spec.units) == 2 * 10**9 * 2048
    assert sum(u.backward.flops for u in spec.units) == 4 * 10**9 * 2048
    assert "2048 tokens" in spec.batch
    for wrong in ({"params": 0}, {"params": 9, "layers": 10}, {"params": 9, "layers": 0}, {"params": 9, "tokens": 0}):
        with pytest.raises(ArgumentError):
            bare_count(**wrong)
