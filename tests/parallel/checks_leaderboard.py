"""The leaderboard's step, against the plain model in one process."""

import warnings

import torch
from checking import check, take_step, world

from a2lib.leaderboard import LADDER, Step
from a2lib.leaderboard.training import Training
from a2lib.model import TransformerLM, cross_entropy
from a2lib.theory.memory.keeping import BlockPlan
from a2lib.theory.transformer import Shape

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
    from a2lib.leaderboard import training as module

    device = torch.get_default_device().type
    torch.set_default_device(None)  # which Dynamo of torch 2.11 does not trace through
    # On a GPU PyTorch's own attention has no float64; and of tensors this small none is moved.
    attention, module.LEAST = "sdpa_flash" if device == "cpu" else "eager", 1
    # Sizes that two ranks do not divide.
    odd = Shape(24, 41, LAYERS, 2, 19)
    for way in (way for way in LADDER if way.name in WAYS):
        keeps = WAYS[way.name]
        # It is AOTAutograd that keeps what a plan says; the rest is the same without, and sooner.
        module.COMPILER = {**module.COMPILER, "cpu": "aot_eager" if keeps else "eager"}
        step = Step(way, odd, 2, CONTEXT, attention, "fp32")
        plan = keeps and (lambda _, plans=keeps: plans)
        own = Training(step, device, rank, 5, plan, LR, torch.float64)
        own.model.chunk = 7
        batches = [None] * size
        # By the CPU: a tensor of a GPU arrives on the GPU that it is of.
        mine = own.token_ids.cpu(), own.targets.cpu()
        torch.distributed.all_gather_object(batches, mine)
        weights, losses = plain_weights(odd, 5, batches, 3, device)
        for loss, norm in losses:
            norms = []

            def look(moment, own=own, norms=norms):
                if moment == "backward":
                    norms.append(own.gradient_norm())

            mine = own.step(look)
            torch.distributed.all_reduce(mine)
            assert abs(mine.item() / size - loss) < 1e-12, way.name
            assert abs(norms[0] - norm) < 1e-6 * norm, (way.name, norms, norm)
        whole = own.whole()
        assert whole.keys() == weights.keys(), way.name
        for name, right in weights.items():
            off = (whole[name] - right).norm() / right.norm()
            assert off < 1e-9, (way.name, name, off.item())
        assert (own.mover is not None) == (way.keeps == "moved")
        assert own.mover is None or own.mover.moved_bytes > 0
    torch.set_default_device(device)
