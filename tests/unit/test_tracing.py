"""A trace counts what a real step does, unit by unit, and leaves the model as it was."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop
from torch.utils.flop_counter import FlopCounterMode

import lowtide
from lowtide.api import engine_of
from lowtide.errors import ArgumentError, Refused
from lowtide.job.gpt import GPT
from lowtide.job.presets import PRESETS, Shape
from lowtide.spec.model import ModelSpec, UnitFacts
from lowtide.spec.tracing import trace
from lowtide.spec.tracing_fake import Fakes
from tests.kit.models import MENAGERIE, Block, Stack
from tests.kit.models_hf import HUGGING_FACE

NEEDS_VALUES = {"moe"}
NEEDS_INPUT_GRADIENT = {"checkpoint_reentrant_inside", "checkpoint_reentrant_around"}
SPECIMENS = {name: s for name, s in MENAGERIE.items() if name not in NEEDS_VALUES}
# What torch knows of these without values is not quite what runs: a workspace of oneDNN's, a table of places that is not used,
# and a mask that transformers leaves out only when it can look at it.
NEARLY = {"lstm": 0.95, "embeddings": 0.01, "gpt2_checkpointing": 0.01}
LANGUAGE = ("gpt2", "gpt2_checkpointing", "bert", "llama")
TRANSFORMERS = (*LANGUAGE, "resnet")


def batch_of(name: str) -> Any:
    batch = (SPECIMENS.get(name) or HUGGING_FACE[name]).batch(0, 0)
    if name in LANGUAGE:
        return {"input_ids": batch[0], "labels": batch[0]}
    if name in HUGGING_FACE:
        return {"pixel_values": batch[0], "labels": batch[1]}
    return tuple(x.requires_grad_() for x in batch) if name in NEEDS_INPUT_GRADIENT else batch


def build(name: str) -> nn.Module:
    return (SPECIMENS.get(name) or HUGGING_FACE[name]).build()


def facts(model: nn.Module, batch: Any, **choices: Any) -> ModelSpec:
    return trace(model, batch, bucket_bytes=0, **choices)


def by_name(spec: ModelSpec) -> dict[str, UnitFacts]:
    return {unit.name: unit for unit in spec.units}


def loss_of(output: Any) -> Tensor:
    """What a trace takes as the loss, written down once more."""
    if isinstance(output, Tensor):
        return output.sum() if output.dim() else output
    if isinstance(output, dict) and "loss" in output:
        return output["loss"]
    values = output.values() if isinstance(output, dict) else output if isinstance(output, tuple) else vars(output).values()
    return torch.stack([v.sum() for v in values if isinstance(v, Tensor) and v.requires_grad]).sum()


def really_saved(model: nn.Module, batch: Any) -> int:
    """Bytes that autograd keeps of a real forward pass."""
    resident = [*model.parameters(), *model.buffers()]  # held: a forward may replace them, and their addresses be used again
    stays = {t.untyped_storage().data_ptr() for t in resident}
    seen: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept = tensor.detach()
        if (address := tensor.untyped_storage().data_ptr()) not in stays and address:
            seen.setdefault(address, kept)
        return kept

    with saved_tensors_hooks(pack, lambda kept: kept):
        loss_of(model(**batch) if isinstance(batch, dict) else model(*batch))
    return sum(t.untyped_storage().nbytes() for t in seen.values())


# -- what is counted --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*SPECIMENS, *TRANSFORMERS])
def test_saves_what_a_real_forward_saves_and_changes_nothing(name: str) -> None:
    model, batch = build(name), batch_of(name)
    model.register_forward_hook(lambda *_: None)
    before, inputs = everything(model), str(batch)
    spec = facts(model, batch)
    assert everything(model) == before
    assert str(batch) == inputs
    saved = sum(u.activation_bytes for u in spec.units) + spec.outside_bytes
    assert saved == pytest.approx(really_saved(model, batch), rel=NEARLY.get(name, 0))
    assert spec.numel == sum(p.numel() for p in model.parameters())
    assert spec.trained_numel == sum(p.numel() for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize("name", ["multihead_attention", "lstm", "gpt2_checkpointing", "llama"])
def test_traces_for_cuda(name: str) -> None:
    model, batch = build(name), batch_of(name)
    cpu, cuda = facts(model, batch), facts(model, batch, device="cuda")
    assert [u.name for u in cuda.units] == [u.name for u in cpu.units]
    assert forward_flops(cuda) == forward_flops(cpu) > 0


def forward_flops(spec: ModelSpec) -> float:
    return sum(u.forward.flops for u in spec.units) + spec.outside_forward.flops


@pytest.mark.parametrize(
    "name", ["mlp", "tied_head", "frozen_block", "frozen_first", "gru", "convolutions", "checkpoint_inside"]
)
def test_products_are_those_of_a_real_step(name: str) -> None:
    """Of models without fused kernels, which torch's counter does not know on a CPU."""
    model, batch = build(name), batch_of(name)
    spec = facts(model, batch)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        loss = loss_of(model(*batch))
        forward = counter.get_total_flops()
        loss.backward()
    if name != "tied_head":  # fused attention computes the scores again in backward
        ours = sum(u.backward.flops for u in spec.units) + spec.outside_backward.flops
        assert ours == counter.get_total_flops() - forward
    assert sum(u.forward.flops for u in spec.units) + spec.outside_forward.flops == forward


