"""Small models that the tests trace by `module:function`."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

Traced = tuple[nn.Module, Callable[[], torch.Tensor]]


def perceptron(micro_batch: int) -> Traced:
    """Two matrices of a mebibyte each in fp32, whose inputs and outputs can be counted by hand."""
    model = nn.Sequential(nn.Linear(512, 512, bias=False), nn.ReLU(), nn.Linear(512, 512, bias=False))
    rows = torch.zeros(micro_batch, 512)
    return model, lambda: model(rows).sum()


def reads_a_value() -> Traced:
    """A model that decides by a number that a fake tensor does not have."""
    model = nn.Linear(4, 4)

    def loss() -> torch.Tensor:
        out = model(torch.zeros(2, 4)).sum()
        return out if out.item() > 0 else -out

    return model, loss


class _Doubtful(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Choose by a value."""
        return self.inner(x) if x.sum().item() > 0 else -self.inner(x)


def reads_a_value_in_a_layer() -> Traced:
    """Two layers that each decide by a number."""
    model = nn.Sequential()
    model.layers = nn.ModuleList(_Doubtful() for _ in range(2))
    return model, lambda: model.layers[1](model.layers[0](torch.zeros(2, 4))).sum()


class _DiffusionBlock(nn.Module):
    """A transformer's block whose norms the time step shifts and scales, as in DiT (arXiv:2212.09748, section 3.2)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.condition = nn.Linear(width, 6 * width)

    def forward(self, x: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
        """Attend and project, conditioned on the step."""
        shift, scale, gate, shift2, scale2, gate2 = self.condition(F.silu(step))[:, None].chunk(6, -1)
        y = F.layer_norm(x, x.shape[-1:]) * (1 + scale) + shift
        q, k, v = (each.unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in self.qkv(y).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v)
        x = x + gate * self.out(attended.transpose(1, 2).flatten(2))
        y = F.layer_norm(x, x.shape[-1:]) * (1 + scale2) + shift2
        return x + gate2 * self.down(F.gelu(self.up(y)))


class _DiffusionTransformer(nn.Module):
    def __init__(self, width: int = 64, layers: int = 3) -> None:
        super().__init__()
        self.patches = nn.Conv2d(4, width, 2, 2)
        self.step = nn.Linear(1, width)
        self.blocks = nn.ModuleList(_DiffusionBlock(width, 4) for _ in range(layers))
        self.head = nn.Linear(width, 16)

    def forward(self, images: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
        """Return the noise of each patch."""
        x, condition = self.patches(images).flatten(2).transpose(1, 2), self.step(step)
        for block in self.blocks:
            x = block(x, condition)
        return self.head(x)


def diffusion_transformer(micro_batch: int) -> Traced:
    """A DiT of three blocks over 8 x 8 patches."""
    model, images, step = _DiffusionTransformer(), torch.zeros(micro_batch, 4, 16, 16), torch.zeros(micro_batch, 1)
    return model, lambda: model(images, step).square().mean()


class _Unet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into, self.down = nn.Conv2d(3, 32, 3, padding=1), nn.Conv2d(32, 64, 3, 2, padding=1)
        self.middle = nn.Sequential(nn.GroupNorm(8, 64), nn.SiLU(), nn.Conv2d(64, 64, 3, padding=1))
        self.up, self.out = nn.ConvTranspose2d(64, 32, 2, 2), nn.Conv2d(64, 3, 3, padding=1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Down, through and up again, beside what was there before."""
        wide = F.silu(self.into(images))
        deep = self.down(wide)
        return self.out(torch.cat((wide, self.up(deep + self.middle(deep))), 1))


def unet(micro_batch: int) -> Traced:
    """A U-Net of one level."""
    model, images = _Unet(), torch.zeros(micro_batch, 3, 32, 32)
    return model, lambda: (model(images) - images).square().mean()
