"""Builds a tokenizer from the metadata of a GGUF file: GPT-2 style BPE, or sentencepiece BPE.

The file names the rule by which text is split before the merges; a name that is not known here is refused, because a
wrong rule gives wrong tokens without any sign of it. Must not read tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from headrace.base.errors import ModelSourceError, UnsupportedModelError
from headrace.base.log import get_logger
from headrace.text.token_bytes import SPM_SPACE
from headrace.text.tokenizer import Tokenizer
from headrace.text.tokenizer_directory import set_sequence_ends
from headrace.weights.gguf_file import GgufFile, StringArray

_log = get_logger(__name__)
_CONTROL, _USER_DEFINED = 3, 4
_SPECIAL_IDS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}

# The split patterns as the models' own tokenizer.json files have them.
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")


@dataclass(frozen=True)
class SplitRule:
    """How text is cut before the merges.

    Attributes:
        pattern: pieces are the matches of this; empty for GPT-2's own pattern.
        single_digits: each digit is cut off first.
        nfc: text is composed (Unicode NFC) first.
        whole_words: a piece that is in the vocabulary is one token whatever the merges say.
        add_bos: BOS is added where the file does not say.
    """

    pattern: str = ""
    single_digits: bool = False
    nfc: bool = False
    whole_words: bool = False
    add_bos: bool = False


_GPT2_RULE = SplitRule()
_DIGITS_RULE = SplitRule(single_digits=True)
_LLAMA3_RULE = SplitRule(_LLAMA3, whole_words=True, add_bos=True)
_QWEN2_RULE = SplitRule(_QWEN2, nfc=True)

SPLIT_RULES: dict[str, SplitRule] = {
    "default": _GPT2_RULE,
    "gpt-2": _GPT2_RULE,
    "phi-2": _GPT2_RULE,
    "smollm": _DIGITS_RULE,
    "starcoder": _DIGITS_RULE,
    "refact": _DIGITS_RULE,
    "codeshell": _DIGITS_RULE,
    "llama3": _LLAMA3_RULE,
    "llama-v3": _LLAMA3_RULE,
    "llama-bpe": _LLAMA3_RULE,
    "falcon3": _LLAMA3_RULE,
    "smaug-bpe": SplitRule(_LLAMA3),
    "dbrx": SplitRule(_LLAMA3),
    "qwen2": _QWEN2_RULE,
    "deepseek-r1-qwen": _QWEN2_RULE,
    "megrez": _QWEN2_RULE,
}
"""``tokenizer.ggml.pre`` -> rule. A file without the key counts as ``default``."""


def tokenizer_from_gguf(gguf: GgufFile, *, eos_ids: Sequence[int], chat_template: str | None) -> Tokenizer:
    """Build the tokenizer that a GGUF file describes.

    Args:
        gguf: the file.
        eos_ids: ids that end the output, besides the file's own.
        chat_template: Jinja source.

    Raises:
        ModelSourceError: the file has no vocabulary or a broken one.
        UnsupportedModelError: a tokenizer model or split rule that is not implemented.
    """
    vocabulary = _Vocabulary(gguf)
    if vocabulary.model == "gpt2":
        rule = split_rule(gguf)
        backend, add_bos = _byte_level(vocabulary, rule), rule.add_bos
    elif vocabulary.model == "llama":
        backend, add_bos = _sentencepiece(vocabulary, gguf), True
    else:
        raise UnsupportedModelError(
            f"{gguf.path}: tokenizer model {vocabulary.model!r} is not supported; supported: gpt2, llama",
            param="tokenizer",
        )
    _add_marked_tokens(backend, vocabulary)
    special = vocabulary.special_tokens()
    set_sequence_ends(
        backend,
        special,
        add_bos=bool(gguf.metadata.get("tokenizer.ggml.add_bos_token", add_bos)),
        add_eos=bool(gguf.metadata.get("tokenizer.ggml.add_eos_token", False)),
    )
    return Tokenizer(backend, special_tokens=special, eos_ids=eos_ids, chat_template=chat_template)


def split_rule(gguf: GgufFile) -> SplitRule:
    """Return the rule that the file names.

    Raises:
        UnsupportedModelError: it is not known.
    """
    name = str(gguf.metadata.get("tokenizer.ggml.pre", "default"))
    if "tokenizer.ggml.pre" not in gguf.metadata:
        _log.warning("%s: does not name its pre-tokenizer; GPT-2's is taken, tokens may be wrong", gguf.path)
    rule = SPLIT_RULES.get(name)
    if rule is None:
        raise UnsupportedModelError(
            f"{gguf.path}: pre-tokenizer {name!r} is not supported; supported: {', '.join(SPLIT_RULES)}. "
            "Name a directory with the model's tokenizer.json (--tokenizer)",
            param="tokenizer",
        )
    return rule


class _Vocabulary:
    """The arrays of ``tokenizer.ggml.*``."""

    def __init__(self, gguf: GgufFile) -> None:
        self._gguf = gguf
        self.model = self._get("model")
        tokens = self._get("tokens")
        if not isinstance(tokens, StringArray) or not tokens:
            raise ModelSourceError(f"{gguf.path}: has no vocabulary; name a tokenizer (--tokenizer)", param="tokenizer")
        self.tokens: list[str] = list(tokens)
        types = self._get("token_type")
        self.types: list[int] = types if isinstance(types, list) else []
        if self.types and len(self.types) != len(self.tokens):
            raise ModelSourceError(f"{gguf.path}: {len(self.tokens)} tokens, but {len(self.types)} token types")

    def _get(self, name: str) -> Any:
        return self._gguf.metadata.get(f"tokenizer.ggml.{name}")

    def ids(self) -> dict[str, int]:
        return {token: token_id for token_id, token in enumerate(self.tokens)}

    def merges(self) -> list[tuple[str, str]] | None:
        lines = self._get("merges")
        if not isinstance(lines, StringArray):
            return None
        pairs = []
        for line in lines:
            # A part may begin with a space in some vocabularies, so the separator is looked for after it.
            left, separator, right = line[:1] + line[1:].partition(" ")[0], line[1:].find(" "), ""
            if separator >= 0:
                right = line[separator + 2 :]
            pairs.append((left, right))
        return pairs

    def scores(self) -> list[float]:
        scores = self._get("scores")
        if not isinstance(scores, list) or len(scores) != len(self.tokens):
            raise ModelSourceError(f"{self._gguf.path}: the vocabulary has neither merges nor a score for each token")
        return scores

    def of_type(self, kind: int) -> list[str]:
        return [token for token, token_type in zip(self.tokens, self.types, strict=False) if token_type == kind]

    def special_tokens(self) -> dict[str, str]:
        found = {}
        for name, key in _SPECIAL_IDS.items():
            token_id = self._get(key)
            if isinstance(token_id, int) and 0 <= token_id < len(self.tokens):
                found[name] = self.tokens[token_id]
        return found


def _build(model: dict[str, int], merges: Iterable[tuple[str, str]], **options: Any) -> models.BPE:
    try:
        return models.BPE(vocab=model, merges=list(merges), **options)
    except Exception as error:  # the library raises plain Exception
        raise ModelSourceError(f"the vocabulary of the GGUF file is broken: {error}", param="tokenizer") from error


def _byte_level(vocabulary: _Vocabulary, rule: SplitRule) -> tokenizers.Tokenizer:
    merges = vocabulary.merges()
    if merges is None:
        raise ModelSourceError("the GGUF file has a gpt2 vocabulary without merges", param="tokenizer")
    backend = tokenizers.Tokenizer(_build(vocabulary.ids(), merges, ignore_merges=rule.whole_words))
    if rule.nfc:
        backend.normalizer = normalizers.NFC()
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if rule.single_digits else []
    if rule.pattern:
        steps.append(pre_tokenizers.Split(Regex(rule.pattern), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not rule.pattern))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(vocabulary: _Vocabulary, gguf: GgufFile) -> tokenizers.Tokenizer:
    ids = vocabulary.ids()
    merges = vocabulary.merges()
    if merges is None:
        merges = merges_from_scores(ids, vocabulary.tokens, vocabulary.scores())
    unknown = vocabulary.special_tokens().get("unk_token")
    backend = tokenizers.Tokenizer(_build(ids, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    prefix = bool(gguf.metadata.get("tokenizer.ggml.add_space_prefix", True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(
        replacement=SPM_SPACE, prepend_scheme="first" if prefix else "never", split=False
    )
    steps: list[Any] = [decoders.Replace(SPM_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        steps.append(decoders.Strip(content=" ", left=1))
    backend.decoder = decoders.Sequence(steps)
    return backend


def merges_from_scores(ids: dict[str, int], tokens: Sequence[str], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Recover the merges of a sentencepiece BPE vocabulary.

    Sentencepiece joins the neighbours whose union has the best score. Written as ranked merges: every way to cut a
    token into two tokens, best score of the whole first; among equals the longer left part first.
    """
    found: list[tuple[float, int, int, int, int, str, str]] = []
    for token, score in zip(tokens, scores, strict=True):
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in ids and right in ids:
                found.append((-score, -len(left), -len(right), ids[left], ids[right], left, right))
    # Only the first three decide; sorting is stable and keeps the order of tokens, and of cuts inside a token.
    found.sort(key=lambda item: item[:3])
    return [(item[5], item[6]) for item in found]


def _add_marked_tokens(backend: tokenizers.Tokenizer, vocabulary: _Vocabulary) -> None:
    """Make control tokens special, and keep user-defined ones whole."""
    control = [AddedToken(token, normalized=False, special=True) for token in vocabulary.of_type(_CONTROL) if token]
    backend.add_special_tokens(control)
    user = [AddedToken(token, normalized=False, special=False) for token in vocabulary.of_type(_USER_DEFINED) if token]
    backend.add_tokens(user)
