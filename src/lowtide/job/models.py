"""Building the model of a job, and the one way in which the loop asks any model for its loss.

A function named by ``--model package.module:function`` takes no arguments and returns an ``nn.Module`` that either

* has ``forward(tokens, targets)``: int64 tensors of ``batch × context``, targets already shifted by one; or
* has ``forward(..., input_ids=, labels=)`` as in Hugging Face's causal language models, which shift the labels themselves;

and that returns the mean loss as a 0-dim tensor, or something with a ``loss`` (an attribute or a key).
How many tokens it knows and how many it looks at is read from ``model.vocab_size`` and ``model.context``, or from
``model.config.vocab_size`` and ``model.config.max_position_embeddings``; otherwise it is what the presets have, and a model
whose embeddings are all smaller than that is refused.
"""

from __future__ import annotations

import importlib
import inspect
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

import lowtide
from lowtide.errors import ArgumentError, DoesNotFit
from lowtide.job.batches import Batch
from lowtide.job.gpt import GPT
from lowtide.job.options import Options
from lowtide.job.presets import CONTEXT, PRESETS, TOKENS

_CONTRACT = (
    "A model for --model has forward(tokens, targets) -> mean loss (a 0-dim tensor, or something with .loss), "
    "or forward(input_ids=, labels=) as in Hugging Face."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """A model, and what the loop must know about it. ``context`` is at most what the presets use."""

    model: nn.Module
    vocabulary: int
    context: int
    shifts_itself: bool
    """Whether it takes ``input_ids`` and ``labels`` and shifts the labels, instead of tokens and targets."""
    loss: Callable[[Batch], Tensor]


def build_model(options: Options) -> Built:
    """The model of a job, with the numbers that torch's global generator gives it.

    A job that has a disk builds it there: a model that does not fit in memory never is in memory.
    """
    folders = options.disk_folders
    try:
        with lowtide.deferred(folders[0]) if folders else nullcontext():
            model = _make(options)
    except DoesNotFit as error:
        raise _whole_need(options, error) from error
    config = getattr(model, "config", None)
    vocabulary = _whole_number(model, config, ("vocab_size",), TOKENS)
    if options.model is not None:
        _refuse_other_forward(options.model, model)
        _refuse_small_embedding(options.model, model, vocabulary)
    return Built(
        model=model,
        vocabulary=vocabulary,
        context=min(CONTEXT, _whole_number(model, config, ("context", "max_position_embeddings", "n_positions"), CONTEXT)),
        shifts_itself=_shifts_itself(model),
        loss=_loss_of(model),
    )


def _make(options: Options) -> nn.Module:
    return _call_factory(options.model) if options.model is not None else GPT(PRESETS[options.model_name])


def _whole_need(options: Options, error: DoesNotFit) -> DoesNotFit:
    """The same error, with what the whole model needs: that a tensor found no room says little about how much is missing."""
    with torch.device("meta"):
        model = _make(options)
    built = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    states = 4 * sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)
    fix = (
        f"While it is built, the model's files need so much in {options.disk_folders[0]!r}; parameters, gradients and AdamW's "
        f"states then need up to {states / 2**20:.1f} MiB more. Make room, or give --disk another folder first."
    )
    return DoesNotFit(error.tier, built, shutil.disk_usage(options.disk_folders[0]).free, fix)


def _call_factory(name: str) -> nn.Module:
    module_name, _, function_name = name.partition(":")
    # As `python -m` does: a module that lies in the folder where the command was started can be named.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ArgumentError(f"--model is {name!r}: cannot import {module_name!r} ({error}).") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ArgumentError(f"--model is {name!r}: {module_name!r} has no function {function_name!r}.")
    model = function()
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"--model is {name!r}: {function_name}() returned {type(model).__name__}, not an nn.Module.")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ArgumentError(f"--model is {name!r}: the model has no parameter that can be trained.")
    return model


def _refuse_other_forward(name: str, model: nn.Module) -> None:
    if _shifts_itself(model):
        return
    signature = inspect.signature(model.forward)
    try:
        signature.bind("tokens", "targets")
    except TypeError as error:
        takes = f"its forward{signature} cannot be called with (tokens, targets)"
        raise ArgumentError(f"--model is {name!r}: {takes} ({error}). {_CONTRACT}") from error


def _refuse_small_embedding(name: str, model: nn.Module, vocabulary: int) -> None:
    """A model that looks tokens up, but not one of whose tables has room for all of them."""
    rows = [module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)]
    if rows and max(rows) < vocabulary:
        sizes = " and ".join(map(str, sorted(set(rows))))
        raise ArgumentError(
            f"--model is {name!r}: its embeddings have {sizes} rows, but it would get tokens up to {vocabulary - 1}. Say what "
            f"it knows: model.vocab_size, the rows for tokens, and model.context if it looks at fewer than {CONTEXT} of them. "
            f"{_CONTRACT}"
        )


def _whole_number(model: nn.Module, config: object, names: tuple[str, ...], default: int) -> int:
    for owner in (model, config):
        for name in names:
            value = getattr(owner, name, None)
            if isinstance(value, int) and value > 0:
                return value
    return default


def _shifts_itself(model: nn.Module) -> bool:
    takes = inspect.signature(model.forward).parameters
    return "input_ids" in takes and "labels" in takes


def _loss_of(model: nn.Module) -> Callable[[Batch], Tensor]:
    shifts_itself = _shifts_itself(model)

    def loss(batch: Batch) -> Tensor:
        tokens, targets = batch
        try:
            result = model(input_ids=tokens, labels=tokens) if shifts_itself else model(tokens, targets)
        except IndexError as error:
            raise ArgumentError(
                f"the model cannot look up what it was given ({error}): tokens up to {int(tokens.max())} in texts of "
                f"{tokens.shape[1]}. Set model.vocab_size and model.context to what its embeddings have room for."
            ) from error
        return _find_loss(result)

    return loss


def _find_loss(result: Any) -> Tensor:
    if isinstance(result, Mapping):
        result = cast(Mapping[str, Any], result).get("loss", result)
    result = getattr(result, "loss", result)
    if not isinstance(result, Tensor) or result.dim() != 0:
        raise ArgumentError(f"the model returned {type(result).__name__}. {_CONTRACT}")
    return result
