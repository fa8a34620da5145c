"""AdamW that keeps what mixed precision needs, and moves no byte twice.

products = [m.weight for m in model.modules() if isinstance(m, Linear)]
rest = [p for p in model.parameters() if all(p is not q for q in products)]
groups = [{"params": products, "working_dtype": torch.bfloat16}, {"params": rest}]
optimizer = MasterAdamW(groups)
with torch.autocast("cuda", torch.bfloat16):
    loss = cross_entropy(model(token_ids), targets)
with optimizer.overlapping():  # or overlapping(wrapper); without it all is updated in step()
    loss.backward()
optimizer.step()
optimizer.zero_grad()
"""

from a2lib.optim.adamw import MasterAdamW

__all__ = ["MasterAdamW"]