def test_one_unit_by_hand() -> None:
    rows, width = 64, 24
    spec = facts(Stack([Block() for _ in range(3)]), torch.empty(rows, width))
    block = by_name(spec)["blocks.1"]
    row, weights = rows * 4, 2 * 24 * 48
    assert block.forward.flops == 2 * rows * weights
    assert block.backward.flops == 2 * block.forward.flops
    # the norm's input, mean and rstd, its output, the product, the result of gelu
    assert block.activation_bytes == row * (24 + 1 + 1 + 24 + 48 + 48)
    assert block.input_bytes == row * 24
    # norm: in, out, two statistics, scale and shift; gelu: in, out; the sum: two in, one out
    assert block.forward.moved_bytes == row * (24 + 24 + 2 + 48 + 48 + 3 * 24) + 4 * 48
    assert block.forward.fresh_bytes == row * (24 + 2 + 48 + 48 + 24 + 24)
    assert block.forward.operations == 5
    # the gradients of gelu's result and of its argument, and the one that came in; the loss and its gradient
    assert block.transient_bytes == row * (24 + 48 + 48) + 8
    assert block.numel == block.trained_numel == weights + 48 + 24 + 2 * 24
    assert block.parameter_bytes == 4 * block.numel
    assert spec.batch == "64×24 float32"
    assert spec.dtype == "fp32"


def test_work_goes_to_the_unit_that_does_it() -> None:
    """Calls that repeat, and units within units."""
    batch = torch.empty(8, 24)
    once, twice = (by_name(facts(Stack([Block(), Block()], run=run), batch)) for run in (_once, _twice))
    for name in ("blocks.0", "blocks.1"):
        assert twice[name].forward.flops == 2 * once[name].forward.flops
        assert twice[name].backward.flops == 2 * once[name].backward.flops
        assert twice[name].activation_bytes == 2 * once[name].activation_bytes
    assert twice["head"] == once["head"]
    inner = facts(MENAGERIE["nested_blocks"].build(), batch, units="blocks.*.inner.*")
    chains = [f"blocks.{i}{part}" for i in range(2) for part in ("", ".inner.0", ".inner.1")]
    assert [u.name for u in inner.units] == [*chains, "head"]
    units = by_name(inner)
    assert units["blocks.0"].forward.flops == units["blocks.0"].backward.flops == 0
    assert units["blocks.0"].backward.moved_bytes > 0, "the gradient of its gain"
    assert units["blocks.0.inner.1"].backward == once["blocks.1"].backward


def _once(block: nn.Module, x: Tensor) -> Tensor:
    return block(x)


def _twice(block: nn.Module, x: Tensor) -> Tensor:
    return block(block(x))


def test_what_runs_between_units_is_outside() -> None:
    batch = torch.empty(8, 24)
    plain = facts(Stack([Block(), Block()]), batch)
    between = facts(Stack([Block(), Block()], run=lambda block, x: block(x).tanh()), batch)
    size = 8 * 24 * 4
    assert between.outside_forward.moved_bytes - plain.outside_forward.moved_bytes == 2 * 2 * size
    assert between.outside_backward.moved_bytes - plain.outside_backward.moved_bytes == 2 * 3 * size
    # tanh saves its result, which the next unit takes: whoever saves it first counts it
    assert between.outside_bytes - plain.outside_bytes == 2 * size
    assert by_name(between)["blocks.1"].activation_bytes == by_name(plain)["blocks.1"].activation_bytes - size
    assert by_name(between)["blocks.1"].backward == by_name(plain)["blocks.1"].backward


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_is_part_of_backward(reentrant: bool) -> None:
    batch = torch.empty(8, 24, requires_grad=True)
    plain = by_name(facts(Stack([Block(), Block()]), batch))
    run = lambda block, x: checkpoint(block, x, use_reentrant=reentrant)  # noqa: E731
    with set_checkpoint_early_stop(False):
        again = by_name(facts(Stack([Block(), Block()], run=run), batch))
    for name in ("blocks.0", "blocks.1"):
        assert again[name].forward.flops == plain[name].forward.flops
        assert again[name].backward.flops == plain[name].backward.flops + plain[name].forward.flops
        assert again[name].activation_bytes == 0
        assert again[name].transient_bytes > plain[name].transient_bytes


