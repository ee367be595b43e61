"""A Hugging Face model, unchanged, in a training loop with one added line. Needs: pip install -c constraints.txt -e '.[hf]'

    python examples/hf_finetune.py                                one process
    torchrun --nproc-per-node 2 examples/hf_finetune.py           two ranks: each keeps half of every state
    python examples/hf_finetune.py --text my.txt --steps 500

The model is a small GPT-2 with random weights, so that nothing is downloaded; a token is one byte.
Put `GPT2LMHeadModel.from_pretrained(...)` in its place to fine-tune a real one.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist

import lowtide

try:
    from transformers import GPT2Config, GPT2LMHeadModel
except ImportError as error:
    raise SystemExit("this example needs transformers: pip install -c constraints.txt -e '.[hf]'") from error

CONTEXT = 128


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, default=Path(__file__), help="what to learn; default: this script")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=8)
    args = parser.parse_args()

    if "RANK" in os.environ:  # started by torchrun
        dist.init_process_group("gloo")
    rank = dist.get_rank() if dist.is_initialized() else 0

    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=256, n_positions=CONTEXT, n_embd=128, n_layer=4, n_head=4, bos_token_id=0, eos_token_id=0)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    model, optimizer = lowtide.shard(model, optimizer, stage=3)  # <- the added line

    text = torch.tensor(list(args.text.read_bytes()))
    if len(text) <= CONTEXT:
        raise SystemExit(f"{args.text} has {len(text)} bytes; more than {CONTEXT} are needed")
    torch.manual_seed(rank)
    model.train()
    for step in range(1, args.steps + 1):
        starts = torch.randint(0, len(text) - CONTEXT, (args.batch, 1))
        tokens = text[starts + torch.arange(CONTEXT)]
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        lowtide.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and (step == 1 or step % max(1, args.steps // 5) == 0):
            print(f"step {step:4d}   loss {loss.item():.4f}")

    model.eval()
    with torch.no_grad():  # every rank takes part: a forward pass gathers what it needs
        written = model.generate(text[None, :32], max_new_tokens=64, do_sample=False, pad_token_id=0)
    if rank == 0:
        print("it goes on:", repr(bytes(written[0].tolist()).decode(errors="replace")))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
