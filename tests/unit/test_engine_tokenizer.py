"""Token ids are those the model was trained on."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models

from connectors.torch_engine import tokenizer
from kvstore.errors import ConfigError

TOKENS = [*(chr(letter) for letter in range(33, 127)), "Ġ", "Ċ", "he", "12", "Ġ1", "<|end|>", "<tool>"]
FIELDS = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": [1] * (len(TOKENS) - 2) + [3, 4],
    "tokenizer.ggml.merges": ["h e", "Ġ 1", "1 2"],
    "tokenizer.ggml.eos_token_id": len(TOKENS) - 2,
    "tokenizer.chat_template": "{% for m in messages %}{{ m['content'] }}{{ eos_token }}\n{% endfor %}",
}


def pieces(pre: str, text: str) -> list[str]:
    return [TOKENS[token] for token in tokenizer.from_gguf(FIELDS | {"tokenizer.ggml.pre": pre}).encode(text)]


def test_each_pre_tokenizer_cuts_digits_as_its_model_learned_them() -> None:
    assert pieces("gpt-2", "he 12") == ["he", "Ġ1", "2"]
    assert pieces("smollm", "he 12") == ["he", "Ġ", "1", "2"]
    assert pieces("qwen2", "he 12") == ["he", "Ġ", "1", "2"]
    assert pieces("llama-bpe", "he 12") == ["he", "Ġ", "12"]


def test_special_tokens_in_text_are_one_token_and_leave_no_trace_when_decoded() -> None:
    built = tokenizer.from_gguf(FIELDS)
    ids = built.encode("he<|end|><tool>")
    assert [TOKENS[token] for token in ids] == ["he", "<|end|>", "<tool>"]
    assert built.decode(ids) == "he<tool>"


def test_a_conversation_goes_through_the_models_own_template() -> None:
    built = tokenizer.from_gguf(FIELDS)
    assert built.encode_chat([{"role": "user", "content": "he"}]) == built.encode("he<|end|>\n")


@pytest.mark.parametrize("field", [{"tokenizer.ggml.model": "llama"}, {"tokenizer.ggml.pre": "chatglm-bpe"}])
def test_a_vocabulary_it_would_read_wrongly_is_refused(field: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        tokenizer.from_gguf(FIELDS | field)


def test_a_directory_brings_tokenizer_and_template(tmp_path: Path) -> None:
    assert tokenizer.from_directory(tmp_path) is None
    Tokenizer(models.WordLevel({"hi": 0, "</s>": 1}, unk_token="</s>")).save(str(tmp_path / "tokenizer.json"))
    settings = {"eos_token": {"content": "</s>"}, "chat_template": "{{ messages[0]['content'] }}{{ eos_token }}"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    built = tokenizer.from_directory(tmp_path)
    assert built is not None
    assert built.encode("hi") == [0]
    assert built.encode_chat([{"role": "user", "content": "hi"}]) != [0]
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    built = tokenizer.from_directory(tmp_path)
    assert built is not None
    assert built.encode_chat([{"role": "user", "content": "hi"}]) == [0]


def test_bytes_come_back_as_they_went_in() -> None:
    text = "caf\u00e9 \U0001f389\n\tend"
    built = tokenizer.byte_level()
    assert built.decode(built.encode(text)) == text
    assert built.encode("<|im_end|>") == [258]