def test_units_stand_in_the_order_of_the_forward() -> None:
    class Backwards(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(3))
            self.unused = nn.Linear(3, 3)
            self.first = nn.Linear(24, 24)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            for block in reversed(self.blocks):
                x = block(x)
            return x

    assert [u.name for u in facts(Backwards(), torch.empty(2, 24)).units] == [
        "first",
        "blocks.2",
        "blocks.1",
        "blocks.0",
        "unused",
    ]
    tied = facts(build("tied_across_blocks"), batch_of("tied_across_blocks"))
    assert [u.name for u in tied.units] == ["blocks.0", "blocks.1", "blocks.2", "head"]


def test_a_part_of_a_tied_gradient_is_a_gradient() -> None:
    """It waits for the other part through the whole backward, and is no passing need of the units between."""

    class Tied(nn.Module):
        def __init__(self, *, tied: bool) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(24, 24, bias=False), nn.Linear(24, 24, bias=False)
            self.blocks = nn.ModuleList([Block(), Block()])
            if tied:
                self.last.weight = self.first.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.blocks[1](self.blocks[0](self.first(x))))

    one, other = (by_name(facts(Tied(tied=tied), torch.empty(4, 24))) for tied in (True, False))
    assert one["blocks.0"].transient_bytes == other["blocks.0"].transient_bytes
    assert one["first"].transient_bytes > other["first"].transient_bytes, "there the parts meet"


def test_agrees_with_the_engine() -> None:
    """What the engine counts when gpt-17m really runs, and what a trace of it on the meta device says."""
    shape = PRESETS["gpt-17m"]
    tokens = torch.randint(0, shape.tokens, (1, 96))
    with torch.device("meta"):
        spec = trace(GPT(shape), (tokens, tokens), bucket_bytes=1 << 20)
    model = GPT(shape)
    lowtide.shard(model, torch.optim.SGD(model.parameters()), stage=3)
    engine = engine_of(model)
    saved = engine.activations.saved.saved_bytes
    saved.clear()
    loss = model(tokens, tokens)
    counted = {unit.name if unit else "": n for unit, n in saved.items()}
    del loss
    assert sorted(u.name for u in spec.units) == sorted(u.name for u in engine.units)
    for unit in spec.units:
        assert unit.activation_bytes == pytest.approx(counted[unit.name], rel=0.02)
    assert spec.outside_bytes == pytest.approx(counted[""], rel=0.02)


# -- attention as CUDA does it ----------------------------------------------------------------------------------------


class Attending(nn.Module):
    def __init__(self, *, dropout: float, masked: bool) -> None:
        super().__init__()
        self.qkv, self.dropout, self.masked = nn.Linear(64, 192), dropout, masked

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device) if self.masked else None
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=self.dropout)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cuda_has_a_fused_kernel_for_dropout(dtype: torch.dtype) -> None:
    length = 128
    scores = 2 * 4 * length * length * dtype.itemsize
    batch = torch.empty(2, length, 64, dtype=dtype)
    model = Attending(dropout=0.1, masked=False).to(dtype)
    cpu, cuda = (facts(model, batch, device=device) for device in ("cpu", "cuda"))
    assert cpu.outside_bytes > 2 * scores
    assert cuda.outside_bytes < scores
    attention = 4 * 2 * length * length * 64
    assert cuda.outside_forward.flops == cpu.outside_forward.flops == attention
    assert cuda.outside_backward.flops == cpu.outside_backward.flops + attention / 2, "the scores are computed again"


def test_cuda_masks_and_devices() -> None:
    class OnDevice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            x = x.to("cuda").cuda() + torch.ones(8, device="cuda")
            return self.linear(x.to(torch.device("cuda:0"), torch.float32))

    assert facts(OnDevice(), torch.empty(2, 8), device="cuda").units[0].forward.flops == 2 * 2 * 8 * 8
    masked = facts(Attending(dropout=0.0, masked=True), torch.empty(2, 32, 64), device="cuda")
    assert masked.outside_forward.flops == 4 * 2 * 32 * 32 * 64
    assert masked.outside_bytes > facts(Attending(dropout=0.0, masked=False), torch.empty(2, 32, 64)).outside_bytes
    with pytest.raises(ArgumentError, match=r"'tpu'.*'cuda'"):
        facts(OnDevice(), torch.empty(2, 8), device="tpu")


# -- what goes in -----------------------------------------------------------------------------------------------------


