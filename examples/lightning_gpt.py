"""Train a byte-level GPT under Lightning, checkpointed without stopping; stop it any way you like and run it again.

The text is the Python standard library, which is on every machine that can run this. Two lines make a training script
recoverable: the `OverlappedCheckpoint` callback, and `ckpt_path="last"`.

    python examples/lightning_gpt.py --dir runs/gpt --max-steps 200
    kill -9 <its pid>
    python examples/lightning_gpt.py --dir runs/gpt --max-steps 200      # continues, bit for bit
"""

from __future__ import annotations

import argparse
import math
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from lightning_ckpt import OverlappedCheckpoint

VOCABULARY = 256


def standard_library(nbytes: int) -> bytes:
    """The first ``nbytes`` of the standard library's sources, in the order of their names."""
    root = Path(sysconfig.get_paths()["stdlib"])
    text = bytearray()
    for path in sorted(root.rglob("*.py")):
        if "site-packages" in path.parts or "dist-packages" in path.parts:
            continue
        text += path.read_bytes()
        if len(text) >= nbytes:
            return bytes(text[:nbytes])
    raise SystemExit(f"{root} holds only {len(text)} bytes of Python: ask for fewer with --text-bytes.")


class Chunks(Dataset[Tensor]):
    """A text cut into chunks of ``context + 1`` bytes: the input and, one byte on, the target."""

    def __init__(self, text: bytes, context: int) -> None:
        self.bytes = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.context = context

    def __len__(self) -> int:
        return (len(self.bytes) - 1) // self.context

    def __getitem__(self, index: int) -> Tensor:
        start = index * self.context
        return self.bytes[start : start + self.context + 1].long()


class Block(nn.Module):
    """Attention and a feed-forward layer, each normalised first and added to its input."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm_attention, self.norm_forward = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.forward_layer = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + F.dropout(self.attend(self.norm_attention(x)), self.dropout, self.training)
        return x + F.dropout(self.forward_layer(self.norm_forward(x)), self.dropout, self.training)

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out


class ByteGPT(LightningModule):
    """A GPT over bytes, trained with AdamW, decay on matrices only, a linear warm-up and a cosine."""

    def __init__(
        self,
        *,
        context: int = 128,
        width: int = 320,
        layers: int = 4,
        heads: int = 5,
        dropout: float = 0.1,
        learning_rate: float = 1e-3,
        warmup_steps: int = 10,
        max_steps: int = 200,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.learning_rate, self.warmup_steps, self.max_steps = learning_rate, warmup_steps, max_steps
        self.embed, self.position = nn.Embedding(VOCABULARY, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads, dropout) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        logits: Tensor = self.head(self.norm(self.blocks(self.embed(tokens) + self.position(places))))
        return logits

    def training_step(self, batch: Tensor, batch_index: int) -> Tensor:
        loss = F.cross_entropy(self(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        parameters = [p for p in self.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": 0.1},
            {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=self.learning_rate, betas=(0.9, 0.95))
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, self.learning_rate_factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def learning_rate_factor(self, step: int) -> float:
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        progress = (step - self.warmup_steps) / max(1, self.max_steps - self.warmup_steps)
        return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, progress)))


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Byte-level GPT on the Python standard library, never lost.")
    parser.add_argument("--dir", default="runs/gpt", help="directory of the run; checkpoints go below it")
    parser.add_argument("--max-steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--context", type=int, default=128, help="bytes that the model sees")
    parser.add_argument("--width", type=int, default=320)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--text-bytes", type=int, default=2_000_000)
    parser.add_argument("--every", type=int, default=10, help="steps between checkpoints")
    parser.add_argument("--window", type=int, default=4, help="steps that one checkpoint is spread over")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args(arguments)


def train(options: argparse.Namespace, callbacks: Sequence[Callback] = ()) -> Trainer:
    """Train to ``options.max_steps``, from the newest complete checkpoint if there is one."""
    seed_everything(options.seed, verbose=False)
    text = standard_library(options.text_bytes)
    loader = DataLoader(Chunks(text, options.context), batch_size=options.batch_size, shuffle=True)
    model = ByteGPT(
        context=options.context, width=options.width, layers=options.layers, max_steps=options.max_steps
    )
    checkpoint = OverlappedCheckpoint(
        dirpath=f"{options.dir}/checkpoints",
        every_n_train_steps=options.every,
        save_top_k=-1,
        mode="multi_step",
        window_steps=options.window,
        metrics_path=f"{options.dir}/saves.jsonl",
    )
    trainer = Trainer(
        accelerator="cpu",
        max_steps=options.max_steps,
        gradient_clip_val=1.0,
        callbacks=[checkpoint, *callbacks],
        default_root_dir=options.dir,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, loader, ckpt_path="last")
    return trainer


if __name__ == "__main__":
    trained = train(parse())
    print(f"step {trained.global_step}: loss {float(trained.callback_metrics['loss']):.4f}")
