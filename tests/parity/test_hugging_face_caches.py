"""Models of other people's choice with their key and value caches on: `memory=` alone, from disk, and updated in backward.

Their blocks fill a cache that they are given, which a second forward would fill again. Random weights, nothing is downloaded.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide.runtime.guard import ActivationGuard
from tests.kit.parity import first_difference

VOCABULARY = 61
SMALL = {"vocab_size": VOCABULARY, "max_position_embeddings": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
WIDE = {**SMALL, "hidden_size": 16, "intermediate_size": 24}


_SIDE = {"layers": 2, "attention_heads": 4, "ffn_dim": 24}
SIDES = {f"{side}_{name}": n for side in ("encoder", "decoder") for name, n in _SIDE.items()}


def _t5(t: Any) -> nn.Module:
    sizes = dict(d_model=16, d_kv=4, d_ff=24, num_layers=2, num_decoder_layers=2, num_heads=4)
    return t.T5ForConditionalGeneration(t.T5Config(vocab_size=VOCABULARY, decoder_start_token_id=0, pad_token_id=0, **sizes))


def _bart(t: Any) -> nn.Module:
    ids = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=2, forced_eos_token_id=2)
    return t.BartForConditionalGeneration(
        t.BartConfig(vocab_size=VOCABULARY, max_position_embeddings=32, d_model=16, **SIDES, **ids)
    )


def _whisper(t: Any) -> nn.Module:
    sizes = dict(d_model=16, num_mel_bins=8, max_source_positions=10, max_target_positions=32)
    ids = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1)
    config = t.WhisperConfig(vocab_size=VOCABULARY, suppress_tokens=None, begin_suppress_tokens=None, **sizes, **SIDES, **ids)
    return t.WhisperForConditionalGeneration(config)


FAMILIES: dict[str, Callable[[Any], nn.Module]] = {
    "t5": _t5,
    "bart": _bart,
    "whisper": _whisper,
    "bloom": lambda t: t.BloomForCausalLM(t.BloomConfig(vocab_size=VOCABULARY, hidden_size=16, n_layer=2, n_head=4)),
    "falcon": lambda t: t.FalconForCausalLM(
        t.FalconConfig(vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=2, num_attention_heads=4)
    ),
    "gpt2": lambda t: t.GPT2LMHeadModel(t.GPT2Config(vocab_size=VOCABULARY, n_positions=32, n_embd=16, n_layer=2, n_head=4)),
    "gpt_neox": lambda t: t.GPTNeoXForCausalLM(t.GPTNeoXConfig(**WIDE)),
    "llama": lambda t: t.LlamaForCausalLM(t.LlamaConfig(num_key_value_heads=2, **WIDE)),
    "mixtral": lambda t: t.MixtralForCausalLM(
        t.MixtralConfig(num_key_value_heads=2, num_local_experts=3, num_experts_per_tok=2, **WIDE)
    ),
    "opt": lambda t: t.OPTForCausalLM(t.OPTConfig(hidden_size=16, ffn_dim=24, word_embed_proj_dim=16, **SMALL)),
    "bert": lambda t: t.BertForMaskedLM(t.BertConfig(**WIDE)),
    "mamba": lambda t: t.MambaForCausalLM(
        t.MambaConfig(vocab_size=VOCABULARY, hidden_size=16, state_size=4, num_hidden_layers=2)
    ),
}
WAYS: dict[str, dict[str, Any]] = {
    "memory alone": {"memory": "16GiB"},
    "memory alone, no room at first": {"memory": "16GiB"},
    "recompute": {"activations": "recompute"},
    "disk": {"memory": "16GiB", "disk": "?"},
    "disk, no room at first, updated in backward": {"memory": "16GiB", "disk": "?", "update": "backward"},
}


def batch(name: str, step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(3, VOCABULARY, (2, 7), generator=generator)
    if name == "whisper":
        return {"input_features": torch.randn(2, 8, 20, generator=generator), "labels": tokens}
    return {"input_ids": tokens, "labels": tokens}


def losses_and_weights(name: str, options: dict[str, Any] | None) -> list[Tensor]:
    import transformers

    torch.manual_seed(0)
    model = FAMILIES[name](transformers).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    if options is not None:
        lowtide.shard(model, optimizer, **options)
    out: list[Tensor] = []
    for step in range(3):
        torch.manual_seed(step)
        loss = model(**batch(name, step)).loss
        out.append(loss.detach().clone())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return out + [value.detach().clone() for value in model.state_dict().values()]


@pytest.fixture(autouse=True)
def _one_thread_and_no_collection(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Both take most of the time of so small a loop, and change no bit of it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setattr("lowtide.runtime.budget.gc.collect", lambda: 0)
    yield
    torch.set_num_threads(threads)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", FAMILIES)
def test_bits_of_plain_pytorch(name: str, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if "no room" in way:
        monkeypatch.setattr(ActivationGuard, "_is_room_for_all", lambda _: False)
    options = {**WAYS[way], **({"disk": str(tmp_path)} if "disk" in way else {})}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers' own, about slow paths
        expected, got = losses_and_weights(name, None), losses_and_weights(name, options)
    assert [text for a, b in zip(got, expected, strict=True) if (text := first_difference(a, b))] == []
