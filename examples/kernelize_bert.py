"""A small BERT with a kernel head under the Trainer of transformers, on made-up texts. A few seconds on a CPU.

    python examples/kernelize_bert.py

With `AutoModelForSequenceClassification.from_pretrained(...)` in the place of the small BERT, the rest stays as it is.
"""

import tempfile

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

from kernelhead import kernelize
from kernelhead.surgery import changes

WORDS, LENGTH, CLASSES = 50, 10, 3


class Texts(Dataset[dict[str, Tensor]]):
    """Random words, of which one, at a random place, tells the class."""

    def __init__(self, samples: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.words = torch.randint(CLASSES + 1, WORDS, (samples, LENGTH), generator=generator)
        self.labels = torch.randint(CLASSES, (samples,), generator=generator)
        places = torch.randint(1, LENGTH, (samples,), generator=generator)
        self.words[torch.arange(samples), places] = self.labels + 1

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.words[index], "labels": self.labels[index]}


def main() -> float:
    """Train, print, and return the accuracy in percent."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=WORDS, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64
    )
    model = kernelize(BertForSequenceClassification(config), CLASSES)
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
