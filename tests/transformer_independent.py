"""The same Transformer written another way: loops, complex numbers, the state dict alone."""

import torch


def rope(x, theta):
    """x (T, d): each pair as a complex number, multiplied by exp(i * angle)."""
    length, d = x.shape
    turned = []
    for position in range(length):
        for i in range(d // 2):
            angle = torch.tensor(position * theta ** (-2 * i / d), dtype=torch.float64)
            pair = torch.complex(x[position, 2 * i], x[position, 2 * i + 1])
            turned.append(pair * torch.polar(torch.ones_like(angle), angle))
    return torch.view_as_real(torch.stack(turned)).reshape(length, d)


def rms_norm(x, weight, eps=1e-5):
    return torch.stack([row / torch.sqrt((row @ row) / len(row) + eps) for row in x]) * weight


def attend(q, k, v):
    """One head, (T, d): query by query over the keys it may see."""
    rows = []
    for i, query in enumerate(q):
        weights = torch.stack([torch.exp(query @ k[j] / len(query) ** 0.5) for j in range(i + 1)])
        rows.append(sum(w * v[j] for j, w in enumerate(weights)) / weights.sum())
    return torch.stack(rows)


def forward(weights, token_ids, num_heads, theta=10_000.0):
    """Logits (B, T, V) from ``weights``, a dict of the state dict's names."""
    w = {name.removesuffix(".weight"): tensor for name, tensor in weights.items()}
    num_layers = 1 + max(int(n.split(".")[1]) for n in w if n.startswith("layers."))
    logits = []
    for sequence in token_ids:
        x = torch.stack([w["token_embeddings"][token] for token in sequence])
        for i in range(num_layers):
            part = {n.removeprefix(f"layers.{i}."): t for n, t in w.items()}
            normed = rms_norm(x, part["ln1"])
            q, k, v = (normed @ part[f"attn.{name}_proj"].T for name in "qkv")
            heads = [
                attend(rope(qh, theta), rope(kh, theta), vh)
                for qh, kh, vh in zip(*(y.chunk(num_heads, -1) for y in (q, k, v)), strict=True)
            ]
            x = x + torch.cat(heads, -1) @ part["attn.output_proj"].T
            normed = rms_norm(x, part["ln2"])
            gate = normed @ part["ffn.w1"].T
            gated = gate / (1 + torch.exp(-gate)) * (normed @ part["ffn.w3"].T)
            x = x + gated @ part["ffn.w2"].T
        logits.append(rms_norm(x, w["ln_final"]) @ w["lm_head"].T)
    return torch.stack(logits)


def cross_entropy(logits, targets):
    losses = []
    for row, target in zip(logits.flatten(0, -2), targets.flatten(), strict=True):
        losses.append(torch.log(torch.exp(row).sum()) - row[target])
    return sum(losses) / len(losses)
