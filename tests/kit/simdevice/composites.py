"""Operators that PyTorch takes apart by device: here they are taken apart as on a CPU, so that bits can be compared."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

_FLASH = 1  # SDPBackend.FLASH_ATTENTION
_kept: list[torch.library.Library] = []  # a library that is dropped takes its operators along


def dropout(x: Tensor, p: float, train: bool) -> Tensor:
    if not train or p == 0 or x.numel() == 0:
        return x
    if p == 1:
        return x * torch.zeros_like(x)
    return x * torch.empty_like(x).bernoulli_(1 - p).div_(1 - p)


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


def lstm(
    x: Tensor,
    hx: list[Tensor],
    params: list[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """By the kernel that the CPU uses for a layer."""
    from torch._decomp import decompositions

    x = x.transpose(0, 1) if batch_first else x
    layers = decompositions.gather_params(params, has_biases, hx[0].size(2) != hx[1].size(2))
    hidden = list(zip(hx[0].unbind(0), hx[1].unbind(0), strict=True))
    out, final = decompositions._rnn_helper(
        x, hidden, layers, has_biases, num_layers, dropout, train, bidirectional, False, decompositions.mkldnn_one_layer_lstm
    )
    firsts, seconds = zip(*final, strict=True)
    return out.transpose(0, 1) if batch_first else out, torch.stack(firsts, 0), torch.stack(seconds, 0)


def gru(
    x: Tensor,
    hx: Tensor,
    params: list[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, Tensor]:
    """By plain arithmetic; an accelerator would have a kernel for a cell."""
    from torch._decomp import decompositions

    return decompositions.gru_impl(x, hx, params, has_biases, num_layers, dropout, train, bidirectional, batch_first)


def register() -> None:
    library = torch.library.Library("aten", "IMPL")
    for name, function in {
        "dropout": dropout,
        "scaled_dot_product_attention": attention,
        "_weight_norm": weight_norm,
        "lstm.input": lstm,
        "gru.input": gru,
    }.items():
        for key in ("AutogradPrivateUse1", "PrivateUse1"):
            library.impl(name, function, key)
    _kept.append(library)
