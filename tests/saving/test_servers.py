"""The rules of servers, and the page that says them: `python -m tests.saving.test_servers` writes it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from petune.saving.servers import ALIASES, SERVERS, Server

DOCUMENT = Path(__file__).parent.parent.parent / "docs" / "serving.md"
HEAD = """# Adapters for servers

Written by `python -m tests.saving.test_servers` from `petune/saving/servers.py`; a test compares.

```
# needs a run
petune export RUN --to vllm          # the last line says what to type there
```

`--to vllm | sglang | llamacpp | ollama` writes a LoRA by the rules of a server, in `RUN/NAME` or `--out
DIR`. Files hold plain LoRA whatever trained it (rank-stabilised, ranks and alphas by layer, PiSSA): one
rank, grown by zeros to a legal one where the server has such, a whole number for alpha, every other factor
in B. Names are those of the class that the base's `config.json` asks for: a decoder that was tuned alone is
found in the checkpoint of several modalities that it came from, and the [text
model](how-to/multimodal.md) of one has its names there. Experts are written one by one, each as
three linears by the names of the checkpoint (Mixtral's are `block_sparse_moe.experts.0.w1`); with one
expert of a block all of it are in the file, with zeros for a weight that has no update. Before the folder
appears the server is played on its files, as these rules say it reads them: each layer's update must be
what was trained (1e-4 of its norm, in float32), and logits on sixteen tokens from all over the vocabulary
within 1e-3 (in float32; of a bfloat16 base as near as its rounding lets them). What a server does not take
is refused, with its words where it has some, and with the remedy, which mostly is `petune merge RUN`: every
server serves a whole model.

These are rules as they were read, in the releases named. No server runs in the tests.
"""
TAIL = """
## GGUF and Modelfiles

GGUF files are written and read back by the package `gguf` (`pip install gguf`); without it the message says
what to type with llama.cpp's own script. Rows of q and k are put into the order in which llama.cpp rotates
them.

For Ollama there is a `Modelfile` beside the adapter: `FROM`, `ADAPTER`, a `TEMPLATE` and stop parameters.
What a chat template says between one role's words and the next one's is asked of it with marked turns,
written in Go's words, and compared with it on a hundred dialogues; the token that the tokenizer puts before
every text is left to Ollama. A template that does more (counts turns, reads tools) is refused. Ollama
cannot trim: spaces around what a user types stay, where the chat template would cut them.
"""


def said(value: str | tuple[object, ...]) -> str:
    return (value if isinstance(value, str) else ", ".join(map(str, value))) or "any"


ROWS: dict[str, Callable[[Server], str]] = {
    "read in": lambda server: server.version,
    "files": lambda server: (
        {"peft": "peft's two", "gguf": "`adapter.gguf`"}[server.layout]
        + (f"; peft's two for {said(server.peft_for)}" if server.peft_for else "")
    ),
    "bases": lambda server: said(server.models),
    "text models inside": lambda server: said(server.wholes) if server.wholes else "-",
    "ranks": lambda server: said(server.ranks),
    "modules": lambda server: said(server.only),
    "all or none in the file": lambda server: "; ".join(map(said, server.together)) or "-",
    "in every block or none": lambda server: "yes" if server.whole else "-",
    "table of tokens": lambda server: "yes" if server.embeddings else "no",
    "experts, one by one": lambda server: said(tuple(server.experts)) if server.experts else "no",
    "modules trained whole": lambda server: said(server.heads) if server.heads else "no",
}


def page() -> str:
    """The document."""
    servers = SERVERS.values()
    lines = [
        HEAD,
        f"| | {' | '.join(server.title for server in servers)} |",
        "|---" * (len(SERVERS) + 1) + "|",
    ]
    lines += [f"| {name} | {' | '.join(map(cell, servers))} |" for name, cell in ROWS.items()]
    lines += ["", "What is refused, and why:", "", "| | why |", "|---|---|"]
    for server in servers:
        lines += [f"| {server.title}: {feature} | {words} |" for feature, words in server.refuses.items()]
    return "\n".join([*lines, TAIL])


def test_the_page_is_what_the_table_says() -> None:
    assert DOCUMENT.read_text(encoding="utf-8") == page(), "python -m tests.saving.test_servers"


def test_rules_are_whole() -> None:
    for server in SERVERS.values():
        assert server.layout == "peft" or set(server.architectures) == set(server.models)
        assert list(server.ranks) == sorted(server.ranks)
        assert {"dora", "ia3", "bias", "heads", "token_rows", "adapter", "side", "Conv1D"} <= set(
            server.refuses
        )
        assert server.embeddings or "embedding" in server.refuses
        assert "experts" in server.refuses and set(server.experts) <= set(server.models)
        assert not server.only or "only" in server.refuses
    assert set(ALIASES.values()) <= set(SERVERS)


if __name__ == "__main__":
    DOCUMENT.write_text(page(), encoding="utf-8")
    sys.exit()
