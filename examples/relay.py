"""Train a small policy on countdown puzzles with GRPO on 8 CPU ranks and change its parallel plan while it runs.

The changes come from the schedule below, not from a controller. Then the same run is made without any change,
and the largest difference between the parameters of both is printed.
"""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from rich.console import Console
from transformers import Qwen3Config

from lightning_nereus import GRPOModule, NereusStrategy, Plan, PromptDataModule
from lightning_nereus.rl.countdown import ALPHABET, countdown_progress, countdown_prompts
from lightning_nereus.rl.tokenizer import CharTokenizer
from lightning_nereus.runtime.checkpoint import read_tensors

STEPS = 24
FIRST = {"actor.generation": {"dp": 8}, "actor.training": {"dp": 8}}
SCHEDULE: dict[int, dict[str, Any]] = {
    6: {"actor.generation": {"dp": 8}, "actor.training": {"tp": 2, "dp": 4}},
    12: {"actor.generation": {"tp": 2, "dp": 2}, "actor.training": {"pp": 2, "dp": 2, "micro_batches": 4}},
    18: {"actor.generation": {"dp": 4}, "actor.training": {"tp": 2, "pp": 2, "dp": 2, "micro_batches": 2}},
}


class ScheduledRelay(Callback):
    """Re-lays the units at the end of given RL steps and shows every step."""

    def __init__(self, schedule: dict[int, dict[str, Any]]) -> None:
        self.schedule = schedule
        self.console = Console(highlight=False, soft_wrap=True)

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        strategy: Any = trainer.strategy
        step, metrics = trainer.global_step, trainer.callback_metrics
        reward, length = float(metrics["reward"]), float(metrics["response_length"])
        if trainer.is_global_zero:
            self.console.print(f"step {step:3d}  reward {reward:.3f}  length {length:5.1f}  {strategy.plan}")
        if step in self.schedule:
            report = strategy.relay(Plan.from_dict(self.schedule[step]))
            if trainer.is_global_zero:
                kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(report.primitives.items()))
                moved = report.moved_bytes / 2**20
                self.console.print(f"[bold]  re-laid[/]: {kinds}; {moved:.2f} MiB in {report.seconds:.3f} s")


def run(directory: Path, schedule: dict[int, dict[str, Any]]) -> dict[str, Any]:
    tokenizer = CharTokenizer(ALPHABET)
    config = Qwen3Config(
        vocab_size=tokenizer.vocab_size,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        tie_word_embeddings=True,
        max_position_embeddings=128,
        initializer_range=0.1,
    )
    module = GRPOModule(config, countdown_progress, samples=8, max_new_tokens=24, lr=3e-3)
    checkpoint = ModelCheckpoint(directory, save_last=True)
    trainer = Trainer(
        strategy=NereusStrategy(plan=FIRST),
        accelerator="cpu",
        devices=8,
        max_steps=STEPS,
        precision="64-true",
        logger=False,
        callbacks=[ScheduledRelay(schedule), checkpoint],
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, PromptDataModule(countdown_prompts(), tokenizer, batch_size=8))
    return read_tensors(directory / "last.ckpt")


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    with TemporaryDirectory() as folder:
        print("A run whose plan changes three times, by a schedule:")
        changed = run(Path(folder, "changed"), SCHEDULE)
        print("The same run without changes:")
        undisturbed = run(Path(folder, "undisturbed"), {})
    largest = max(float((changed[name] - tensor).abs().max()) for name, tensor in undisturbed.items())
    print(f"Largest difference of any parameter or Adam tensor after {STEPS} RL steps: {largest:.1e} (float64)")
