"""Stage 6: Hugging Face's Trainer. The two lines are an import and `protect(trainer, ...)`.

    python examples/06_huggingface.py                    alone, or
    torchrun --nproc_per_node=2 examples/06_huggingface.py

The model is made here, so nothing is downloaded. Needs: pip install "cordee[train,huggingface]"
"""

import sysconfig
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

from cordee.train.integrations.huggingface import protect  # NEW

CONTEXT, STEPS = 32, 60


class Windows(Dataset):
    """The text of the standard library, cut into pieces."""

    def __init__(self) -> None:
        sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        self.data = torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in sources)), dtype=torch.uint8)

    def __len__(self) -> int:
        return len(self.data) // CONTEXT

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        piece = self.data[i * CONTEXT : (i + 1) * CONTEXT].long()
        return {"input_ids": piece, "labels": piece}


set_seed(0)
sizes = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
trainer = Trainer(
    model=LlamaForCausalLM(LlamaConfig(**sizes, max_position_embeddings=CONTEXT, attention_dropout=0.1)),
    args=TrainingArguments(
        output_dir="out",
        max_steps=STEPS,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        learning_rate=1e-3,
        lr_scheduler_type="cosine",
        logging_steps=20,
        use_cpu=not torch.cuda.is_available(),
        report_to=[],
        disable_tqdm=True,
    ),
    train_dataset=Windows(),
)
# NEW: it goes on, saves and leaves; no save_steps, no resume_from_checkpoint
protect(trainer, to="checkpoints/06", every="30s")
trainer.train()
print(f"step {trainer.state.global_step}: loss {trainer.state.log_history[-2]['loss']:.6f}", flush=True)
if torch.distributed.is_initialized():
    torch.distributed.destroy_process_group()
