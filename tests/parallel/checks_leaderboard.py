"""The leaderboard's step, against the plain model in one process."""

import contextlib
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
    tokens = torch.cat([tokens for tokens, _ in batches]).to(device)
    targets = torch.cat([targets for _, targets in batches]).to(device)
    losses = []
    for _ in range(steps):
        loss = cross_entropy(model(tokens), targets)
        loss.backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
        take_step(optimizer)
        losses.append((loss.item(), norm.item()))
    return dict(model.named_parameters()), losses


@contextlib.contextmanager
def as_the_command_runs():
    """Let torch warn while it compiles, and take away the default device, through which Dynamo of
    torch 2.11 does not trace. The context is the device's type."""
    warnings.simplefilter("default")
    device = torch.get_default_device().type
    torch.set_default_device(None)
    yield device
    torch.set_default_device(device)


@check(2)
def ways_of_the_leaderboard_update_as_the_plain_model():
    with as_the_command_runs() as device:
        for name, plans in WAYS.items():
            update_as_the_plain_model(device, name, plans)


def update_as_the_plain_model(device, name, plans):
    rank, size = world()
    way = LADDER[name]
    # On a GPU PyTorch's own attention has no float64.
    attention, compiler = "eager", ""
    if device == "cpu":
        # It is AOTAutograd that keeps what a plan says; the rest is the same without, and sooner.
        attention, compiler = "sdpa_flash", "aot_eager" if plans else "eager"
    odd = Shape(24, 41, LAYERS, 2, 19)  # sizes that two ranks do not divide
    own = Training(
        Step(way, odd, 2, CONTEXT, attention, "fp32"),
        device,
        rank,
        5,
        plans and (lambda _: plans),
        lr=LR,
        wide=torch.float64,
        compiler=compiler,
        least_moved=1,
    )
    own.model.chunk = 7
    batches = [None] * size
    # By the CPU: a tensor of a GPU arrives on the GPU that it is of.
    torch.distributed.all_gather_object(batches, (own.token_ids.cpu(), own.targets.cpu()))
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


def losses_of_bf16(way, shape, context, plan, lr):
    """Return the training, and the losses of eight steps."""
    with as_the_command_runs() as device:
        attention = "sdpa_flash" if device == "cpu" else "eager"
        step = Step(way, shape, 2, context, attention, "bf16")
        rank = world()[0]
        options = {"lr": lr, "compiler": "aot_eager", "least_moved": 1}
        own = Training(step, device, rank, 5, lambda _: plan, **options)
        return own, [own.step().item() for _ in range(8)]


@check(2)
def states_in_bf16_are_trained_in_bf16():
    way = Way("torch", "fused", "attention", states="bf16")
    plan = [BlockPlan(kept=())] * LAYERS
    own, losses = losses_of_bf16(way, Shape(24, 32, LAYERS, 2, 16), CONTEXT, plan, LR)
    assert losses[-1] < losses[0], losses
    for p in own.parameters:
        moments = own.optimizer.state[p]
        assert p.dtype == moments["exp_avg"].dtype == moments["exp_avg_sq"].dtype == torch.bfloat16


@check(2)
def fp8_products_follow_those_of_bf16():
    """Sharded, kept by a plan and sent to the host; and the losses are not the same."""
    plan = [BlockPlan(("k_proj", "w3"), 10**6), BlockPlan()]
    losses = {}
    for ffn in ("bf16", "fp8"):
        way = Way("a2lib", "fused", "moved", ffn=ffn)
        own, losses[ffn] = losses_of_bf16(way, Shape(32, 48, LAYERS, 2, 16), 16, plan, LR / 10)
        assert own.mover.moved_bytes > 0
    bf16, fp8 = losses["bf16"], losses["fp8"]
    assert fp8[-1] < 0.9 * fp8[0], losses
    assert bf16 != fp8 and abs(fp8[-1] - bf16[-1]) < 0.1 * (bf16[0] - bf16[-1]), losses
