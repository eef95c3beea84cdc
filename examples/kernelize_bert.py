"""Train a small BERT with landmarks by the Trainer of transformers, in a few seconds on a CPU.

    python examples/kernelize_bert.py

The texts are synthetic, of different lengths and padded: the head averages over the tokens that the attention mask
names. `AutoModelForSequenceClassification.from_pretrained(...)` can replace the small BERT.
"""

import tempfile

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

from kernelhead import kernelize
from kernelhead.surgery import changes

WORDS, SHORTEST, LONGEST, CLASSES = 50, 3, 10, 3


class Texts(Dataset[dict[str, Tensor]]):
    """Random words. One of them, at a random position, tells the class."""

    def __init__(self, samples: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.words = torch.randint(CLASSES + 1, WORDS, (samples, LONGEST), generator=generator)
        self.labels = torch.randint(CLASSES, (samples,), generator=generator)
        lengths = torch.randint(SHORTEST, LONGEST + 1, (samples,), generator=generator)
        positions = (torch.rand(samples, generator=generator) * lengths).long()
        self.words[torch.arange(samples), positions] = self.labels + 1
        self.mask = (torch.arange(LONGEST) < lengths[:, None]).long()
        self.words *= self.mask  # 0 is padding

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.words[index], "attention_mask": self.mask[index], "labels": self.labels[index]}


def main() -> float:
    """Train, print, and return the accuracy in percent."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=WORDS, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64
    )
    model = kernelize(BertForSequenceClassification(config), CLASSES, landmarks=64)
    print(changes(model))

    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            folder, num_train_epochs=6, per_device_train_batch_size=32, learning_rate=3e-3, report_to=[], use_cpu=True,
            save_strategy="no", logging_strategy="epoch", disable_tqdm=True, dataloader_pin_memory=False,
        )  # fmt: skip
        trainer = Trainer(model, settings, train_dataset=Texts(1000, seed=0))
        trainer.train()
        result = trainer.predict(Texts(300, seed=1))
    accuracy = 100 * float((result.predictions.argmax(1) == result.label_ids).mean())
    print(f"accuracy {accuracy:.1f} % on new texts")
    print("coefficients of the kernel:", [round(a, 3) for a in model.classifier.alpha.tolist()])
    return accuracy


if __name__ == "__main__":
    main()
