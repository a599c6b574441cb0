"""Text to token ids and back: from a GGUF file's vocabulary, a ``tokenizer.json``, or plain bytes."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Split

from kvstore.errors import ConfigError

Message = Mapping[str, str]
"""``{"role": "user", "content": "..."}``."""

_CONTROL, _USER_DEFINED = 3, 4  # token types of GGUF

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


class ChatTokenizer:
    """A ``tokenizers`` tokenizer with the model's chat template."""

    def __init__(self, tokenizer: Tokenizer, chat_template: str, variables: Mapping[str, str]) -> None:
        """``variables`` are what templates expect beside the messages: ``bos_token`` and the like."""
        self._tokenizer = tokenizer
        self._variables = variables
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = _raise_exception
        self._template = environment.from_string(chat_template)

    def encode(self, text: str) -> list[int]:
        """Ids of ``text``; special tokens written in it are recognised."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Ids of a conversation, up to where the assistant begins to answer."""
        return self.encode(self._template.render(messages=messages, add_generation_prompt=True, **self._variables))

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ``ids`` without special tokens."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=True)
        return text


def from_gguf(fields: Mapping[str, Any]) -> ChatTokenizer:
    """The tokenizer that a GGUF file carries. Raises ``ConfigError`` for a kind that is not byte-level BPE."""
    kind, pre = fields["tokenizer.ggml.model"], fields.get("tokenizer.ggml.pre", "default")
    if kind != "gpt2":
        raise ConfigError(f"GGUF tokenizer {kind!r} is not supported; use a directory with tokenizer.json")
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = _byte_level_bpe({token: index for index, token in enumerate(tokens)}, merges, _pre_tokenizer(pre))
    for token, token_type in zip(tokens, fields["tokenizer.ggml.token_type"], strict=True):
        if token_type in (_CONTROL, _USER_DEFINED):
            tokenizer.add_tokens([AddedToken(token, special=token_type == _CONTROL, normalized=False)])
    names = {"bos_token": "tokenizer.ggml.bos_token_id", "eos_token": "tokenizer.ggml.eos_token_id"}
    variables = {name: tokens[fields[field]] for name, field in names.items() if field in fields}
    return ChatTokenizer(tokenizer, fields.get("tokenizer.chat_template", _CHATML), variables)


def from_directory(path: Path) -> ChatTokenizer | None:
    """The tokenizer of a checkpoint directory; None if it has none."""
    if not (path / "tokenizer.json").is_file():
        return None
    settings = {}
    if (path / "tokenizer_config.json").is_file():
        settings = json.loads((path / "tokenizer_config.json").read_text())
    names = ("bos_token", "eos_token")
    tokens = {name: settings[name] for name in names if settings.get(name)}
    variables = {name: token["content"] if isinstance(token, dict) else token for name, token in tokens.items()}
    template = path / "chat_template.jinja"
    chat_template = template.read_text() if template.is_file() else settings.get("chat_template", _CHATML)
    return ChatTokenizer(Tokenizer.from_file(str(path / "tokenizer.json")), chat_template, variables)


def byte_level() -> ChatTokenizer:
    """One token per byte, then ``<|endoftext|>``, ``<|im_start|>`` and ``<|im_end|>``: ids 256 to 258."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = _byte_level_bpe({letter: index for index, letter in enumerate(alphabet)}, [], _pre_tokenizer("gpt-2"))
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    return ChatTokenizer(tokenizer, _CHATML, {"eos_token": "<|im_end|>"})


def _byte_level_bpe(vocabulary: dict[str, int], merges: list[Any], pre: PreTokenizer) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _pre_tokenizer(name: str) -> PreTokenizer:
    """How a text is cut into words before BPE, by llama.cpp's name for it."""
    byte_level = ByteLevel(add_prefix_space=False)
    if name in ("gpt-2", "default"):
        return byte_level
    if name == "smollm":
        return pre_tokenizers.Sequence([Digits(individual_digits=True), byte_level])
    digits = {"qwen2": "", "llama-bpe": "{1,3}"}.get(name)
    if digits is None:
        raise ConfigError(f"GGUF pre-tokenizer {name!r} is not supported; use a directory with tokenizer.json")
    words = Split(Regex(_WORDS % digits), "isolated")
    return pre_tokenizers.Sequence([words, ByteLevel(add_prefix_space=False, use_regex=False)])


def _raise_exception(message: str) -> None:
    raise ConfigError(f"the model's chat template refuses the conversation: {message}")
