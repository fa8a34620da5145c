"""The leaderboard's step, against the plain model in one process."""

import warnings

import torch
from checking import check, take_step, world

from a2lib.activations import BlockPlan
from a2lib.leaderboard import LADDER, Step, Training, Way, loss_and_norm
from a2lib.model import TransformerLM, cross_entropy
from a2lib.shapes import Shape

LAYERS, CONTEXT, LR = 2, 12, 0.1
# Of the ladder, those that have between them all that its steps change.
WAYS = {"recomputed": None, "offloaded": [BlockPlan(("k_proj", "w3"), 10**6), BlockPlan()]}


def plain_weights(shape, seed, batches, steps, device):
    """Weights after so many steps on all ranks' sequences together, in float64; and the losses."""
    sizes = (shape.vocab_size, CONTEXT, shape.d_model, LAYERS, shape.num_heads, shape.d_ff)
    model = TransformerLM(*sizes, dtype=torch.float64, seed=seed, device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    tokens, targets = (torch.cat(x).to(device) for x in zip(*batches, strict=True))
    losses = []
    for _ in range(steps):
        loss = cross_entropy(model(tokens), targets)
        loss.backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
        take_step(optimizer)
        losses.append((loss.item(), norm.item()))
    return {name: p.detach() for name, p in model.named_parameters()}, losses


@check(2)
def ways_of_the_leaderboard_update_as_the_plain_model():
    warnings.simplefilter("default")  # torch's own, while it compiles
    rank, size = world()
    device = torch.get_default_device().type
    torch.set_default_device(None)  # which Dynamo of torch 2.11 does not trace through
    # On a GPU PyTorch's own attention has no float64.
    attention = "sdpa_flash" if device == "cpu" else "eager"
    # Sizes that two ranks do not divide.
    odd = Shape(24, 41, LAYERS, 2, 19)
    for name, keeps in WAYS.items():
        way = LADDER[name]
        # It is AOTAutograd that keeps what a plan says; the rest is the same without, and sooner.
        compiler = "" if device == "cuda" else "aot_eager" if keeps else "eager"
        step = Step(way, odd, 2, CONTEXT, attention, "fp32")
        plan = keeps and (lambda _, plans=keeps: plans)
        own = Training(
            step,
            device,
            rank,
            5,
            plan,
            lr=LR,
            wide=torch.float64,
            compiler=compiler,
            least_moved=1,
        )
        own.model.chunk = 7
        batches = [None] * size
        # By the CPU: a tensor of a GPU arrives on the GPU that it is of.
        mine = own.token_ids.cpu(), own.targets.cpu()
        torch.distributed.all_gather_object(batches, mine)
        weights, losses = plain_weights(odd, 5, batches, 3, device)
        for loss, norm in losses:
            row = loss_and_norm(own)
            assert abs(row["loss"] - loss) < 1e-12, name
            assert abs(row["gradient_norm"] - norm) < 1e-6 * norm, (name, row, norm)
        whole = own.whole()
        assert whole.keys() == weights.keys(), name
        for parameter, right in weights.items():
            off = (whole[parameter] - right).norm() / right.norm()
            assert off < 1e-9, (name, parameter, off.item())
        assert (own.mover is not None) == (way.keeps == "moved")
        assert own.mover is None or own.mover.moved_bytes > 0
    torch.set_default_device(device)


@check(2)
def states_in_bf16_are_trained_in_bf16():
    warnings.simplefilter("default")  # torch's own, while it compiles
    device = torch.get_default_device().type
    torch.set_default_device(None)
    way = Way("torch", "fused", "attention", states="bf16")
    attention = "sdpa_flash" if device == "cpu" else "eager"
    step = Step(way, Shape(24, 32, LAYERS, 2, 16), 2, CONTEXT, attention, "bf16")
    plan = [BlockPlan(kept=())] * LAYERS
    own = Training(step, device, world()[0], 5, lambda _: plan, lr=LR, compiler="aot_eager")
    losses = [own.step().item() for _ in range(8)]
    assert losses[-1] < losses[0], losses
    for p in own.parameters:
        moments = own.optimizer.state[p]
        assert p.dtype == moments["exp_avg"].dtype == moments["exp_avg_sq"].dtype == torch.bfloat16
    torch.set_default_device(device)


@check(2)
def fp8_products_follow_those_of_bf16():
    """Sharded, kept by a plan and sent to the host; and the losses are not the same."""
    warnings.simplefilter("default")  # torch's own, while it compiles
    device = torch.get_default_device().type
    torch.set_default_device(None)
    attention = "sdpa_flash" if device == "cpu" else "eager"
    plan = [BlockPlan(("k_proj", "w3"), 10**6), BlockPlan()]
    losses = {}
    for ffn in ("bf16", "fp8"):
        way = Way("a2lib", "fused", "moved", ffn=ffn)
        step = Step(way, Shape(32, 48, LAYERS, 2, 16), 2, 16, attention, "bf16")
        own = Training(
            step,
            device,
            world()[0],
            5,
            lambda _: plan,
            lr=LR / 10,
            compiler="aot_eager",
            least_moved=1,
        )
        losses[ffn] = [own.step().item() for _ in range(8)]
        assert own.mover.moved_bytes > 0
    bf16, fp8 = losses["bf16"], losses["fp8"]
    assert fp8[-1] < 0.9 * fp8[0], losses
    assert bf16 != fp8 and abs(fp8[-1] - bf16[-1]) < 0.1 * (bf16[0] - bf16[-1]), losses
    torch.set_default_device(device)
