"""Llama, two LoRA adapters on one base, trained in one batch: docstrings of modules it has never seen, and
dotted names of functions. A script, because a recipe trains one adapter.

    python recipes/llama_two_adapters.py [STEPS] [FOLDER]      40 steps, runs/llama_two_adapters

Prints the loss of each adapter, and of the base, on held-out rows of both kinds, and leaves both in folders
of their own.
"""

import json
import sys

import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer

import petune
from petune.demo import data_path, model_path

steps, out = int((sys.argv[1:] or ["40"])[0]), (sys.argv[2:] or ["runs/llama_two_adapters"])[0]
tokenizer = AutoTokenizer.from_pretrained(model_path("tiny-llama"), padding_side="right")
model = AutoModelForCausalLM.from_pretrained(model_path("tiny-llama"))
lines = (data_path("docstrings") / "domain_train.jsonl").read_text().splitlines()
rows = [json.loads(line) for line in lines]
texts = {  # of each adapter
    "docstrings": [row["text"] for row in rows],
    "names": [f"{row['module']}.{row['name']}" for row in rows],
}


def losses(names: list[str | None], batch: list[str]) -> torch.Tensor:
    """The mean loss of each row, with the adapter that is named for it, or with none."""
    inputs = tokenizer(batch, padding=True, truncation=True, max_length=64, return_tensors="pt")
    labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)[:, 1:]
    with petune.per_row(model, names):
        logits = model(**inputs).logits[:, :-1]
    each = cross_entropy(logits.mT, labels, reduction="none")
    return each.sum(1) / (labels != -100).sum(1)


for name in texts:
    model = petune.add(model, name, r=8)
optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=5e-3)
draw = torch.Generator().manual_seed(0)
for _ in range(steps):
    names = [name for name in texts for at in range(4)]
    chosen = torch.randint(64, 1000, (len(names),), generator=draw).tolist()  # the first 64 are held out
    losses(names, [texts[name][at] for name, at in zip(names, chosen, strict=True)]).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
with torch.no_grad():
    for tuned in (*texts, None):
        found = {kind: losses([tuned] * 64, texts[kind][:64]).mean().item() for kind in texts}
        print(
            f"{tuned or 'base':10}", "  ".join(f"loss on {kind} {loss:.3f}" for kind, loss in found.items())
        )
print("saved", petune.save(model, out))
