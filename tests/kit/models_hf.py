"""Tiny random models of the transformers and peft packages, in the same form as the menagerie. Nothing is downloaded."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.kit.specimen import Batch, Specimen, floats, generator, specimen

HUGGING_FACE: dict[str, Specimen] = {}


def _tokens(step: int, rank: int) -> Batch:
    return (torch.randint(3, 60, (2, 7), generator=generator(step, rank)),)


def _pixels(step: int, rank: int) -> Batch:
    labels = torch.randint(0, 4, (2,), generator=generator(step, rank))
    return floats(step, rank, 2, 3, 16, 16), labels


def _language_loss(model: nn.Module, batch: Batch) -> Tensor:
    return model(input_ids=batch[0], labels=batch[0]).loss


def _image_loss(model: nn.Module, batch: Batch) -> Tensor:
    return model(pixel_values=batch[0], labels=batch[1]).loss


def _language(ddp: str = "plain") -> Callable[[Callable[[], nn.Module]], Callable[[], nn.Module]]:
    return specimen(_tokens, _language_loss, ddp, HUGGING_FACE)


def _gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=61, n_positions=16, n_embd=24, n_layer=2, n_head=3))


@_language()
def gpt2() -> nn.Module:
    return _gpt2()


@_language()
def gpt2_checkpointing() -> nn.Module:
    model = _gpt2()
    # Its name changed within transformers 5.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable()
    return model


@_language()
def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    sizes = dict(hidden_size=24, num_hidden_layers=2, num_attention_heads=3, intermediate_size=48)
    return BertForMaskedLM(BertConfig(vocab_size=61, max_position_embeddings=16, **sizes))


@_language()
def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = dict(hidden_size=24, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=40)
    return LlamaForCausalLM(LlamaConfig(vocab_size=61, max_position_embeddings=16, **sizes))


@_language()
def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = dict(d_model=24, d_kv=8, d_ff=40, num_layers=2, num_decoder_layers=2, num_heads=3)
    return T5ForConditionalGeneration(T5Config(vocab_size=61, decoder_start_token_id=0, pad_token_id=0, **sizes))


@specimen(_pixels, _image_loss, table=HUGGING_FACE)
def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    sizes = dict(hidden_size=24, num_hidden_layers=2, num_attention_heads=3, intermediate_size=48)
    return ViTForImageClassification(ViTConfig(image_size=16, patch_size=8, num_labels=4, **sizes))


@specimen(_pixels, _image_loss, table=HUGGING_FACE)
def resnet() -> nn.Module:
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 2], layer_type="basic", num_labels=4)
    return ResNetForImageClassification(config)


@_language()
def peft_lora() -> nn.Module:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=3, lora_alpha=6, target_modules=["c_attn", "c_proj"], fan_in_fan_out=True, task_type="CAUSAL_LM")
    with warnings.catch_warnings():  # peft asks for an attribute that transformers has renamed
        warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated", category=FutureWarning)
        return get_peft_model(_gpt2(), config)