def test_only_shapes_matter() -> None:
    tokens = torch.zeros(2, 8, dtype=torch.int64)
    shape = Shape(layers=2, width=32, heads=2, tokens=50, context=8)
    expected = facts(GPT(shape), (tokens, tokens))
    with torch.device("meta"):
        on_meta = GPT(shape)
    with torch._subclasses.FakeTensorMode():
        fake = torch.empty(2, 8, dtype=torch.int64)
    meta = tokens.to("meta")
    assert facts(on_meta, (meta, meta)) == expected
    assert facts(on_meta, [fake, fake]) == expected
    named = facts(on_meta, {"tokens": tokens, "targets": tokens}, name="small")
    assert (named.name, named.batch) == ("small", "tokens 2×8 int64, targets 2×8 int64")
    assert named.units == expected.units


def test_parameters_that_share_memory() -> None:
    """Views of one flat tensor: what autograd saves of them is never an activation."""
    model = Stack([Block(), Block()])
    flat = torch.zeros(3 * 24 * 48)
    for index, block in enumerate(model.blocks):
        block.up.weight = nn.Parameter(flat[index * 24 * 48 :][: 24 * 48].view(48, 24))
    fakes = Fakes()
    one, other = (fakes.of(block.up.weight) for block in model.blocks)
    assert one.untyped_storage() is other.untyped_storage()
    assert (other.storage_offset(), other.shape, type(other)) == (24 * 48, (48, 24), type(one))
    assert facts(model, torch.empty(2, 24)) == facts(Stack([Block(), Block()]), torch.empty(2, 24))


def test_a_deferred_model(tmp_path: Any) -> None:
    with lowtide.deferred(str(tmp_path)):
        model = Stack([Block(), Block()])
    assert facts(model, torch.empty(2, 24)).units == facts(Stack([Block(), Block()]), torch.empty(2, 24)).units


def test_a_loss_of_ones_own() -> None:
    targets = torch.zeros(8, dtype=torch.int64)
    model = Stack([Block(), Block()])
    spec = facts(model, torch.empty(8, 24), loss=lambda output: F.cross_entropy(output, targets))
    assert spec.outside_bytes == 8 * 5 * 4 + 8 * 8 + 4, "log-softmax, the targets, the weight of all"
    for wrong in (lambda output: output, lambda output: output.detach().sum()):
        with pytest.raises(ArgumentError, match="loss"):
            facts(model, torch.empty(8, 24), loss=wrong)
    with pytest.raises(ArgumentError, match="trained"):
        facts(model.requires_grad_(False), torch.empty(8, 24))


# -- what is refused, and what stays as it was ------------------------------------------------------------------------


class Peeking(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.norm, self.how = nn.BatchNorm1d(24), how

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        if self.how == "item":
            return x * x.sum().item()
        return x[x > 0] if self.how == "mask" else x if x.sum() > 0 else -x


@pytest.mark.parametrize("how", ["item", "mask", "if"])
def test_a_forward_that_needs_values(how: str) -> None:
    model = Stack([Peeking(how), Peeking(how)])
    before = everything(model)
    with pytest.raises(Refused, match=r"blocks\.0.*count of parameters.*data-dependent"):
        facts(model, torch.empty(4, 24))
    assert everything(model) == before


def everything(model: nn.Module) -> list[Any]:
    """All that a trace could have changed."""
    return [
        [(n, id(p), id(p.grad), p._version, p.requires_grad) for n, p in model.named_parameters(remove_duplicate=False)],
        [(n, id(b), b._version, b.tolist()) for n, b in model.named_buffers(remove_duplicate=False)],
        [
            (n, m.training, list(vars(m)), [id(v) for v in vars(m).values() if not isinstance(v, int)])
            for n, m in model.named_modules()
        ],
        [(n, k, list(map(id, v))) for n, m in model.named_modules() for k, v in vars(m).items() if isinstance(v, list | dict)],
        [(n, list(map(id, v.values()))) for n, m in model.named_modules() for v in vars(m).values() if isinstance(v, dict)],
        [torch.get_rng_state().tolist(), random.getstate()],
    ]


def test_parameters_in_closures_and_random_numbers() -> None:
    model = Stack([Block(), Block()])
    hidden, constant = model.head.weight, torch.ones(24)

    def run(block: nn.Module, x: Tensor) -> Tensor:
        random.random()
        return block(x) @ hidden.t() @ hidden * constant + torch.rand(24)

    model.run = run
    before = everything(model)
    assert facts(model, torch.empty(2, 24)).units
    assert everything(model) == before
    assert hidden.grad is None


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo looks at it
def test_compiled_blocks_are_traced_as_they_are_written() -> None:
    model = Stack([Block(), Block()])
    plain = facts(model, torch.empty(2, 24))
    for block in model.blocks:
        block.compile(backend="eager")
    assert facts(model, torch.empty(2, 24)) == plain
    assert model(torch.ones(2, 24)).shape == (2, 5)
