"""Published architectures, for plans of models that nobody has built here: sizes as a table, facts by closed formulas.

What is assumed, beside the sizes:

* Attention is one fused kernel (flash attention, or the memory-efficient one): no matrix of scores is saved. It is counted
  whole where a causal kernel may skip half of it, forward as two products, backward as five.
* No dropout. Every layer is trained, and nothing is recomputed.
* GPT-2, BERT and Llama save and move what the transformers package's PyTorch code does: GPT-2's GELU is a chain of elementwise
  kernels and its keys and values pass through a cache; Llama's norms are computed in fp32. GPT-3 is computed as
  ``lowtide train`` computes a GPT, with dense attention in all layers (the paper alternates dense and banded ones) and as wide
  as the model: the heads that its table prints for 1.3B and 13B do not multiply to the width.
* The loss is the cross entropy over all tokens; BERT is the encoder with its pooler, without a loss. The head of GPT-2 and
  GPT-3 is their embedding.

No torch is imported. ``tests/unit/test_architectures.py`` compares all of this with traces of real modules.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass

from lowtide.errors import ArgumentError
from lowtide.spec.counts import bytes_of
from lowtide.spec.model import ModelSpec, UnitFacts, Work


@dataclass(frozen=True, slots=True)
class _Per:
    """Numbers per token, as multiples of the width, of the perceptron's inner width, and of the keys' width."""

    width: float
    inner: float
    keys: float = 0.0

    def of(self, shape: Transformer) -> float:
        return self.width * shape.width + self.inner * shape.inner + self.keys * shape.key_width


@dataclass(frozen=True, slots=True)
class _Layer:
    """What one layer saves, moves and makes beside its products; ``made_back`` without the gradients of its parameters."""

    saved: _Per
    moved: _Per
    made: _Per
    moved_back: _Per
    made_back: _Per
    transient: _Per
    kernels: tuple[int, int]
    """Forward and backward."""
    in_norm: int = 0
    """What the backward of a norm in fp32 holds, as a multiple of the width; it may be more than ``transient``."""


_GPT2 = _Layer(_Per(10, 5), _Per(14, 18), _Per(12, 9), _Per(23, 29), _Per(13, 12), _Per(1, 6), (19, 29))
_GPT3 = _Layer(_Per(8, 2), _Per(10, 2), _Per(10, 2), _Per(29, 4), _Per(16, 2), _Per(1, 2), (10, 20))
_BERT = _Layer(_Per(8, 2), _Per(10, 2), _Per(10, 2), _Per(23, 4), _Per(14, 2), _Per(1, 2), (12, 26))
_LLAMA = _Layer(_Per(8, 4, 2), _Per(30, 5, 14), _Per(16.5, 4, 8.5), _Per(77, 9, 16), _Per(37.5, 4, 9.5), _Per(1, 3), (36, 67))
_LLAMA_16BIT = _Layer(  # the norms' fp32 numbers count as two
    _Per(10, 4, 2), _Per(52, 5, 14), _Per(26.5, 4, 8.5), _Per(123, 9, 18), _Per(57.5, 4, 10.5), _Per(1, 3), (40, 72), 11
)
_LAYERS = {"gpt2": _GPT2, "gpt3": _GPT3, "bert": _BERT, "llama": _LLAMA}


@dataclass(frozen=True, slots=True, kw_only=True)
class Transformer:
    """The sizes of one transformer. ``family``: ``gpt2``, ``gpt3``, ``llama`` or ``bert``."""

    family: str
    layers: int
    width: int
    heads: int
    inner: int
    tokens: int
    """Of its vocabulary."""
    context: int
    key_heads: int | None = None
    """Fewer than ``heads``: groups of queries share keys and values."""

    @property
    def key_width(self) -> int:
        return self.width * (self.key_heads or self.heads) // self.heads

    @property
    def products(self) -> int:
        """Numbers in the matrices of one layer."""
        matrices = 3 if self.family == "llama" else 2
        return 2 * self.width * (self.width + self.key_width) + matrices * self.width * self.inner

    @property
    def layer_numel(self) -> int:
        if self.family == "llama":
            return self.products + 2 * self.width
        biases = 2 * self.width + 2 * self.key_width + self.inner + self.width
        return self.products + biases + 4 * self.width

    @property
    def embedding_numel(self) -> int:
        if self.family == "llama":
            return self.tokens * self.width
        kinds_and_norm = 4 * self.width if self.family == "bert" else 0  # two kinds of segment; scale and shift
        return (self.tokens + self.context) * self.width + kinds_and_norm

    @property
    def head_numel(self) -> int:
        if self.family == "llama":
            return self.width + self.tokens * self.width
        return self.width * (self.width + 1) if self.family == "bert" else 2 * self.width

    @property
    def numel(self) -> int:
        return self.embedding_numel + self.layers * self.layer_numel + self.head_numel


@dataclass(frozen=True, slots=True, kw_only=True)
class ResNet:
    """A residual network of bottleneck blocks, whose 3×3 convolutions have the stride."""

    blocks: tuple[int, ...]
    classes: int = 1000
    side: int = 224


def _gpt(family: str, context: int, layers: int, width: int, heads: int) -> Transformer:
    sizes = {"layers": layers, "width": width, "heads": heads, "inner": 4 * width, "tokens": 50257, "context": context}
    return Transformer(family=family, **sizes)


def _bert(layers: int, width: int, heads: int) -> Transformer:
    return Transformer(family="bert", layers=layers, width=width, heads=heads, inner=4 * width, tokens=30522, context=512)


def _llama(tokens: int, context: int, layers: int, width: int, heads: int, key_heads: int, inner: int) -> Transformer:
    return Transformer(
        family="llama",
        layers=layers,
        width=width,
        heads=heads,
        inner=inner,
        tokens=tokens,
        context=context,
        key_heads=key_heads,
    )


ARCHITECTURES: dict[str, Transformer | ResNet] = {
    "gpt2": _gpt("gpt2", 1024, 12, 768, 12),
    "gpt2-medium": _gpt("gpt2", 1024, 24, 1024, 16),
    "gpt2-large": _gpt("gpt2", 1024, 36, 1280, 20),
    "gpt2-xl": _gpt("gpt2", 1024, 48, 1600, 25),
    # Language Models are Few-Shot Learners, table 2.1
    "gpt3-125m": _gpt("gpt3", 2048, 12, 768, 12),
    "gpt3-350m": _gpt("gpt3", 2048, 24, 1024, 16),
    "gpt3-760m": _gpt("gpt3", 2048, 24, 1536, 16),
    "gpt3-1.3b": _gpt("gpt3", 2048, 24, 2048, 24),
    "gpt3-2.7b": _gpt("gpt3", 2048, 32, 2560, 32),
    "gpt3-6.7b": _gpt("gpt3", 2048, 32, 4096, 32),
    "gpt3-13b": _gpt("gpt3", 2048, 40, 5140, 40),
    "gpt3-175b": _gpt("gpt3", 2048, 96, 12288, 96),
    "llama-2-7b": _llama(32000, 4096, 32, 4096, 32, 32, 11008),
    "llama-2-13b": _llama(32000, 4096, 40, 5120, 40, 40, 13824),
    "llama-2-70b": _llama(32000, 4096, 80, 8192, 64, 8, 28672),
    "llama-3-8b": _llama(128256, 8192, 32, 4096, 32, 8, 14336),
    "llama-3-70b": _llama(128256, 8192, 80, 8192, 64, 8, 28672),
    "llama-3.1-405b": _llama(128256, 131072, 126, 16384, 128, 8, 53248),
    "bert-base": _bert(12, 768, 12),
    "bert-large": _bert(24, 1024, 16),
    "resnet-50": ResNet(blocks=(3, 4, 6, 3)),
}


def architecture(name: str, *, batch: int = 1, sequence: int | None = None, dtype: str = "fp32") -> ModelSpec:
    """The facts of a published architecture for ``batch`` sequences of ``sequence`` tokens (by default all it was built for).

    For images ``sequence`` is the side in pixels.
    """
    shape = ARCHITECTURES.get(name)
    if shape is None:
        near = difflib.get_close_matches(name, ARCHITECTURES, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ArgumentError(f"architecture is {name!r}; known: {', '.join(ARCHITECTURES)}.{hint}")
    greatest = shape.side if isinstance(shape, ResNet) else shape.context
    length = greatest if sequence is None else sequence
    if batch < 1 or length < 1 or (isinstance(shape, Transformer) and shape.family != "llama" and length > greatest):
        raise ArgumentError(
            f"batch {batch} × sequence {length}: both must be at least 1, and {name} knows {greatest} positions."
        )
    if isinstance(shape, ResNet):
        return _resnet_spec(name, shape, batch, length, dtype)
    return _transformer_spec(name, shape, batch, length, dtype)


# -- transformers -----------------------------------------------------------------------------------------------------


def _unit(name: str, numel: int, item: int, **facts: Work | int) -> UnitFacts:
    return UnitFacts(name=name, numel=numel, trained_numel=numel, parameter_bytes=numel * item, **facts)  # type: ignore[arg-type]


def _transformer_spec(name: str, shape: Transformer, batch: int, length: int, dtype: str) -> ModelSpec:
    item, count = bytes_of(dtype), batch * length
    with_loss = shape.family != "bert"
    logits = count * shape.tokens
    widened = 0 if item >= 4 else logits * (item + 4)  # the loss is computed in fp32
    loss_item = max(item, 4)
    layers = [_layer_facts(shape, index, count, length, item) for index in range(shape.layers)]
    return ModelSpec(
        name=name,
        units=(_embedding_facts(shape, count, item), *layers, _head_facts(shape, batch, count, item)),
        dtype=dtype,
        batch=f"{batch}×{length} tokens",
        outside_forward=Work(
            moved_bytes=2 * logits * loss_item + widened, fresh_bytes=logits * (loss_item + 4 * (item < 4)), operations=2
        )
        if with_loss
        else Work(),
        outside_backward=Work(
            moved_bytes=4 * logits * loss_item + widened, fresh_bytes=logits * (2 * loss_item + item * (item < 4)), operations=2
        )
        if with_loss
        else Work(),
        outside_bytes=logits * loss_item if with_loss else 0,
    )


def _layer_facts(shape: Transformer, index: int, count: int, length: int, item: int) -> UnitFacts:
    per = _LLAMA_16BIT if shape.family == "llama" and item == 2 else _LAYERS[shape.family]
    product = 2.0 * count * shape.products
    attention = 4.0 * count * length * shape.width  # scores, and the mixing of values
    statistics = count * (shape.heads + (2 if shape.family == "llama" else 4)) * 4
    each = count * item
    return _unit(
        f"layer {index}",
        shape.layer_numel,
        item,
        forward=Work(
            flops=product + attention,
            moved_bytes=each * per.moved.of(shape),
            fresh_bytes=each * per.made.of(shape) + statistics,
            operations=per.kernels[0],
        ),
        backward=Work(
            flops=2 * product + 2.5 * attention,
            moved_bytes=each * per.moved_back.of(shape),
            fresh_bytes=each * per.made_back.of(shape) + shape.layer_numel * item,
            operations=per.kernels[1],
        ),
        activation_bytes=int(each * per.saved.of(shape)) + statistics,
        input_bytes=each * shape.width,
        transient_bytes=int(each * max(per.transient.of(shape), per.in_norm * shape.width)),
    )


def _embedding_facts(shape: Transformer, count: int, item: int) -> UnitFacts:
    """Tokens and positions. Where the head is the same matrix, its product is counted here, as a trace does."""
    rows = count * shape.width * item
    normed = shape.family == "bert"
    table = shape.embedding_numel * item
    forward = Work(
        moved_bytes=(8 if normed else 2) * rows, fresh_bytes=(5 if normed else 1) * rows, operations=6 if normed else 1
    )
    backward = Work(
        moved_bytes=(6 if normed else 1) * rows + table, fresh_bytes=table + rows * normed, operations=4 if normed else 1
    )
    saved, transient = 8 * count + rows * normed, 3 * rows
    if shape.family in ("gpt2", "gpt3"):
        head, tied = _head_products(shape, count, item), shape.tokens * shape.width * item
        forward += head[0]
        backward += head[1] + Work(moved_bytes=3 * tied, fresh_bytes=tied, operations=1)  # two gradients become one
        saved += rows
        transient = max(count * shape.tokens * item, 2 * tied) + rows
    return _unit(
        "embedding",
        shape.embedding_numel,
        item,
        forward=forward,
        backward=backward,
        activation_bytes=saved,
        input_bytes=saved if not normed else 8 * count,
        transient_bytes=transient,
    )


def _head_products(shape: Transformer, count: int, item: int) -> tuple[Work, Work]:
    matrix = shape.tokens * shape.width
    product, logits, rows = 2.0 * count * matrix, count * shape.tokens * item, count * shape.width * item
    forward = Work(flops=product, fresh_bytes=logits, operations=1)
    return forward, Work(flops=2 * product, fresh_bytes=rows + matrix * item, operations=2)


def _head_facts(shape: Transformer, batch: int, count: int, item: int) -> UnitFacts:
    """The last norm, with the head where that is a matrix of its own; BERT's pooler looks at the first token of a sequence."""
    rows = count * shape.width * item
    if shape.family == "bert":
        product = 2.0 * batch * shape.width**2
        return _unit(
            "pooler",
            shape.head_numel,
            item,
            forward=Work(flops=product, operations=2),
            backward=Work(flops=2 * product, moved_bytes=3 * rows, fresh_bytes=2 * rows, operations=6),
            activation_bytes=rows,
            input_bytes=rows,
            transient_bytes=2 * rows,
        )
    if shape.family != "llama":
        return _unit(
            "norm",
            shape.head_numel,
            item,
            forward=Work(moved_bytes=2 * rows, fresh_bytes=rows, operations=1),
            backward=Work(moved_bytes=3 * rows, fresh_bytes=rows, operations=1),
            activation_bytes=rows + 8 * count,
            input_bytes=rows,
            transient_bytes=2 * rows,
        )
    forward, backward = _head_products(shape, count, item)
    wide = 2 if item == 2 else 1
    return _unit(
        "head",
        shape.head_numel,
        item,
        forward=forward + Work(moved_bytes=(5 + 2 * wide) * rows, fresh_bytes=3 * wide * rows, operations=6),
        backward=backward + Work(moved_bytes=23 * wide * rows, fresh_bytes=9 * wide * rows, operations=14),
        activation_bytes=(2 + wide) * rows + 4 * count,
        input_bytes=2 * rows,
        transient_bytes=count * shape.tokens * item + (1 + 4 * wide) * rows,
    )


