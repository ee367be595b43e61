"""Operators that PyTorch takes apart by device: here they are taken apart as on a CPU, so that bits can be compared."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_FLASH = 1  # SDPBackend.FLASH_ATTENTION
_kept: list[torch.library.Library] = []  # a library that is dropped takes its operators along


def dropout(x: Tensor, p: float, train: bool) -> Tensor:
    if not train or p == 0 or x.numel() == 0:
        return x
    if p == 1:
        return x * torch.zeros_like(x)
    return x * torch.ops.aten.div_.Scalar(torch.empty_like(x).bernoulli_(1 - p), 1 - p)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> Tensor:
    """The CPU's choice between its kernel and plain arithmetic depends on shapes and on what needs a gradient."""
    tensors = [query, key, value, attn_mask]
    likes = [None if t is None else torch.empty_strided(t.size(), t.stride(), dtype=t.dtype) for t in tensors]
    for like, tensor in zip(likes, tensors, strict=True):
        if like is not None and tensor is not None and tensor.requires_grad:
            like.requires_grad_()
    choice = torch._fused_sdp_choice(*likes, dropout_p, is_causal, **options)
    if choice != _FLASH:
        return torch.ops.aten._scaled_dot_product_attention_math(
            query, key, value, attn_mask, dropout_p, is_causal, None, **options
        )[0]
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(attn_mask.logical_not(), -math.inf)
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=options.get("scale")
    )[0]


def weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    return torch.ops.aten._weight_norm_interface(v, g, dim)[0]


Layer = Callable[[Tensor, Any, list[Tensor], bool], tuple[Tensor, Any]]  # input, hidden, weights, reverse → outputs, hidden


def _stacked(layer: Layer, x: Tensor, hidden: list[Any], params: list[Tensor], *options: Any) -> tuple[Tensor, list[Any]]:
    """Layers of a recurrent net, one or two directions each."""
    has_biases, num_layers, dropout, train, bidirectional, batch_first = options
    directions, weights = 1 + bidirectional, 4 if has_biases else 2
    if len(params) != num_layers * directions * weights:
        raise NotImplementedError("recurrent nets with projections are not simulated")
    x = x.transpose(0, 1) if batch_first else x
    final: list[Any] = []
    for level in range(num_layers):
        outs: list[Tensor] = []
        for direction in range(directions):
            index = len(final)
            out, last = layer(x, hidden[index], params[weights * index : weights * (index + 1)], direction == 1)
            outs.append(out)
            final.append(last)
        x = torch.cat(outs, -1) if bidirectional else outs[0]
        if dropout and train and level < num_layers - 1:
            x = torch.dropout(x, dropout, True)
    return x.transpose(0, 1) if batch_first else x, final


def lstm(x: Tensor, hx: list[Tensor], params: list[Tensor], *options: Any) -> tuple[Tensor, Tensor, Tensor]:
    """By the kernel that the CPU has for a whole layer."""
    from torch._decomp.decompositions import mkldnn_one_layer_lstm

    def layer(x: Tensor, hidden: Any, weights: list[Tensor], reverse: bool) -> tuple[Tensor, Any]:
        return mkldnn_one_layer_lstm(x, hidden, weights, len(weights) == 4, reverse)

    out, final = _stacked(layer, x, list(zip(hx[0].unbind(0), hx[1].unbind(0), strict=True)), params, *options)
    return out, torch.stack([h for h, _ in final]), torch.stack([c for _, c in final])


def _gru_layer(x: Tensor, h: Tensor, weights: list[Tensor], reverse: bool) -> tuple[Tensor, Tensor]:
    """Cells in place on strided pieces, as the CPU's: a kernel rounds otherwise on memory without gaps."""
    w_in, w_hidden, b_in, b_hidden = weights if len(weights) == 4 else (*weights, None, None)
    steps = F.linear(x, w_in, b_in).unbind(0)
    outs: list[Tensor] = []
    for step in reversed(steps) if reverse else steps:
        ours, theirs = step.unsafe_chunk(3, 1), F.linear(h, w_hidden, b_hidden).unsafe_chunk(3, 1)
        reset, update = theirs[0].add_(ours[0]).sigmoid_(), theirs[1].add_(ours[1]).sigmoid_()
        new = ours[2].add(theirs[2].mul_(reset)).tanh_()
        h = (h - new).mul_(update).add_(new)
        outs.append(h)
    return torch.stack(outs[::-1] if reverse else outs), h


def gru(x: Tensor, hx: Tensor, params: list[Tensor], *options: Any) -> tuple[Tensor, Tensor]:
    out, final = _stacked(_gru_layer, x, list(hx.unbind(0)), params, *options)
    return out, torch.stack(final)


def _rnn_layer(activation: Callable[[Tensor], Tensor]) -> Layer:
    def layer(x: Tensor, h: Tensor, weights: list[Tensor], reverse: bool) -> tuple[Tensor, Tensor]:
        w_in, w_hidden, b_in, b_hidden = weights if len(weights) == 4 else (*weights, None, None)
        steps = F.linear(x, w_in, b_in).unbind(0)
        outs: list[Tensor] = []
        for step in reversed(steps) if reverse else steps:
            h = activation(F.linear(h, w_hidden, b_hidden).add_(step))
            outs.append(h)
        return torch.stack(outs[::-1] if reverse else outs), h

    return layer


def rnn_tanh(x: Tensor, hx: Tensor, params: list[Tensor], *options: Any) -> tuple[Tensor, Tensor]:
    out, final = _stacked(_rnn_layer(torch.tanh), x, list(hx.unbind(0)), params, *options)
    return out, torch.stack(final)


def rnn_relu(x: Tensor, hx: Tensor, params: list[Tensor], *options: Any) -> tuple[Tensor, Tensor]:
    out, final = _stacked(_rnn_layer(torch.relu), x, list(hx.unbind(0)), params, *options)
    return out, torch.stack(final)


def register() -> None:
    library = torch.library.Library("aten", "IMPL")
    for name, function in {
        "dropout": dropout,
        "scaled_dot_product_attention": attention,
        "_weight_norm": weight_norm,
        "lstm.input": lstm,
        "gru.input": gru,
        "rnn_tanh.input": rnn_tanh,
        "rnn_relu.input": rnn_relu,
    }.items():
        for key in ("AutogradPrivateUse1", "PrivateUse1"):
            library.impl(name, function, key)
    _kept.append(library)
