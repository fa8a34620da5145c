"""The tape of a step as CUDA would run it, and a model without memory to run."""

import torch

from a2lib.lab.tape import Tape

# On CUDA these make one more tensor of their result's size for a moment.
INSIDE = (torch.ops.aten._softmax_backward_data.default,)


class CudaTape(Tape):
    """Count the tensors too that CUDA's kernels make inside of the operators INSIDE."""

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        result = super().__torch_dispatch__(operator, types, args, kwargs)
        if operator in INSIDE:
            self.peak = max(self.peak, self.now + result.untyped_storage().nbytes())
        return result


def with_fake_weights(model, device):
    """Return ``model``, built on "meta", with weights and buffers on ``device``: fake ones, where a
    FakeTensorMode is on."""
    weights = {
        name: torch.empty(weight.shape, dtype=weight.dtype, device=device)
        for name, weight in model.state_dict().items()
    }
    model.load_state_dict(weights, assign=True)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_meta:  # what is in no state dict
                empty = torch.empty(buffer.shape, dtype=buffer.dtype, device=device)
                setattr(module, name, empty)
    return model