# -- residual networks ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Convolution:
    """One convolution with the norm after it. ``rectified``: what follows is a rectifier, whose result is saved, too."""

    inputs: int
    outputs: int
    kernel: int
    side: int
    """Of its result."""
    rectified: bool

    @property
    def numel(self) -> int:
        return self.inputs * self.outputs * self.kernel**2 + 2 * self.outputs

    @property
    def result(self) -> int:
        return self.outputs * self.side**2

    @property
    def flops(self) -> float:
        return 2.0 * self.inputs * self.kernel**2 * self.result


def _bottlenecks(blocks: int, inputs: int, width: int, side: int, *, stride: int) -> Iterator[_Convolution]:
    for index in range(blocks):
        small = -(-side // (stride if index == 0 else 1))
        yield _Convolution(inputs, width, 1, side, rectified=True)
        yield _Convolution(width, width, 3, small, rectified=True)
        yield _Convolution(width, 4 * width, 1, small, rectified=True)
        if index == 0:
            yield _Convolution(inputs, 4 * width, 1, small, rectified=False)
        inputs, side = 4 * width, small


def _stage(name: str, convolutions: list[_Convolution], batch: int, item: int, *, entering: int, first: bool) -> UnitFacts:
    """``entering``: numbers per image that enter it; the gradient of the image itself (``first``) is never computed."""
    numel = sum(c.numel for c in convolutions)
    flops = sum(c.flops for c in convolutions) * batch
    results = sum(c.result for c in convolutions)
    rectified = sum(c.result for c in convolutions if c.rectified)
    added = sum(c.result for c in convolutions if c.rectified and c.outputs == 4 * c.inputs)
    last = convolutions[-1].result
    each = batch * item
    return _unit(
        name,
        numel,
        item,
        forward=Work(
            flops=flops,
            moved_bytes=each * (2 * results + 2 * rectified + 3 * added),
            fresh_bytes=each * (2 * results + added),
            operations=3 * len(convolutions),
        ),
        backward=Work(
            flops=flops * (1 if first else 2),
            moved_bytes=each * (3 * results + 3 * rectified + 3 * added),
            fresh_bytes=each * (2 * results + rectified + added) + numel * item,
            operations=4 * len(convolutions),
        ),
        # a stage's last result is what enters the next one, and is saved there
        activation_bytes=each * (entering + results + rectified - (0 if first else last)),
        input_bytes=each * entering,
        transient_bytes=each * 4 * max(c.result for c in convolutions),
    )


def _resnet_spec(name: str, shape: ResNet, batch: int, side: int, dtype: str) -> ModelSpec:
    item, half = bytes_of(dtype), -(-side // 2)
    stem = _Convolution(3, 64, 7, half, rectified=True)
    units = [_stage("stem", [stem], batch, item, entering=3 * side**2, first=True)]
    side, inputs = -(-half // 2), 64
    for index, blocks in enumerate(shape.blocks):
        width, stride = 64 * 2**index, 1 if index == 0 else 2
        convolutions = list(_bottlenecks(blocks, inputs, width, side, stride=stride))
        entering = inputs * side**2
        units.append(_stage(f"stage {index + 1}", convolutions, batch, item, entering=entering, first=False))
        side, inputs = -(-side // stride), 4 * width
    numel, product = (inputs + 1) * shape.classes, 2.0 * batch * inputs * shape.classes
    units.append(
        _unit(
            "classes",
            numel,
            item,
            forward=Work(flops=product, fresh_bytes=batch * shape.classes * item, operations=1),
            backward=Work(flops=2 * product, fresh_bytes=(numel + batch * inputs) * item, operations=3),
            activation_bytes=batch * inputs * item,
            input_bytes=batch * inputs * item,
            transient_bytes=batch * (inputs + shape.classes) * item,
        )
    )
    pooled = batch * 64 * (-(-half // 2)) ** 2
    last = batch * inputs * side**2
    return ModelSpec(
        name=name,
        units=tuple(units),
        dtype=dtype,
        batch=f"{batch} images",
        outside_forward=Work(
            moved_bytes=(batch * stem.result + pooled + last) * item, fresh_bytes=pooled * (item + 8), operations=3
        ),
        outside_backward=Work(
            moved_bytes=(batch * stem.result + pooled + last) * item, fresh_bytes=batch * stem.result * item, operations=3
        ),
        outside_bytes=pooled * 8,  # the places of the greatest pixels
    )
