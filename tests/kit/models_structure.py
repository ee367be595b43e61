"""Models that are awkward in their structure: what is tied, frozen, unused, nested, called twice or returned in a container."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.kit.specimen import WIDTH, Batch, Block, Stack, blocks, next_token, specimen, squared, tokens


@specimen()
def mlp() -> nn.Module:
    return Stack(blocks(4))


class Attention(nn.Module):
    def __init__(self, heads: int = 3) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.proj = nn.Linear(WIDTH, WIDTH)
        self.mlp = Block()

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.mlp(x + self.proj(mixed.transpose(1, 2).reshape(batch, length, width)))


class GPT(nn.Module):
    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.tok = nn.Embedding(31, WIDTH)
        self.pos = nn.Embedding(6, WIDTH)
        self.blocks = nn.ModuleList(Attention() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 31, bias=False)
        if tied:
            self.head.weight = self.tok.weight

    def forward(self, index: Tensor) -> Tensor:
        x = self.tok(index) + self.pos(torch.arange(index.shape[1], device=index.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


@specimen(tokens, next_token)
def gpt() -> nn.Module:
    return GPT(tied=False)


@specimen(tokens, next_token)
def tied_head() -> nn.Module:
    return GPT(tied=True)


@specimen()
def tied_across_blocks() -> nn.Module:
    model = Stack(blocks(3))
    model.blocks[2].up.weight = model.blocks[0].up.weight
    model.blocks[2].down.bias = model.blocks[1].down.bias
    return model


@specimen()
def frozen_block() -> nn.Module:
    model = Stack(blocks(3))
    model.blocks[1].requires_grad_(False)
    model.head.bias.requires_grad_(False)
    return model


@specimen()
def frozen_first() -> nn.Module:
    """The first units need no gradient, so backward never reaches them."""
    model = Stack(blocks(3))
    model.blocks[0].requires_grad_(False)
    model.blocks[1].requires_grad_(False)
    return model


@specimen(ddp="unused")
def unused() -> nn.Module:
    """Parameters that no forward pass touches: in a used block, on the root, and a whole block."""
    model = Stack(blocks(3), run=lambda block, x: x if block is model.blocks[1] else block(x))
    model.blocks[0].extra = nn.Parameter(torch.randn(70))
    model.spare = nn.Linear(WIDTH, WIDTH)
    return model


class Odd(nn.Module):
    """No elements, one element, no dimensions, sizes around 64, and a matrix that is stored transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.empty = nn.Parameter(torch.empty(0))
        self.empty_rows = nn.Parameter(torch.empty(0, 7))
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.one = nn.Parameter(torch.randn(1))
        self.wide = nn.Parameter(torch.randn(WIDTH, 65))
        self.line = nn.Parameter(torch.randn(65))
        self.transposed = nn.Parameter(torch.randn(129, 65).t())
        self.cube = nn.Parameter(torch.randn(3, 43, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = (x @ self.wide + self.line) @ self.transposed / 65
        x = torch.einsum("bki,kij->bj", x.unflatten(-1, (3, 43)), self.cube)
        return torch.tanh(x * self.scale + self.one + self.empty.sum() + self.empty_rows.sum())


@specimen()
def odd_sizes() -> nn.Module:
    return Stack([Odd(), Odd()])


@specimen()
def shared_module() -> nn.Module:
    """One block object under two names."""
    first = Block()
    return Stack([first, Block(), first])


@specimen()
def called_twice() -> nn.Module:
    return Stack(blocks(2), run=lambda block, x: block(block(x)))


class Returns(nn.Module):
    """A block whose output goes through a container."""

    def __init__(self, pack: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.inner, self.pack = Block(), pack

    def forward(self, x: Tensor) -> Any:
        y = self.inner(x)
        return self.pack(y, y.mean())


@dataclass
class Output:
    hidden: Tensor
    score: Tensor


def _first_of(get: Callable[[Any], Tensor]) -> Callable[[nn.Module, Tensor], Tensor]:
    return lambda block, x: get(block(x))


@specimen()
def dict_output() -> nn.Module:
    kinds = [Returns(lambda y, s: {"hidden": y, "score": s}) for _ in range(3)]
    return Stack(kinds, run=_first_of(lambda out: out["hidden"] * out["score"]))


@specimen()
def tuple_output() -> nn.Module:
    kinds = [Returns(lambda y, s: (y, [s, None])) for _ in range(3)]
    return Stack(kinds, run=_first_of(lambda out: out[0] + out[1][0]))


@specimen()
def dataclass_output() -> nn.Module:
    kinds = [Returns(Output) for _ in range(3)]
    return Stack(kinds, run=_first_of(lambda out: out.hidden + out.score))


def _output_loss(model: nn.Module, batch: Batch) -> Tensor:
    out = model(*batch)
    return out.hidden.square().mean() + out.score


@specimen(loss=_output_loss)
def dataclass_from_root() -> nn.Module:
    return Returns(Output)


class LoRA(nn.Module):
    def __init__(self, base: nn.Linear, rank: int = 3) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, base.in_features) / 5)
        self.b = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.a.t() @ self.b.t()


@specimen()
def lora() -> nn.Module:
    model = Stack(blocks(3)).requires_grad_(False)
    for block in model.blocks:
        block.up, block.down = LoRA(block.up), LoRA(block.down)
    return model


class Mixed(nn.Module):
    """fp32 and fp64 parameters in one block."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH, dtype=torch.float64)
        self.gain = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gain * self.down(F.gelu(self.up(x)).double()).float()


@specimen()
def mixed_dtypes() -> nn.Module:
    return Stack([Mixed(), Mixed()])


@specimen()
def shared_linear_in_blocks() -> nn.Module:
    """Two blocks that own the same submodule."""
    model = Stack(blocks(3))
    model.blocks[2].up = model.blocks[0].up
    return model


class Rooted(nn.Module):
    """Parameters directly on the root, some used before the blocks and some after, in lists and dicts as well."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(WIDTH))
        self.blocks = nn.ModuleList(blocks(2))
        self.steps = nn.ParameterList([nn.Parameter(torch.randn(WIDTH)) for _ in range(2)])
        self.named = nn.ParameterDict({"last": nn.Parameter(torch.randn(WIDTH, 6))})

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.first
        for block, step in zip(self.blocks, self.steps, strict=True):
            x = block(x) + step
        return x @ self.named["last"]


@specimen()
def root_parameters() -> nn.Module:
    return Rooted()


class Watched(Stack):
    """A forward hook keeps an inner feature, as feature extractors and auxiliary losses do."""

    def __init__(self) -> None:
        super().__init__(blocks(3))
        self.feature: Tensor | None = None
        self.blocks[1].register_forward_hook(self._keep)

    def _keep(self, _module: nn.Module, _args: Any, output: Tensor) -> None:
        self.feature = output


def _feature(model: nn.Module) -> Tensor:
    plain = getattr(model, "module", model)
    feature, plain.feature = plain.feature, None
    return feature


def _auxiliary(model: nn.Module, batch: Batch) -> Tensor:
    out = model(*batch).square().mean()
    return out + 0.1 * _feature(model).square().mean()


def _feature_only(model: nn.Module, batch: Batch) -> Tensor:
    model(*batch)
    return _feature(model).square().mean()


@specimen(loss=_auxiliary)
def auxiliary_loss() -> nn.Module:
    return Watched()


@specimen(loss=_feature_only, ddp="no")
def inner_feature_only() -> nn.Module:
    """Backward enters the model in its middle: units behind it have no gradient."""
    return Watched()


class RouterBlock(nn.Module):
    """Mixture of experts: which experts run depends on this rank's data."""

    def __init__(self, experts: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, experts)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1)
        chosen = weights.argmax(-1)
        out = x.clone()
        for index, expert in enumerate(self.experts):
            mine = chosen == index
            if mine.any():
                out[mine] = out[mine] + expert(x[mine]) * weights[mine, index, None]
        return out


@specimen(ddp="unused")
def moe() -> nn.Module:
    return Stack([RouterBlock(), RouterBlock()])


class InplaceBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu_()).mul_(0.5)


@specimen()
def inplace_on_outputs() -> nn.Module:
    return Stack([InplaceBlock() for _ in range(3)], run=lambda block, x: block(x).add_(1).tanh_())


class _WeightKeeper(torch.autograd.Function):
    """A linear layer that saves its weight itself, not a view of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grads[0] @ weight, grads[0].t() @ x


class CustomFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(_WeightKeeper.apply(x, self.weight)) + x


@specimen()
def custom_function() -> nn.Module:
    return Stack([CustomFunction() for _ in range(3)])


class InnerCheckpoint(nn.Module):
    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.block, self.after, self.reentrant = Block(), nn.Linear(WIDTH, WIDTH), reentrant

    def forward(self, x: Tensor) -> Tensor:
        return self.after(checkpoint(self.block, x, use_reentrant=self.reentrant))


def _needs_grad(model: nn.Module, batch: Batch) -> Tensor:
    # reentrant checkpointing passes gradients on only if an input asks for one
    return squared(model, tuple(x.clone().requires_grad_() for x in batch))


@specimen(loss=_needs_grad)
def checkpoint_reentrant_inside() -> nn.Module:
    return Stack([InnerCheckpoint(reentrant=True) for _ in range(2)])


@specimen()
def checkpoint_inside() -> nn.Module:
    return Stack([InnerCheckpoint(reentrant=False) for _ in range(2)])


@specimen(loss=_needs_grad)
def checkpoint_reentrant_around() -> nn.Module:
    return Stack(blocks(3), run=lambda block, x: checkpoint(block, x, use_reentrant=True))


@specimen()
def checkpoint_around() -> nn.Module:
    return Stack(blocks(3), run=lambda block, x: checkpoint(block, x, use_reentrant=False))


@specimen()
def checkpoint_dropout() -> nn.Module:
    """Recomputing must see the same random numbers."""
    kinds = [nn.Sequential(Block(), nn.Dropout(0.3)) for _ in range(2)]
    return Stack(kinds, run=lambda block, x: checkpoint(block, x, use_reentrant=False))


class Chain(nn.Module):
    """A block that runs other blocks: units inside units."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(WIDTH))
        self.inner = nn.Sequential(Block(), Block())

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.gain


@specimen()
def nested_blocks() -> nn.Module:
    return Stack([Chain(), Chain()])


@specimen()
def one_layer() -> nn.Module:
    """Nothing repeats and there is only one unit."""
    return nn.Linear(WIDTH, 7)
